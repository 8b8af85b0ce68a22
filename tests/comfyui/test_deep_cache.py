"""DeepCache in a real ComfyUI: what calls the model, sizes, what breaks in mid-run, and the node."""

import gc
import weakref

import comfy.model_management
import comfy.model_sampling
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache import run as running
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.nodes.deep_cache import AccelDeepCache
from kit import tiny_models
from kit.blocks import heard
from kit.deep_cache import assert_no_trace, cached, calls_of, counts, last_run, said
from kit.step_cache import Fixed

# Latents 16×16, 20×30 (720×960 at this scale), 30×20, 23×31, 25×33, 11×17; pixels here.
SIZES = [(128, 128), (240, 160), (160, 240), (248, 184), (264, 200), (136, 88)]
RUN = {"width": 72, "height": 88, "steps": 7}
TAKEN, FULL, SKIPPED = "FFSSFSS", 3, 4
"""Of these steps at interval 3."""


def test_skipped_step_calls_no_model_and_the_image_is_another(small_unet, sample):
    calls, plain = calls_of(small_unet), sample(small_unet, **RUN)
    assert len(calls) == 7
    every_step = list(calls)
    calls.clear()
    made = sample(cached(small_unet), **RUN)
    assert calls == [level for level, one in zip(every_step, TAKEN, strict=True) if one == "F"]
    assert records.last().skipping.steps_taken == TAKEN
    assert made.isfinite().all() and not torch.equal(made, plain)
    assert torch.equal(sample(cached(small_unet), **RUN), made)
    assert_no_trace(small_unet)
    assert torch.equal(sample(small_unet, **RUN), plain)


def test_off_adds_nothing_to_the_model_and_later_nodes_replace_earlier_ones(small_unet, sample):
    off, plain = cached(small_unet, 1), sample(small_unet, **RUN)
    assert not any(host.KEY in by_key for by_key in off.wrappers.values())
    assert torch.equal(sample(off, **RUN), plain)
    assert torch.equal(sample(cached(cached(small_unet), 1), **RUN), plain)
    assert torch.equal(sample(cached(cached(small_unet), 2), **RUN), sample(cached(small_unet, 2), **RUN))
    assert counts() == (4, 3)


def test_one_model_takes_every_size_and_batch_in_turn(small_unet, sample, caplog):
    model = cached(small_unet)
    for width, height in SIZES:
        for batch in (1, 2):
            out = sample(model, width, height, batch, steps=5)
            assert out.shape == (batch, 4, height // 8, width // 8) and out.isfinite().all()
            assert counts() == (3, 2)
    assert torch.equal(sample(model, *SIZES[0], steps=5), sample(cached(small_unet), *SIZES[0], steps=5))
    assert said(caplog) == []


def test_second_sampler_of_a_workflow_has_a_run_of_its_own(small_unet, sample):
    """As for a hires fix; it counts from its own first step."""
    model, other = cached(small_unet), cached(tiny_models.small_unet(seed=3))
    low = sample(model, 120, 160, steps=4)
    high = torch.nn.functional.interpolate(low, (31, 23))
    for second in (model, other):
        twice = sample(second, steps=5, denoise=0.5, latent=high)
        assert records.last().skipping.steps_taken == "FFSSF"
        assert torch.equal(twice, sample(cached(second), steps=5, denoise=0.5, latent=high))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_to_single_as_without_us(dtype, sample):
    half, single = tiny_models.small_unet(dtype=dtype), tiny_models.small_unet()
    made, expected, plain, exact = (
        sample(model, 72, 88, 2, steps=7) for model in (cached(half), cached(single), half, single)
    )
    assert counts()[1] and (made - expected).abs().max() <= 4 * (plain - exact).abs().max()


@pytest.mark.parametrize("flow", [False, True])
def test_run_knows_the_window_and_the_kind_of_its_noise_levels(small_unet, sample, monkeypatch, flow):
    class Flow(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
        pass

    made, model = [], small_unet.clone()
    monkeypatch.setattr(host, "DeepCacheRun", lambda *given, **more: made.append((given, more)) or 1 / 0)
    if flow:
        model.add_object_patch("model_sampling", Flow())
    sampling = model.get_model_object("model_sampling")
    sample(cached(model, start_percent=0.25, end_percent=0.75), 64, 64, steps=4)
    (((_, facts), more),) = made
    assert more["window"] == tuple(float(sampling.percent_to_sigma(percent)) for percent in (0.25, 0.75))
    assert facts.is_flow == flow and facts.levels[0] == pytest.approx(1.0 if flow else 14.61, abs=0.01)


def test_run_tells_what_it_did(small_unet, sample, caplog):
    with caplog.at_level("INFO"), heard("deep_cache_run") as events:
        sample(cached(small_unet), **RUN)
    (told,) = events
    assert told["skipping"].steps_taken == TAKEN
    assert len(told["began"]) == 7 and sorted(told["began"]) == list(told["began"])
    assert last_run() == dict(full_steps=FULL, skipped_steps=SKIPPED, target_db=40.0, skipped_work=SKIPPED / 7)
    assert f"skipped {SKIPPED} of 7 steps" in caplog.text


# What breaks in mid-run


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    "error", [Broken(), comfy.model_management.InterruptProcessingException(), torch.OutOfMemoryError("full")]
)
@pytest.mark.parametrize("where", ["model", "preview"])
def test_failure_or_interrupt_in_mid_run_is_passed_on_and_leaves_no_trace(small_unet, sample, error, where, caplog):
    plain, calls = sample(small_unet, **RUN), []

    def fail(*_):
        calls.append(None)
        if len(calls) == 3:  # in the preview that is a skipped step
            raise error

    model = cached(small_unet)
    hook = small_unet.model.diffusion_model.register_forward_pre_hook(fail if where == "model" else lambda *_: None)
    with pytest.raises(type(error)), caplog.at_level("INFO"):
        sample(model, **RUN, callback=fail if where == "preview" else None)
    hook.remove()
    assert records.last().skipping.steps_taken == ("FFSS" if where == "model" else "FFS")
    assert said(caplog) == []
    assert_no_trace(model)
    assert torch.equal(sample(small_unet, **RUN), plain)
    sample(model, **RUN)
    assert counts() == (FULL, SKIPPED)


def test_no_tensor_of_a_run_outlives_it(small_unet, sample, monkeypatch):
    kept, own = [], running.Evaluation

    def noted(index, place, level, latent, prediction, *rest):
        kept.extend(weakref.ref(tensor) for tensor in (latent, prediction))
        return own(index, place, level, latent, prediction, *rest)

    monkeypatch.setattr(running, "Evaluation", noted)
    sample(cached(small_unet), **RUN)
    gc.collect()
    assert len(kept) == 14 and not any(reference() is not None for reference in kept)


def test_guider_that_samples_in_a_way_of_its_own_gets_a_plain_run(small_unet, sample, caplog):
    """Core's own calls wrappers around the sampler, from which the schedule is known."""
    model = cached(small_unet)
    for owner in (model.wrappers, model.model_options.get("transformer_options", {}).get("wrappers", {})):
        owner.get(WrappersMP.SAMPLER_SAMPLE, {}).pop(host.KEY, None)
    assert torch.equal(sample(model, **RUN), sample(small_unet, **RUN))
    assert counts() == (0, 0) and "in a way of its own; every step ran in full" in caplog.text


def test_run_that_cannot_be_read_is_plain(small_unet, sample, caplog, monkeypatch):
    monkeypatch.setattr(host, "facts_of", lambda *_: 1 / 0)
    assert torch.equal(sample(cached(small_unet), **RUN), sample(small_unet, **RUN))
    assert caplog.text.count("this run cannot be read (ZeroDivisionError") == 1


# The node


def test_wrong_settings_end_in_one_sentence(small_unet):
    with pytest.raises(ValueError, match=r"start_percent \(0.8\) must not be above end_percent \(0.5\)"):
        AccelDeepCache.execute(small_unet, start_percent=0.8, end_percent=0.5)
    assert AccelDeepCache.validate_inputs(quality="Fast") is True
    assert "it must be one of: Balanced, Fast" in AccelDeepCache.validate_inputs(quality="often")


def test_node_leaves_its_input_alone_and_is_off_without_a_window(small_unet, sample, monkeypatch):
    plain = sample(small_unet, **RUN)
    monkeypatch.setattr(DeepCacheSettings, "plan", lambda self: Fixed(3, ()))
    out = AccelDeepCache.execute(small_unet).args[0]
    assert out is not small_unet and torch.equal(sample(small_unet, **RUN), plain)
    sample(out, **RUN)
    assert counts() == (FULL, SKIPPED)
    off = AccelDeepCache.execute(small_unet, start_percent=0.3, end_percent=0.3).args[0]
    assert not off.get_wrappers(WrappersMP.OUTER_SAMPLE, host.KEY)
    assert torch.equal(sample(off, **RUN), plain)

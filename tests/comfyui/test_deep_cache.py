"""DeepCache in a real ComfyUI: every size, streams that never mix, what a step costs, what breaks in mid-run."""

import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import comfy.model_management
import comfy.ops
import pytest
import torch
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.features import Features
from comfy_accel.accel.step_cache.splits.layouts import find_split
from kit import tiny_models
from kit.controls import control_net
from kit.deep_cache import (
    assert_close,
    assert_no_trace,
    cached,
    call_unet,
    counts,
    failing,
    full_and_skipped_flops,
    split_chunks,
    unet_run,
)
from kit.other_nodes import controlled
from kit.step_cache import EveryFew
from kit.thorough import thorough_except

from dev.bench.layouts import FLUX_DEV

# Latents 16×16, 20×30 (720×960 at this scale), 30×20, 23×31, 25×33, 11×17; pixels here.
SIZES = [(128, 128), (240, 160), (160, 240), (248, 184), (264, 200), (136, 88)]


def test_later_node_replaces_the_settings_of_an_earlier_one(tiny_unet, sample):
    plain = sample(tiny_unet, steps=4)
    assert torch.equal(sample(cached(cached(tiny_unet, 3), 1), steps=4), plain)
    assert torch.equal(sample(cached(cached(tiny_unet, 3), 2), steps=4), sample(cached(tiny_unet, 2), steps=4))
    assert counts() == (2, 2)


# Sizes


def test_one_model_takes_every_size_and_batch_in_turn(tiny_unet, sample, no_fallback):
    model = cached(tiny_unet)
    for width, height in SIZES:
        for batch in (1, 2):
            out = sample(model, width, height, batch, steps=4)
            assert out.shape == (batch, 4, height // 8, width // 8)
            assert out.isfinite().all()
            assert counts() == (2, 2)
    first = sample(model, *SIZES[0], steps=4)
    assert torch.equal(first, sample(cached(tiny_unet), *SIZES[0], steps=4))


def test_hires_fix_gives_each_sampler_a_state_of_its_own(tiny_unet, sample, no_fallback):
    model = cached(tiny_unet, points=2)
    low = sample(model, 120, 160, steps=4)
    high = torch.nn.functional.interpolate(low, (31, 23))
    twice = sample(model, steps=6, denoise=0.5, latent=high)
    assert sum(counts()) == 6
    assert counts()[1] >= 2
    assert torch.equal(twice, sample(cached(tiny_unet, points=2), steps=6, denoise=0.5, latent=high))


# Streams


@pytest.mark.parametrize("points", [1, 2])
def test_split_and_switching_chunks_agree_with_joined_ones(tiny_unet, sample, no_fallback, points):
    joined = sample(cached(tiny_unet, points=points), 120, 184, 2, steps=7)
    done, step = counts(), [0]
    assert min(done) >= 2
    for split in (lambda: True, lambda: step[0] % 2 == 1):
        model = cached(split_chunks(tiny_models.unet(), split), points=points)
        count = lambda i, *rest: step.__setitem__(0, i + 1)  # noqa: E731
        assert_close(sample(model, 120, 184, 2, steps=7, callback=count), joined)
        assert counts() == done


def test_clones_called_by_threads_of_one_run_each_have_features_of_their_own():
    """As core's MultiGPU split calls them: one thread and one clone of the model for each device."""
    models = [tiny_models.small_unet(seed=seed) for seed in (0, 1)]
    latents = [torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    both, (together, *alone) = threading.Barrier(2), [unet_run(levels=(4.0, 3.0, 2.0, 1.0, 0.0)) for _ in range(3)]

    def call(run, number, step):
        x = latents[number] + step
        return call_unet(models[number], run, x, None, uuids=(number,), begins=False)

    def waiting(number, step):
        both.wait(60)
        return call(together, number, step)

    with ThreadPoolExecutor(2) as threads:
        for step, sigma in enumerate(together.facts.levels[:-1]):
            for run in (together, *alone):
                run.begin(sigma)
            outs = threads.map(waiting, (0, 1), (step, step))
            for number, out in enumerate(outs):
                assert torch.equal(out, call(alone[number], number, step))
    assert (together.full_steps, together.skipped_steps) == (2, 2)
    assert len({features for features in together._models.values()}) == 2
    together.close()
    assert not together._models


# What a skipped step costs


SD15 = {
    "model_channels": 320,
    "num_res_blocks": [2] * 4,
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
    "num_heads": 8,
}
SDXL = {
    "model_channels": 320,
    "num_res_blocks": [2] * 3,
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "num_head_channels": 64,
    "num_heads": -1,
    "context_dim": 2048,
    "use_linear_in_transformer": True,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}


@pytest.mark.parametrize(
    "network, config, latent, others",
    [
        (UNetModel, tiny_models.unet_config(**SD15), (2, 4, 90, 120), [(2,), (2, 77, 768)]),
        (UNetModel, tiny_models.unet_config(**SDXL), (2, 4, 64, 64), [(2,), (2, 77, 2048), (2, 2816)]),
        (Flux, FLUX_DEV.config, (2, 16, 90, 120), [(2,), (2, 256, 64), (2, 32), (2,)]),
    ],
    ids=["SD15", "SDXL", "Flux"],
)
def test_skipped_step_costs_next_to_nothing(network, config, latent, others):
    model = network(**config, device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init)
    x, *others = (torch.empty(shape, device="meta", dtype=torch.float16) for shape in (latent, *others))
    spent = full_and_skipped_flops(find_split(model), x, lambda: model(x, *others))
    print(f"{spent[1] / spent[0]:.3f}")
    assert spent[1] <= 0.01 * spent[0]


# What breaks in mid-run


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken(), comfy.model_management.InterruptProcessingException()])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("settings", thorough_except([{}, {"points": 2}], {"points": 2}))
def test_failure_or_interrupt_in_mid_run_leaves_no_trace(tiny_unet, sample, error, call, settings, caplog):
    plain = sample(tiny_unet, steps=4)
    # From the call on, since a failing skipped step is tried once more in full.
    model = cached(failing(tiny_unet, error, lambda calls, h: calls >= call), **settings)
    with pytest.raises(type(error)), caplog.at_level("INFO"):
        sample(model, steps=4)
    assert "skipped none" not in caplog.text
    assert_no_trace(model)
    assert sum(counts()) == call - 1
    assert torch.equal(sample(tiny_unet, steps=4), plain)
    sample(cached(tiny_unet), steps=4)
    assert counts() == (2, 2)


def test_patch_that_fails_on_skipped_layers_gets_the_rest_in_full(tiny_unet, sample, caplog):
    broken = failing(tiny_unet, Broken("one channel"), lambda calls, h: h.shape[1] == 1)
    plain = sample(broken, 160, 240, steps=6)
    out = sample(cached(broken), 160, 240, steps=6)
    assert torch.equal(out, plain)
    assert counts() == (6, 0)
    said = [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()]
    assert said == ["DeepCache: a skipped step failed (Broken: one channel); every step runs in full."]


def test_interrupt_on_a_skipped_step_is_passed_on(tiny_unet, sample, caplog):
    error = comfy.model_management.InterruptProcessingException()
    model = cached(failing(tiny_unet, error, lambda calls, h: h.shape[1] == 1))
    with pytest.raises(type(error)):
        sample(model, steps=4)
    assert_no_trace(model)
    assert "DeepCache" not in caplog.text


@pytest.mark.parametrize("call", [1, 2], ids=["full", "skipped"])
def test_memory_that_runs_out_is_given_back_and_the_call_made_again(tiny_unet, sample, caplog, call):
    """With the residuals of ControlNets, which the model takes off the lists that it is given."""
    calls = []

    def behind_blocks(*_):
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("full")

    given = {"steps": 4, "positive": controlled(control_net())}
    plain = sample(tiny_unet, **given)
    hook = tiny_unet.model.diffusion_model.out.register_forward_pre_hook(behind_blocks)
    assert torch.equal(sample(cached(tiny_unet), **given), plain)
    hook.remove()
    assert counts() == (4, 0)
    said = [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()]
    assert len(said) == 1 and re.search(r"memory ran out while it kept \d+ MB for skipped steps; every step", said[0])


@pytest.mark.parametrize("cfg, branches", [(5.0, 2), (1.0, 1)])
def test_core_leaves_room_for_what_is_kept(tiny_unet, sample, monkeypatch, caplog, cfg, branches):
    asked = []
    load = comfy.model_management.load_models_gpu

    def noted(models, memory_required=0, minimum_memory_required=None, **kwargs):
        asked.append((memory_required, minimum_memory_required))
        return load(models, memory_required, minimum_memory_required=minimum_memory_required, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", noted)
    monkeypatch.setattr(host, "_MUCH", 1)
    size = {"width": 128, "height": 128, "steps": 4, "cfg": cfg}
    with caplog.at_level("INFO"):
        sample(tiny_unet, **size)
        sample(cached(tiny_unet), **size)
    points = records.deep_cache().kept_bytes
    assert points == branches * 32 * 16 * 16 * 4
    assert {after - before for before, after in zip(*asked, strict=True)} == {2 * points}
    assert "memory_required" not in vars(tiny_unet.model)
    assert "DeepCache: keeps about 0.0 GB of features for skipped steps." in caplog.text


def test_lack_of_memory_with_nothing_kept_is_passed_on(tiny_unet, sample):
    model = cached(failing(tiny_unet, torch.OutOfMemoryError("full"), lambda calls, h: True))
    with pytest.raises(torch.OutOfMemoryError):
        sample(model, steps=4)
    assert_no_trace(model)


def test_no_tensor_of_a_run_outlives_it(tiny_unet, sample, monkeypatch):
    kept = []

    def exchange(self, keys, feature, *args, **kwargs):
        out = own(self, keys, feature, *args, **kwargs)
        kept.extend(weakref.ref(point[2]) for known in self._histories.values() for point in known._points)
        return out

    own = Features.exchange
    monkeypatch.setattr(Features, "exchange", exchange)
    sample(cached(tiny_unet, points=2), 64, 64, steps=6)
    assert counts() == (2, 4)
    gc.collect()
    assert len(kept) >= 4
    assert not any(reference() is not None for reference in kept)


def test_guider_that_samples_in_a_way_of_its_own_gets_a_plain_run(tiny_unet, sample, caplog, monkeypatch):
    """Core's own calls wrappers around the sampler, from which the schedule is known."""
    plain = sample(tiny_unet, steps=4)
    monkeypatch.setattr(host, "_begin_sampling", None)
    model = cached(tiny_unet)
    for owner in (model.wrappers, model.model_options.get("transformer_options", {}).get("wrappers", {})):
        owner.get(WrappersMP.SAMPLER_SAMPLE, {}).pop(host.KEY, None)
    assert torch.equal(sample(model, steps=4), plain)
    assert counts() == (0, 0) and "in a way of its own; every step ran in full" in caplog.text


def test_run_that_cannot_be_read_is_plain(tiny_unet, sample, caplog, monkeypatch):
    monkeypatch.setattr(host, "facts_of", lambda *_: 1 / 0)
    assert torch.equal(sample(cached(tiny_unet), steps=4), sample(tiny_unet, steps=4))
    assert caplog.text.count("this run cannot be read (ZeroDivisionError") == 1


# The node


def node():
    from comfy_accel.nodes.deep_cache import AccelDeepCache

    return AccelDeepCache


def test_wrong_settings_end_in_one_sentence(tiny_unet):
    with pytest.raises(ValueError, match=r"start_percent \(0.8\) must not be above end_percent \(0.5\)"):
        node().execute(tiny_unet, start_percent=0.8, end_percent=0.5)
    assert node().validate_inputs(quality="Fast") is True
    assert "it must be one of: Balanced, Fast" in node().validate_inputs(quality="often")


def test_node_leaves_its_input_alone(tiny_unet, sample, monkeypatch):
    plain = sample(tiny_unet, steps=4)
    monkeypatch.setattr(DeepCacheSettings, "plan", lambda self: EveryFew(3))
    out = node().execute(tiny_unet).args[0]
    assert out is not tiny_unet
    assert torch.equal(sample(tiny_unet, steps=4), plain)
    sample(out, steps=4)
    assert counts() == (2, 2)


def test_node_without_a_window_is_off(tiny_unet, sample):
    out = node().execute(tiny_unet, start_percent=0.3, end_percent=0.3).args[0]
    assert not out.get_wrappers(WrappersMP.OUTER_SAMPLE, host.KEY)
    assert torch.equal(sample(out, steps=4), sample(tiny_unet, steps=4))


def test_model_without_a_unets_layout_passes_with_one_line(tiny_unet, sample, caplog):
    plain = sample(tiny_unet, steps=4)
    renamed = tiny_unet.clone()
    renamed.add_object_patch("diffusion_model", torch.nn.Linear(1, 1))
    out = cached(renamed)
    assert not out.get_wrappers(WrappersMP.DIFFUSION_MODEL, host.KEY)
    lines = [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()]
    reason = "it is neither a UNet with skip levels nor a transformer with one main list of blocks"
    assert lines == [f"DeepCache: Linear: {reason}; every step runs in full."]
    assert torch.equal(sample(tiny_unet, steps=4), plain)

"""Short runs with a quality and noise of the sampler: what leaves out the prediction without the prompt, and how."""

import comfy.model_management
import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.predictions.guidance import MOST_STEPS, Guidance
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.split_points import find_split
from kit import tiny_models
from kit.deep_cache import SMALL, assert_no_trace, counts, last_run
from kit.other_nodes import control_net, controlled, hooked, in_areas, with_momentum
from kit.tiny_models import conditioning

RUN = {"width": 72, "height": 88, "steps": 8, "sampler": "euler_ancestral"}
LITTLE, NEVER_ENOUGH = (DeepCacheSettings(quality=decibels) for decibels in (15.0, 300.0))


def watched(model, key, calls):
    """The model, noting of each pair of predictions whether both were asked for, and what they are."""

    def watch(executor, inner, conds, x, timestep, options):
        out = executor(inner, conds, x, timestep, options)
        calls.append((conds[1] is not None, *(prediction.clone() for prediction in out)))
        return out

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, key, watch)
    return model


def test_the_prompts_effect_in_the_last_full_step_stands_in(small_unet, sample):
    given, made = [], []
    model = apply_deep_cache(watched(small_unet, "before", given), LITTLE)
    sample(watched(model, "after", made), **RUN)
    letters = records.deep_cache().steps_taken
    assert "".join("FS"[not both] for both, *_ in made) == letters and "S" in letters
    assert letters[:2] == "FF" and letters[-1] == "F"
    for (_, cond, uncond), (both, *by_model) in zip(given, made, strict=True):
        if both:
            assert torch.equal(cond, by_model[0]) and torch.equal(uncond, by_model[1])
            effect = cond - uncond
        else:
            assert torch.equal(cond, by_model[0]) and torch.equal(uncond, cond - effect)


BESIDE = {
    "alone": {},
    "one image more": {"batch": 2},
    "two calls a step": {"sampler": "dpm_2_ancestral"},
    "ControlNet": {"positive": lambda: controlled(control_net(**SMALL))},
    "regional prompts": {"positive": in_areas},
    "two prompts": {"positive": lambda: conditioning(seed=1) + conditioning(seed=3)},
}


def settings_of(name):
    return {**RUN, **{key: value() if callable(value) else value for key, value in BESIDE[name].items()}}


@pytest.mark.parametrize("name", BESIDE)
def test_nothing_left_out_leaves_the_image_bit_by_bit(small_unet, sample, name):
    run = settings_of(name)
    model = apply_deep_cache(small_unet, NEVER_ENOUGH)
    assert torch.equal(sample(model, **run), sample(small_unet, **run))
    assert counts() == (8, 0) and last_run()["probes"] == 0
    assert_no_trace(model)


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_left_out_is_told_and_leaves_no_trace(small_unet, sample, name):
    run = settings_of(name)
    model = apply_deep_cache(small_unet, LITTLE)
    image, plain = sample(model, **run), sample(small_unet, **run)
    share = 1 / 3 if name == "two prompts" else 1 / 2
    assert counts()[1] >= 1 and last_run()["skipped_work"] == pytest.approx(counts()[1] / 8 * share)
    assert not torch.equal(image, plain) and (image - plain).abs().max() <= 0.5 * plain.abs().max()
    assert_no_trace(model)


def overriding(model, cfg, start_percent=0.0):
    """As core's CFGOverride (0.33) up to the end."""
    start = model.get_model_object("model_sampling").percent_to_sigma(start_percent)

    def override(executor, x, timestep, *args):
        guider = executor.class_obj
        before, guider.cfg = guider.cfg, cfg if timestep.max() <= start else guider.cfg
        try:
            return executor(x, timestep, *args)
        finally:
            guider.cfg = before

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "override", override)
    return model


@pytest.mark.parametrize("overridden_first", [True, False])
def test_guidance_that_another_node_makes_stronger_costs_as_much_as_is_estimated(small_unet, sample, overridden_first):
    settings = DeepCacheSettings(quality=30.0)
    expected = sample(apply_deep_cache(small_unet, settings), **RUN, cfg=8.0)
    asked, known = counts(), last_run()
    if overridden_first:
        model = apply_deep_cache(overriding(small_unet, 8.0), settings)
    else:
        model = overriding(apply_deep_cache(small_unet, settings), 8.0)
    assert torch.equal(sample(model, **RUN, cfg=2.0), expected)
    assert counts() == asked and last_run() == known and asked[1] >= 1


def in_turn(model):
    return model, {"positive": conditioning(seed=1, end_percent=0.5) + conditioning(seed=3, start_percent=0.5)}


def controlled_until_half(model):
    return model, {"positive": controlled(control_net(**SMALL), ends=(0.5,), both=False)}


def hooked_from_half(model):
    model, positive = hooked(model, keyframes=((0.0, 0.0), (0.5, 1.0)))
    return model, {"positive": positive}


def guided_more_from_half(model):
    return overriding(model, 8.0, start_percent=0.5), {}


@pytest.mark.parametrize("make", [in_turn, controlled_until_half, hooked_from_half, guided_more_from_half])
def test_where_what_is_asked_changes_both_predictions_are_made(small_unet, sample, make):
    calls = []
    model, prompts = make(small_unet)
    sampling = model.get_model_object("model_sampling")
    half = sampling.percent_to_sigma(0.5)
    sample(
        watched(apply_deep_cache(model, DeepCacheSettings(interval=8, quality=0.5)), "after", calls),
        **{**RUN, "steps": 12},
        **prompts,
    )
    levels = comfy.samplers.calculate_sigmas(sampling, "normal", 12)[:-1]
    after = next(step for step, level in enumerate(levels) if level < half)
    made = [both for both, *_ in calls]
    assert made[after] and not all(made[2:after]) and not made[after + 1], made


def failing_alone(model, error):
    def refuse(executor, inner, conds, *args):
        if conds[1] is None:
            raise error("alone")
        return executor(inner, conds, *args)

    model = apply_deep_cache(model, LITTLE).clone()
    model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "refuse", refuse)
    return model


def test_prediction_that_fails_alone_ends_skipping(small_unet, sample):
    model = failing_alone(small_unet, RuntimeError)
    assert torch.equal(sample(model, **RUN), sample(small_unet, **RUN))
    assert counts() == (8, 0)


@pytest.mark.parametrize("name", ["OOM_EXCEPTION", "InterruptProcessingException"])
def test_interrupts_and_lack_of_memory_are_passed_on(small_unet, sample, name):
    error = getattr(comfy.model_management, name)
    model = failing_alone(small_unet, error)
    with pytest.raises(error):
        sample(model, **RUN)
    assert_no_trace(model)


def test_models_on_other_devices_leave_out_the_same():
    run = DeepCacheRun(LITTLE)
    run.guidance = Guidance(lambda: 5.0)
    run.set_schedule([14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0])
    one, other = (tiny_models.small_unet().model.diffusion_model for _ in range(2))
    assert run.of(one, lambda model: find_split(model, None)) is run
    sibling = run.of(other, lambda model: find_split(model, None))
    assert sibling.guidance is run.guidance
    for level in run.schedule[:-1]:
        run.begin_evaluation(level)
        assert (sibling.angle, sibling.is_full) == (run.angle, run.is_full)


def with_both(model):
    """As NAG, whose attention compares both halves of a batch."""
    model = model.clone()
    model.model_options["disable_cfg1_optimization"] = True
    return model


def with_predictions_of_its_own(model):
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple

    return SkipLayerGuidanceDiTSimple.execute(model, 0.5, 1.0, "0").args[0]


@pytest.mark.parametrize(
    ("patch", "run"),
    [
        (lambda model: model, {"cfg": 1.0}),
        (with_momentum, {}),
        (with_both, {}),
        (with_predictions_of_its_own, {}),
        (lambda model: model, {"sampler": "euler_ancestral_cfg_pp"}),
    ],
    ids=[
        "no guidance",
        "guidance of another node",
        "needs both",
        "predictions of another node",
        "sampler with guidance of its own",
    ],
)
def test_other_guidance_is_left_alone(small_unet, sample, patch, run):
    image = sample(apply_deep_cache(patch(small_unet), LITTLE), **{**RUN, **run})
    assert torch.equal(image, sample(patch(small_unet), **{**RUN, **run}))
    assert counts() == (8, 0)


def test_context_windows_have_an_effect_of_the_prompt_each(small_unet, sample):
    import comfy.context_windows as windows

    model = small_unet.clone()
    handler = windows.IndexListContextHandler(
        context_schedule=windows.get_matching_context_schedule(windows.ContextSchedules.STATIC_STANDARD),
        fuse_method=windows.get_matching_fuse_method(windows.ContextFuseMethods.PYRAMID),
        context_length=5,
        context_overlap=1,
    )
    model.model_options["context_handler"] = handler
    run = {**RUN, "batch": 9}  # as many as noise levels: core 0.3.75 compares the two element by element
    assert torch.equal(sample(apply_deep_cache(model, LITTLE), **run), sample(model, **run))
    assert counts() == (8, 0)
    assert "in parts" in records.deep_cache().why_full


@pytest.mark.parametrize("other", [{"steps": MOST_STEPS + 8}, {"sampler": "euler"}])
def test_longer_runs_and_other_samplers_skip_the_deep_part_instead(small_unet, sample, other):
    calls = []
    sample(watched(apply_deep_cache(small_unet, LITTLE), "after", calls), **{**RUN, **other})
    assert counts()[1] >= 1 and all(both for both, *_ in calls)


def test_half_a_batch_compiles_nothing_more(sample):
    model = tiny_models.unet(**SMALL)
    cache = GraphCache()
    plain = accelerate(model, CompileSettings(backend="eager"), cache)
    expected = sample(plain, **RUN)
    graphs = cache.statistics()["graphs"]
    for batch in (1, 2):
        expected = sample(apply_deep_cache(model, LITTLE), **RUN, batch=batch)
        made = sample(apply_deep_cache(plain, LITTLE), **RUN, batch=batch)
        assert counts()[1] >= 1
        assert torch.equal(made, expected)
        assert cache.statistics()["graphs"] == graphs

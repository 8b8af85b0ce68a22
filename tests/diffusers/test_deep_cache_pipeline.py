"""DeepCache in diffusers' own pipelines: what it leaves as it was, and what counts as a step."""

import gc

import pytest
import torch

pytest.importorskip("diffusers.schedulers", reason="needs the package diffusers: tests/requirements.txt")

from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache  # noqa: E402
from comfy_accel.accel.step_cache.run import DeepCacheRun  # noqa: E402
from kit.step_cache import every  # noqa: E402
from kit.tiny_pipelines import SD, SDXL, difference, pipeline, sample, sample_cached  # noqa: E402


def state_of(pipe):
    """What the models and the pipeline have of their own, beside parameters and submodules."""
    return [dict(vars(part)) for part in (pipe, *pipe.unet.modules())]


@pytest.mark.parametrize(("layout", "height", "width"), [(SD, 72, 96), (SDXL, 104, 72)])
def test_sizes_whose_halves_are_odd(layout, height, width):
    pipe = pipeline(layout=layout)
    plain = sample(pipe, height, width, steps=3)
    cached, counts = sample_cached(pipe, 3, height=height, width=width, steps=3)
    assert counts == [(1, 2)]
    assert 0 < difference(cached, plain) < 0.2


@pytest.mark.parametrize("settings", [every(1), every(3, start_percent=0.5, end_percent=0.5)])
def test_settings_that_skip_nothing_change_nothing(settings):
    pipe = pipeline("EulerDiscreteScheduler")
    plain, before = sample(pipe), state_of(pipe)
    with deep_cache(pipe, settings):
        assert state_of(pipe) == before
        assert torch.equal(sample(pipe), plain)


def test_leaving_restores_the_pipeline_and_its_images():
    pipe = pipeline()
    plain, before = sample(pipe), state_of(pipe)
    cached, _ = sample_cached(pipe, 3)
    assert not torch.equal(cached, plain)
    assert state_of(pipe) == before
    assert torch.equal(sample(pipe), plain)
    gc.collect()
    assert not any(thing._histories for thing in gc.get_objects() if type(thing) is DeepCacheRun)


def test_interrupted_image_leaves_nothing():
    pipe = pipeline()
    plain, before = sample(pipe), state_of(pipe)

    def stop(pipe, step, timestep, tensors):
        if step == 4:
            raise KeyboardInterrupt
        return tensors

    with pytest.raises(KeyboardInterrupt), deep_cache(pipe, every(3)):
        sample(pipe, callback_on_step_end=stop)
    assert state_of(pipe) == before
    assert torch.equal(sample(pipe), plain)


def test_images_in_one_context_are_as_in_contexts_of_their_own():
    pipe = pipeline()
    calls = [{}, {"height": 128}, {"batch": 2}, {}, {"steps": 2}, {"guidance_scale": 1.0}]
    alone = [sample_cached(pipe, 3, **arguments)[0] for arguments in calls]
    with deep_cache(pipe, every(3)):
        together = [sample(pipe, **arguments) for arguments in calls]
    for index, latents in enumerate(together):
        assert torch.equal(latents, alone[index]), calls[index]


def test_image_after_an_interrupted_one_uses_nothing_of_it():
    pipe = pipeline()
    alone, _ = sample_cached(pipe, 5, steps=3)

    def stop(pipe, step, timestep, tensors):
        raise KeyboardInterrupt

    with deep_cache(pipe, every(5)):
        with pytest.raises(KeyboardInterrupt):
            sample(pipe, callback_on_step_end=stop)
        assert torch.equal(sample(pipe, steps=3), alone)


F, S = False, True


@pytest.mark.parametrize(
    ("scheduler", "skipped"),
    [
        # From the second step on, the first call of a level ends the step before and is decided with its own.
        ("HeunDiscreteScheduler", [F, S, S, S, S, F, F, S, S]),
        ("KDPM2DiscreteScheduler", [F, F, S, S, S, S, F, F, S]),
        ("PNDMScheduler", [F, S, S, S, F]),
    ],
)
def test_steps_are_counted_where_schedulers_call_more_often(scheduler, skipped):
    pipe = pipeline(scheduler)
    ran, found = [], []
    pipe.unet.mid_block.resnets[0].norm1.register_forward_pre_hook(lambda *_: ran.append(True))
    pipe.unet.register_forward_hook(lambda *_: found.append(not ran) or ran.clear())
    _, counts = sample_cached(pipe, 3, steps=5 if scheduler != "PNDMScheduler" else 4)
    assert found == skipped
    assert counts


def test_video_and_unconditional_models_are_divided_or_left_alone():
    import diffusers
    from comfy_accel.accel.step_cache.splits.unet import has_down_up_layout

    narrow = {"block_out_channels": (32, 32), "norm_num_groups": 8}
    plain = diffusers.UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **narrow
    )
    assert has_down_up_layout(plain)
    skip_samples = diffusers.UNet2DModel(
        down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
        up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D"),
        **narrow,
    )
    assert not has_down_up_layout(skip_samples)

"""DeepCache around many images of a pipeline: what may happen to the pipeline between and during them."""

import copy
import gc
import threading

import diffusers
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline, restore
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from comfy_accel.accel.hosts.diffusers.predictions import wrap_steps
from comfy_accel.accel.step_cache.run import DeepCacheRun
from kit import deep_transformers, tiny_pipelines
from kit.deep_transformers import pipeline, sample, sample_cached
from kit.step_cache import every

SMALL = {"height": 32, "width": 48, "steps": 4}
EVERY_THIRD = every(3)
CACHED = (2, 2)
"""Full and skipped steps of four."""


@pytest.fixture(scope="module")
def pipe():
    return pipeline("StableDiffusion3Pipeline")


@pytest.fixture(scope="module")
def plain(pipe):
    return sample(pipe, **SMALL)


@pytest.fixture(scope="module")
def cached(pipe, plain):
    latents, counts = sample_cached(pipe, EVERY_THIRD, **SMALL)
    assert counts == [CACHED] and not torch.equal(latents, plain)
    return latents


def state_of(pipe):
    return [dict(vars(part)) for part in (pipe, *pipe.transformer.modules())]


def is_kept():
    """Whether a tensor of a run is."""
    gc.collect()
    runs = [thing for thing in gc.get_objects() if type(thing) is DeepCacheRun]
    return any(run._known or run._skipped or run._correction for run in runs)


def test_between_images_all_is_as_without(pipe, plain, cached, counts):
    before = state_of(pipe)
    with deep_cache(pipe, EVERY_THIRD):
        around = state_of(pipe)
        assert around[1:] == before[1:]
        for arguments, skipped in ((SMALL, CACHED), (SMALL | {"batch": 2}, CACHED), (SMALL | {"steps": 6}, (3, 3))):
            sample(pipe, **arguments)
            assert counts.pop() == skipped
        assert torch.equal(sample(pipe, **SMALL), cached)
        assert state_of(pipe) == around and not is_kept()
    assert state_of(pipe) == before
    assert torch.equal(sample(pipe, **SMALL), plain)


def test_interrupted_image_is_a_shorter_run(pipe, cached, counts):
    def interrupt(pipe, step, *_):
        pipe._interrupt = step == 1
        return {}

    with deep_cache(pipe, EVERY_THIRD):
        sample(pipe, **SMALL, callback_on_step_end=interrupt)
        assert counts == [(2, 0)]
        assert torch.equal(sample(pipe, **SMALL), cached)


def test_scheduler_and_model_may_be_replaced_between_images(pipe, cached, counts):
    scheduler, transformer = pipe.scheduler, pipe.transformer
    try:
        with deep_cache(pipe, every(3)):
            sample(pipe, **SMALL)
            pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
            sample(pipe, **SMALL)
            pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
            pipe.transformer = deep_transformers.transformer("StableDiffusion3", num_layers=5)
            sample(pipe, **SMALL)
            pipe.transformer, pipe.scheduler = transformer, scheduler
            sample(pipe, **SMALL)
        assert counts == [CACHED, CACHED, CACHED, CACHED]
    finally:
        pipe.transformer, pipe.scheduler = transformer, scheduler


def test_pipelines_that_share_a_model_have_runs_of_their_own(pipe, plain, cached, counts):
    other = diffusers.StableDiffusion3Pipeline(**{**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)})
    twin = diffusers.StableDiffusion3Pipeline(**pipe.components)  # as from_pipe, the scheduler too
    for one in (other, twin):
        one.set_progress_bar_config(disable=True)
    with deep_cache(pipe, EVERY_THIRD):
        assert torch.equal(sample(other, **SMALL), plain) and torch.equal(sample(twin, **SMALL), plain)
        with deep_cache(other, every(2)), deep_cache(twin, EVERY_THIRD):
            for _ in range(2):
                assert torch.equal(sample(pipe, **SMALL), cached)
                assert torch.equal(sample(twin, **SMALL), cached)
                sample(other, **SMALL | {"steps": 5})
        assert counts == [CACHED, CACHED, (3, 2)] * 2
    assert not is_kept()


def test_image_of_another_pipeline_within_one(pipe, cached, counts):
    other = diffusers.StableDiffusion3Pipeline(**{**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)})
    other.set_progress_bar_config(disable=True)
    every_second, _ = sample_cached(other, every(2), **SMALL)

    def another(*_):
        assert torch.equal(sample(other, **SMALL), every_second)
        return {}

    with deep_cache(pipe, EVERY_THIRD), deep_cache(other, every(2)):
        assert torch.equal(sample(pipe, **SMALL, callback_on_step_end=another), cached)


# Compiled too


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_blocks_run_beneath(cached, plain, counts, inside):
    pipe = pipeline("StableDiffusion3Pipeline")
    if inside:
        with deep_cache(pipe, EVERY_THIRD):
            accelerate_pipeline(pipe, backend="eager")
            latents = sample(pipe, **SMALL)
            restore(pipe)
            assert torch.equal(sample(pipe, **SMALL), cached)
    else:
        accelerate_pipeline(pipe, deep_cache=EVERY_THIRD, backend="eager")
        latents = sample(pipe, **SMALL)
        assert torch.equal(sample(pipe, **SMALL), latents)
        restore(pipe)
    assert torch.equal(latents, cached) and counts == [CACHED] * 2
    assert torch.equal(sample(pipe, **SMALL), plain)


def test_plain_pipeline_in_another_thread_with_the_same_unet_gets_its_own_image():
    one = tiny_pipelines.pipeline("EulerDiscreteScheduler")
    other = tiny_pipelines.pipeline("EulerDiscreteScheduler", unet=one.unet)
    plain, images = tiny_pipelines.sample(other), []

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: images.append(tiny_pipelines.sample(other)))
            thread.start()
            thread.join()

    with deep_cache(one, EVERY_THIRD):
        alone = tiny_pipelines.sample(one)
        with one.unet.mid_block.register_forward_pre_hook(meanwhile):
            assert torch.equal(tiny_pipelines.sample(one), alone)
    assert len(images) == tiny_pipelines.STEPS / 2  # the full ones
    assert all(torch.equal(image, plain) for image in images)


def test_scheduler_is_as_it_was_whatever_is_copied_and_put_back():
    scheduler = diffusers.EulerDiscreteScheduler()
    with wrap_steps(scheduler, lambda given: None, lambda result: None):
        state = copy.deepcopy(vars(scheduler))  # as the panorama pipeline does
        vars(scheduler).update(state)
        copied = copy.deepcopy(scheduler)
        assert copied.step.__self__ is copied
    assert "step" not in vars(scheduler)


def test_runs_that_overlap_on_one_scheduler_leave_nothing_on_it():
    scheduler, told = diffusers.EulerDiscreteScheduler(), []
    first, second = (wrap_steps(scheduler, lambda given, n=n: told.append(n), lambda result: None) for n in (1, 2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    scheduler.set_timesteps(4)
    scheduler.step(torch.zeros(1, 4, 2, 2), scheduler.timesteps[0], torch.zeros(1, 4, 2, 2))
    assert told == [2]
    second.__exit__(None, None, None)
    assert "step" not in vars(scheduler)


def test_call_that_gradients_go_through_is_plain():
    unet = tiny_pipelines.unet()
    pipe = tiny_pipelines.pipeline(unet=unet)

    def guide(pipe, step, timestep, values):
        latent = values["latents"].detach().requires_grad_()
        with torch.enable_grad():
            unet(latent, timestep, torch.zeros(1, 5, tiny_pipelines.CONTEXT_DIM)).sample.square().sum().backward()
        assert latent.grad.abs().sum() > 0
        return values

    with deep_cache(pipe, EVERY_THIRD):
        assert tiny_pipelines.sample(pipe, callback_on_step_end=guide).isfinite().all()

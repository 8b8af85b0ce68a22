"""DeepCache in a real ComfyUI: every size, and streams that never mix."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import tiny_models
from kit.deep_cache import (
    assert_close,
    assert_no_trace,
    cached,
    call_unet,
    counts,
    full_and_skipped,
    split_chunks,
    unet_run,
)
from kit.thorough import thorough_except

# Latents 16×16, 20×30 (720×960 at this scale), 30×20, 23×31, 25×33, 11×17; pixels here.
SIZES = [(128, 128), (240, 160), (160, 240), (248, 184), (264, 200), (136, 88)]


# Identity


def test_plain_model_is_bit_identical_after_a_cached_run(tiny_unet, sample, no_fallback):
    plain = sample(tiny_unet, steps=4)
    assert not torch.equal(sample(cached(tiny_unet), steps=4), plain)
    assert torch.equal(sample(tiny_unet, steps=4), plain)
    assert_no_trace(tiny_unet)


def test_later_node_replaces_the_settings_of_an_earlier_one(tiny_unet, sample):
    plain = sample(tiny_unet, steps=4)
    assert torch.equal(sample(cached(cached(tiny_unet, 3), 1), steps=4), plain)
    assert torch.equal(sample(cached(cached(tiny_unet, 3), 2), steps=4), sample(cached(tiny_unet, 2), steps=4))
    assert counts() == (2, 2)


@pytest.mark.parametrize("height, width", [(16, 16), (20, 30), (23, 31), (25, 33)])
def test_skipped_step_at_the_same_input_equals_the_full_one(tiny_unet, height, width):
    full, skipped = full_and_skipped(tiny_unet, height, width)
    assert torch.equal(full, skipped)
    assert_no_trace(tiny_unet)


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


# Pixels and batch, at their true size.
TRUE_SIZES = [
    (720, 960, 1),
    (960, 720, 1),
    (736, 992, 1),
    (896, 768, 1),
    (1280, 720, 1),
    (728, 720, 2),
    (544, 576, 4),
    (440, 312, 3),
]


def test_true_sizes_run_one_after_the_other(sample, no_fallback):
    narrow = {"num_res_blocks": [1, 1, 1], "model_channels": 32}
    depths = {"transformer_depth": [0, 0, 1], "transformer_depth_output": [0, 0, 0, 0, 1, 1]}
    model = cached(tiny_models.unet(**narrow, **depths, channel_mult=[1, 2, 2]))
    for width, height, batch in TRUE_SIZES:
        out = sample(model, width, height, batch, steps=4)
        assert out.shape == (batch, 4, height // 8, width // 8)
        assert out.isfinite().all()
        assert counts() == (2, 2)


@pytest.mark.parametrize("settings", [{}, {"points": 2}])
def test_hires_fix_gives_each_sampler_a_state_of_its_own(tiny_unet, sample, no_fallback, settings):
    model = cached(tiny_unet, **settings)
    low = sample(model, 120, 160, steps=4)
    high = torch.nn.functional.interpolate(low, (31, 23))
    twice = sample(model, steps=6, denoise=0.5, latent=high)
    assert sum(counts()) == 6
    assert counts()[1] >= 2
    assert torch.equal(twice, sample(cached(tiny_unet, **settings), steps=6, denoise=0.5, latent=high))


# Streams


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("sampler", thorough_except(["euler", "heun"], "euler"))
def test_split_and_switching_chunks_agree_with_joined_ones(tiny_unet, sample, no_fallback, points, sampler):
    make = lambda model: cached(model, points=points)  # noqa: E731
    joined = sample(make(tiny_unet), 120, 184, 2, steps=7, sampler=sampler)
    done = counts()
    assert done[0] >= 2
    assert done[1] >= 2
    step = [0]
    for split in (lambda: True, lambda: step[0] % 2 == 1):
        model = make(split_chunks(tiny_models.unet(), split))
        count = lambda i, *rest: step.__setitem__(0, i + 1)  # noqa: E731
        assert_close(sample(model, 120, 184, 2, steps=7, sampler=sampler, callback=count), joined)
        assert counts() == done


def conds_that_change():
    late = tiny_models.conditioning(seed=5, start_percent=0.4)
    return tiny_models.conditioning(seed=1, end_percent=0.7) + late


def conds_with_areas():
    left = tiny_models.conditioning(seed=4, area=(16, 8, 0, 0), strength=1.0)
    right = tiny_models.conditioning(seed=5, area=(16, 8, 0, 8), strength=1.0)
    return left + right + tiny_models.conditioning(seed=1)


def conds_with_masks():
    left = torch.zeros(1, 16, 16)
    left[:, :, :8] = 1.0
    masked = tiny_models.conditioning(seed=4, mask=left, mask_strength=1.0, set_area_to_bounds=False)
    bound = tiny_models.conditioning(seed=5, mask=1.0 - left, mask_strength=0.8, set_area_to_bounds=True)
    return masked + bound + tiny_models.conditioning(seed=1)


@pytest.mark.parametrize("positive", [conds_that_change, conds_with_areas, conds_with_masks])
@pytest.mark.parametrize("settings", [{}, {"points": 2}])
def test_streams_that_come_and_go_or_cover_areas_agree_joined_and_split(
    tiny_unet, sample, no_fallback, positive, settings
):
    joined = sample(cached(tiny_unet, **settings), steps=6, positive=positive())
    apart = sample(cached(split_chunks(tiny_unet), **settings), steps=6, positive=positive())
    assert counts()[1] >= 1
    assert_close(apart, joined)


def test_context_windows_are_streams_of_their_own(tiny_unet, sample, no_fallback):
    import comfy.context_windows as windows

    def with_windows(model):
        model.model_options["context_handler"] = windows.IndexListContextHandler(
            context_schedule=windows.get_matching_context_schedule(windows.ContextSchedules.STATIC_STANDARD),
            fuse_method=windows.get_matching_fuse_method(windows.ContextFuseMethods.FLAT),
            context_length=2,
            context_overlap=0,
        )
        return model

    model = with_windows(cached(tiny_unet))
    # As many noise levels as frames: core 0.3.75 compares the two element by element.
    whole = sample(model, batch=4, steps=3)
    assert counts() == (1, 2)
    # Windows that don't overlap are as good as batches of their own.
    assert_close(whole, sample(cached(tiny_unet), batch=4, steps=3))


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

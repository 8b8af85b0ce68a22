"""Captured calls on the real `torch.cuda.CUDAGraph`: replays, eviction, weights that move, bytes, failures, modes."""

import gc
import os
from contextlib import contextmanager

import pytest
import torch
from comfy_accel.accel.cuda_graphs import cuda
from comfy_accel.accel.cuda_graphs.cuda import CudaCapturer
from kit import made_up_device as device
from kit.captures import WIDTH, Toy, capturing_cache, latent, reasons, run, settle, times
from torch.nn.functional import scaled_dot_product_attention


@pytest.fixture(autouse=True)
def clean():
    free_bytes()


@contextmanager
def replays(model, cache):
    """A run: a function that makes a call and says whether it was a replay; what it returns is on the device."""
    forwards = 0

    def inner(*args):
        nonlocal forwards
        forwards += 1
        return model(*args)

    with run(model, cache, inner=inner) as call:

        def is_replay(*args):
            before = forwards
            out = call(*args)
            assert out.is_cuda and out.shape == args[0].shape
            return forwards == before

        yield is_replay


def free_bytes():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def inputs(seed=0, **kwargs):
    return latent(seed, **kwargs).cuda(), times(seed, kwargs.get("batch", 2)).cuda()


def toy():
    return Toy().cuda(), capturing_cache(CudaCapturer())[0]


@torch.inference_mode()
@pytest.mark.parametrize(("microseconds", "is_captured"), [(0, True), (20_000, False)])
def test_a_call_is_captured_where_the_device_waits_for_python_in_it(microseconds, is_captured):
    model, cache = toy()

    def inner(*args):
        device.launches_take(microseconds)
        out = model(*args)
        device.launches_take(0)
        return out

    with run(model, cache, inner=inner) as call:
        settle(call, *inputs())
    assert len(cache.captures.members) == is_captured
    assert len(reasons()) == (not is_captured)


class Positions(Toy):
    """Makes its frequencies and positions on the CPU, as Wan and Z-Image do."""

    def forward(self, x, t, scale=1.0):
        frequencies = torch.pow(100.0, -torch.arange(WIDTH).div(WIDTH)).to(t)
        places = torch.zeros(x.shape[:2], device=x.device)
        places[:, 0] = x.shape[1] + 1
        return super().forward(x + frequencies + places[..., None], t, scale=scale)


@torch.inference_mode()
def test_positions_that_are_made_on_the_cpu_are_on_the_device_before_the_capture():
    model, cache = Positions().cuda(), capturing_cache(CudaCapturer())[0]
    with replays(model, cache) as call:
        assert [call(*inputs(seed)) for seed in range(5)] == [False, False, False, True, True]
        before = device.counts()
        given = inputs(7)
        copied = device.counts().to_device
        assert call(*given) and device.counts().to_device == copied > before.to_device
    with replays(model, cache) as call:
        assert call(*inputs(8))
    assert reasons() == []


GROWING = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")

SLACK = (72 if GROWING else 24) << 20
"""Bytes: torch asks for 2 MiB, 20 or more at a time, and gives segments that grow back by whole pages of 20."""

LONG = 400_000
"""Tokens: 26 MB for each tensor of the toy."""


@torch.inference_mode()
def test_bytes_of_captures_are_those_of_the_device_and_all_go_back():
    model, cache = toy()
    free = free_bytes()
    with replays(model, cache) as call:
        settle(call, *inputs(tokens=LONG))
    taken, counted = free - free_bytes(), cache.statistics()["bytes"]
    assert counted > 4 * 2 * LONG * WIDTH
    assert abs(taken - counted) < SLACK
    stats = torch.cuda.memory_stats()
    assert stats["reserved_bytes.all.current"] - stats["active_bytes.all.current"] < SLACK
    cache.clear()
    assert free_bytes() >= free - (4 << 20)


@torch.inference_mode()
def test_capture_that_fits_only_alone_takes_the_place_of_the_one_before():
    model, cache = toy()
    free = free_bytes()
    with replays(model, cache) as call:
        settle(call, *inputs(tokens=LONG))
    alone = free - free_bytes()
    cache.max_bytes = cache.statistics()["bytes"] + (8 << 20)
    with replays(model, cache) as call:
        settle(call, *inputs(tokens=LONG - 8))
        call(*inputs(tokens=LONG - 8))  # there is room only now
        assert call(*inputs(tokens=LONG - 8))
    assert len(cache.captures.members) == 1 and reasons() == []
    assert free - free_bytes() < alone + (8 << 20)


@torch.inference_mode()
def test_capture_beyond_the_budget_is_refused_and_leaves_nothing():
    model, cache = Toy().cuda(), capturing_cache(CudaCapturer(), max_bytes=1 << 20)[0]
    free = free_bytes()
    with replays(model, cache) as call:
        assert not any([call(*inputs(tokens=LONG)) for _ in range(5)])
    (reason,) = reasons()
    assert "more than their limit of 1 MB" in reason
    assert free_bytes() >= free - (4 << 20)


MALLOC = "cuMemCreate" if GROWING else "cudaMalloc"

FAILURES = [
    # function, calls of it that do not fail, and that do, since the capture began
    ("cudaStreamBeginCapture", 0, 1),
    ("cudaStreamEndCapture", 0, 1),
    ("cudaGraphInstantiateWithFlags", 0, 1),
    ("cudaGraphLaunch", 0, 1),
    ("cudaGraphLaunch", 1, 1),
    (MALLOC, 0, 2),  # torch asks twice
    (MALLOC, 1, 2),
]


@torch.inference_mode()
@pytest.mark.parametrize("function, before, calls", FAILURES)
def test_failure_at_any_stage_leaves_the_call_eager_with_one_reason_and_others_captured(
    function, before, calls, monkeypatch
):
    model, cache = toy()
    free = free_bytes()

    def fail_from_here(*of):
        device.fail(function, before, calls, error=2 if function == MALLOC else 700)
        monkeypatch.undo()
        return cuda._split_from_others(*of)

    with replays(model, cache) as call:
        monkeypatch.setattr(cuda, "_split_from_others", fail_from_here)
        assert not any([call(*inputs(tokens=7)) for _ in range(6)])
        device.fail("")
        assert cuda._split_from_others is not fail_from_here and len(reasons()) == 1
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with replays(model, cache) as call:
        settle(call, *inputs(tokens=9))
        assert call(*inputs(tokens=9))
    cache.clear()
    assert free_bytes() >= free - (4 << 20)


class Attending(torch.nn.Module):
    """[B, S, 8]; masked: attention takes a mask of the inputs'."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.eval().requires_grad_(False)

    def forward(self, x, mask=None):
        h = self.layer(x)[:, None]
        return scaled_dot_product_attention(h, h, h, attn_mask=mask)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_attention_is_captured_in_either_mode_with_a_mask_or_without(mode, masked, dtype):
    model, cache = Attending().cuda().to(dtype), capturing_cache(CudaCapturer())[0]
    x = latent(dtype=dtype, tokens=16).cuda()
    given = (torch.zeros(2, 1, 16, 16, dtype=dtype, device="cuda"),) if masked else ()
    with mode(), replays(model, cache) as call:
        settle(call, x, *given)
        assert call(x, *given), reasons()
    assert reasons() == []


class Drawing(Toy):
    def forward(self, x, t):
        return super().forward(x, t) + torch.randn_like(x)


@torch.inference_mode()
def test_memory_of_a_call_that_was_watched_and_refused_goes_back():
    model, cache = Drawing().cuda(), capturing_cache(CudaCapturer())[0]
    x, t = inputs(tokens=LONG)
    with replays(model, cache) as call:
        call(x, t)
        before = torch.cuda.memory_reserved()
        call(x, t)
        assert len(reasons()) == 1
        assert torch.cuda.memory_reserved() <= before

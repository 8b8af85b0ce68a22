"""The capturer for CUDA: refusals everywhere; captures where there is a card."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.cuda_graphs.cuda import CudaCapturer, _first_cause, idle_blocks
from kit.captures import Toy, capturing_cache, check_calls, latent, reasons, run, times


def test_model_on_the_cpu_is_left_alone_and_refused_in_one_sentence_however_many_calls_there_are():
    model, (cache, _) = Toy(), capturing_cache(CudaCapturer())
    for _ in range(3):
        with run(model, cache) as call:
            check_calls(model, call, 4)
    assert reasons() == ["CUDA graphs need an NVIDIA card, and the model runs on cpu"]
    assert fallbacks.rows()[0]["calls"] == 12


def test_other_allocator_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "cudaMallocAsync" in str(CudaCapturer().why_not(torch.device("cuda", 0)))


@pytest.mark.parametrize(("device", "said"), [("cuda:0", "runs on cuda:0 (ROCm)"), ("mps:0", "runs on mps:0")])
def test_cards_of_others_are_refused_and_asked_nothing_that_they_may_not_know(monkeypatch, device, said):
    """Simulated: torch for ROCm calls its devices cuda."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in ("get_allocator_backend", "is_current_stream_capturing", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked"))
    assert said in str(CudaCapturer().why_not(torch.device(device)))


@contextmanager
def capture_that_cannot_be_ended():
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def computes(error):
    tensor = torch.ones(3)
    computes.made = weakref.ref(tensor)
    if error is not None:
        raise error
    return tensor


class Stopped(BaseException):
    """As newer ComfyUI's interrupt: no Exception."""


@pytest.mark.parametrize("error", [ValueError("why"), torch.OutOfMemoryError("why"), Stopped("why")])
def test_what_spoilt_a_capture_is_raised_and_not_that_it_is_spoilt(error):
    with pytest.raises(type(error), match="why"):
        _first_cause(capture_that_cannot_be_ended(), lambda: computes(error))
    error.__traceback__ = None
    gc.collect()
    assert computes.made() is None


def test_end_of_a_capture_that_fails_is_the_reason_where_the_call_did_not_fail():
    with pytest.raises(RuntimeError, match="previous error"):
        _first_cause(capture_that_cannot_be_ended(), lambda: computes(None))


def segment(device, *blocks, kind="large"):
    """As in torch's snapshots."""
    blocks = [{"size": size << 20, "state": state} for size, state in blocks]
    return {"device": device, "segment_type": kind, "blocks": blocks}


def test_idle_memory_of_a_pool_is_its_large_unused_blocks_the_largest_first():
    segments = [
        segment(0, (2, "inactive"), (7, "active_allocated"), (1, "inactive")),
        segment(0, (20, "inactive"), (3, "active_pending_free")),
        segment(1, (50, "inactive")),
        segment(0, (2, "inactive"), kind="small"),  # no request of its size gets it
    ]
    assert idle_blocks(segments, 0) == [20 << 20, 2 << 20]
    assert idle_blocks(segments, 2) == []


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WIDE = 2048


def wide(x):
    """Needs three times what it is given."""
    return ((x @ x) * 2 + x @ x.T) @ x


def card():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@on_a_card
def test_capture_that_fails_leaves_random_numbers_memory_and_later_captures_as_they_were():
    capturer, x = CudaCapturer(), torch.randn(WIDE, WIDE, device=card())
    capturer.warm_up(card(), lambda: wide(x))
    torch.cuda.manual_seed(1)
    expected = torch.randn(5, device=card())
    torch.cuda.manual_seed(1)
    for _ in range(2):
        with pytest.raises(Exception, match="[Cc]aptur"):
            capturer.capture(card(), lambda: wide(x).sum().item())
        with pytest.raises(Stopped):
            capturer.capture(card(), lambda: computes(Stopped("why")))
    assert torch.equal(torch.randn(5, device=card()), expected)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph, out = capturer.capture(card(), lambda: wide(x))
    graph.replay()
    torch.testing.assert_close(out, wide(x))
    torch.cuda.empty_cache()
    assert 0 < torch.cuda.memory_reserved() - before <= graph.nbytes + (64 << 20)


@pytest.mark.gpu
@on_a_card
def test_idle_memory_of_captures_counts_as_taken_and_all_of_it_goes_back_with_the_last():
    capturer, x = CudaCapturer(), torch.randn(WIDE, WIDE, device=card())
    capturer.warm_up(card(), lambda: wide(x))
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_reserved()
    kept = []
    for rows in (WIDE, WIDE // 2):
        part = x[:rows, :rows].contiguous()
        graph, out = capturer.capture(card(), lambda part=part: wide(part))
        kept.append((graph, out, part))
    assert kept[1][0].nbytes <= kept[0][0].nbytes // 2  # it shares
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot(kept[0][0]._pool.handle, include_traces=False)
    states = [(block["state"], block["size"]) for segment in segments for block in segment["blocks"]]
    assert sum(size for state, size in states if state == "inactive") < 4 << 20 < sum(size for _, size in states)
    for graph, out, part in kept:
        graph.replay()
        torch.testing.assert_close(out, wide(part))
    del graph, out, part
    kept.clear()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= empty + (64 << 20)


@pytest.mark.gpu
@on_a_card
def test_capture_survives_that_others_clear_the_workspaces_of_cublas():
    capturer, x = CudaCapturer(), torch.randn(WIDE, WIDE, device=card())
    capturer.warm_up(card(), lambda: wide(x))
    graph, out = capturer.capture(card(), lambda: wide(x))
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7.0, device=card()) for _ in range(40)]
    graph.replay()
    torch.testing.assert_close(out, wide(x))
    for other in others:
        torch.testing.assert_close(other, torch.full_like(other, 7))


@pytest.mark.gpu
@on_a_card
def test_calls_are_captured_and_replayed_on_the_card():
    capturer = CudaCapturer()
    model, (cache, _) = Toy().cuda(), capturing_cache(capturer)
    expected, got = [], []
    with torch.inference_mode():
        for tokens in (5, 9, 5):
            with run(model, cache) as call:
                for seed in range(6):
                    x, t = latent(seed, tokens=tokens).cuda(), times(seed).cuda()
                    got.append(call(x, t))
                    expected.append(model(x, t))
    for out, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(out, plain)
    assert cache.statistics()["captures"] == 2 and reasons() == []
    assert cache.statistics()["bytes"] > 0
    cache.clear()
    assert cache.captures.members == []

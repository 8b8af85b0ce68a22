"""With cudaMallocAsync, in a process of its own: calls run normally, and one sentence says why none is captured."""

import torch
from comfy_accel.accel.cuda_graphs.cuda import CudaCapturer
from kit import made_up_device as device
from kit.captures import Toy, capturing_cache, latent, reasons, run, settle, times

from bench import gpu_async


@torch.inference_mode()
def test_it_is_refused_in_one_sentence_and_calls_run():
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    model, cache = Toy().cuda(), capturing_cache(CudaCapturer())[0]
    with run(model, cache) as call:
        out = settle(call, latent().cuda(), times().cuda())
    assert out.is_cuda and device.counts().graph_launches == 0
    assert reasons() == ["torch allocates with cudaMallocAsync, whose memory no CUDA graph can keep"]


def test_what_a_card_is_to_try_captures_replays_and_frees():
    """The made-up device refuses what cards refuse: addresses of a capture, and freeing them outside it."""
    before = device.counts()
    row = gpu_async.captured(is_tiny=True)
    assert row["allocator"] == "cudaMallocAsync" and row["left_mb"] <= 0
    assert device.counts().graph_launches - before.graph_launches == gpu_async.REPLAYS

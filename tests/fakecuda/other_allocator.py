"""With cudaMallocAsync, in a process of its own: calls run normally, and one sentence says why none is captured."""

import torch
from comfy_accel.accel.cuda_graphs.cuda import CudaCapturer
from kit import made_up_device as device
from kit.captures import Toy, capturing_cache, latent, reasons, run, settle, times


@torch.inference_mode()
def test_it_is_refused_in_one_sentence_and_calls_run():
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    model, cache = Toy().cuda(), capturing_cache(CudaCapturer())[0]
    with run(model, cache) as call:
        out = settle(call, latent().cuda(), times().cuda())
    assert out.is_cuda and device.counts().graph_launches == 0
    assert reasons() == ["torch allocates with cudaMallocAsync, whose memory no CUDA graph can keep"]

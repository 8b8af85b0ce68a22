"""The recorder for CUDA: refusals everywhere; recordings where there is a card."""

import inspect

import pytest
import torch
from capture_kit import Toy, check_calls, latent, reasons, recording_cache, run, times
from comfy_accel.accel.capture_cuda import CudaRecorder
from comfy_accel.accel.fallbacks import fallbacks
from cpu_recorder import CpuRecorder


@pytest.fixture(autouse=True)
def clean():
    fallbacks.clear()


def test_it_offers_what_the_recorder_of_tests_does():
    def asked(cls):
        return {
            name: list(inspect.signature(getattr(cls, name)).parameters)
            for name in ("why_not", "rehearse", "record", "begin_anew")
        }

    assert asked(CudaRecorder) == asked(CpuRecorder)


def test_model_on_the_cpu_is_refused_in_one_sentence_and_left_alone():
    model, (cache, _) = Toy(), recording_cache(CudaRecorder())
    with run(model, cache) as call:
        check_calls(model, call, 4)
    assert reasons() == ["there are CUDA graphs for CUDA devices alone, and the model runs on cpu"]


def test_other_allocator_is_refused_with_the_flag_that_helps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "--disable-cuda-malloc" in CudaRecorder().why_not(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_calls_are_recorded_and_replayed_on_the_card():
    recorder = CudaRecorder()
    model, (cache, _) = Toy().cuda(), recording_cache(recorder)
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

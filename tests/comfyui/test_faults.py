"""What may go wrong in compiling: the image is right, one line says why, nothing stays behind."""

import comfy.model_management
import pytest
import tiny_models
import torch
from comfy_accel.accel.block_runner import CompileSettings
from comfy_accel.accel.fallbacks import fallbacks
from comfy_accel.accel.graph_cache import GraphCache
from comfy_accel.accel.hosts.comfyui.accelerate import accelerate


@pytest.fixture(autouse=True)
def clean():
    fallbacks.clear()


@pytest.fixture(scope="module")
def small():
    return tiny_models.unet(
        channel_mult=[1, 2],
        num_res_blocks=[1, 1],
        transformer_depth=[1, 0],
        transformer_depth_output=[1, 1, 0, 0],
        transformer_depth_middle=-1,
    )


def fast(model, backend, cache):
    return accelerate(model, CompileSettings(backend=backend), cache)


def assert_no_trace(model):
    assert not [name for name, part in model.model.named_modules() if "forward" in part.__dict__]


def test_compiler_binary_is_missing(small, sample, caplog, tmp_path):
    with torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)}):
        with torch._inductor.config.patch(force_disable_caches=True):
            out = sample(fast(small, "inductor", GraphCache()), 64, 64, steps=1)
    assert torch.equal(out, sample(small, 64, 64, steps=1))
    lines = [record.message for record in caplog.records if "runs uncompiled" in record.message]
    assert lines and all("\n" not in line for line in lines)
    assert_no_trace(small)


def test_out_of_memory_while_compiling_is_tried_again_in_the_next_run(small, sample):
    short = [True]

    def backend(graph, examples):
        if short[0]:
            raise torch.OutOfMemoryError("not enough memory (simulated)")
        return graph

    cache = GraphCache()
    expected = sample(small, 64, 64)
    assert torch.equal(sample(fast(small, backend, cache), 64, 64), expected)
    assert cache.statistics()["graphs"] == 0
    assert all("out of memory" in row["reason"] for row in fallbacks.rows())
    short[0] = False
    assert torch.equal(sample(fast(small, backend, cache), 64, 64), expected)
    assert cache.statistics()["graphs"] > 0


def test_out_of_memory_while_running_falls_back_for_that_call(small, sample):
    calls = []

    def backend(graph, examples):
        def run(*args):
            calls.append(1)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("not enough memory (simulated)")
            return graph(*args)

        return run

    assert torch.equal(sample(fast(small, backend, GraphCache()), 64, 64), sample(small, 64, 64))
    assert len(calls) > 3
    assert [row["calls"] for row in fallbacks.rows()] == [1]


def test_interrupt_in_mid_compile_passes_and_leaves_nothing(small, sample):
    interrupted = [True]

    def backend(graph, examples):
        if interrupted[0]:
            raise KeyboardInterrupt
        return graph

    cache = GraphCache()
    with pytest.raises(KeyboardInterrupt):
        sample(fast(small, backend, cache), 64, 64)
    assert cache.statistics()["entries"] == 0
    assert_no_trace(small)
    interrupted[0] = False
    assert torch.equal(sample(fast(small, backend, cache), 64, 64), sample(small, 64, 64))


def test_comfyuis_interrupt_inside_a_compiled_block_is_not_swallowed(small, sample):
    def backend(graph, examples):
        def run(*args):
            raise comfy.model_management.InterruptProcessingException

        return run

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(fast(small, backend, GraphCache()), 64, 64)
    assert fallbacks.rows() == []
    assert_no_trace(small)

"""What may go wrong in compiling: the image is right, one line says why, nothing stays behind."""

import comfy.model_management
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.nodes.compile_inputs import settings
from kit import tiny_models
from kit.blocks import raising
from kit.compiled import forwards_in_place


@pytest.fixture(scope="module")
def small():
    return tiny_models.res_blocks()


def fast(model, backend, cache):
    return accelerate(model, CompileSettings(backend=backend), cache)


def test_backend_that_a_link_brings_and_nobody_knows(small, sample):
    chosen = settings("any size", "no such compiler", "run eagerly", check_gain=True)
    assert not chosen.measured
    assert torch.equal(sample(accelerate(small, chosen, GraphCache()), 64, 64, steps=1), sample(small, 64, 64, steps=1))
    assert fallbacks.rows()
    assert forwards_in_place(small.model) == []


def test_compiler_binary_is_missing(small, sample, caplog, tmp_path):
    with torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)}):
        with torch._inductor.config.patch(force_disable_caches=True):
            out = sample(fast(small, "inductor", GraphCache()), 64, 64, steps=1)
    assert torch.equal(out, sample(small, 64, 64, steps=1))
    lines = [record.message for record in caplog.records if "runs uncompiled" in record.message]
    assert lines and all("\n" not in line for line in lines)
    assert forwards_in_place(small.model) == []


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
    interrupted, interrupt = [True], comfy.model_management.InterruptProcessingException

    def backend(graph, examples):
        if interrupted[0]:
            raise interrupt
        return graph

    cache = GraphCache()
    with pytest.raises(interrupt):
        sample(fast(small, backend, cache), 64, 64)
    assert cache.statistics()["entries"] == 0 and fallbacks.rows() == []
    assert forwards_in_place(small.model) == []
    interrupted[0] = False
    assert torch.equal(sample(fast(small, backend, cache), 64, 64), sample(small, 64, 64))


def test_comfyuis_interrupt_inside_a_compiled_block_is_not_swallowed(small, sample):
    interrupt = comfy.model_management.InterruptProcessingException
    with pytest.raises(interrupt):
        sample(fast(small, lambda graph, examples: raising(interrupt), GraphCache()), 64, 64)
    assert fallbacks.rows() == []
    assert forwards_in_place(small.model) == []


def test_interrupt_button_during_a_compilation_ends_the_image(sample):
    presses, compilations = [True, True], []

    def backend(graph, examples):
        compilations.append(1)
        if presses:
            presses.pop()
            comfy.model_management.interrupt_current_processing(True)
        return graph

    def make(model):
        return sample(model, 64, 64, steps=2)

    model, cache = tiny_models.small_unet(), GraphCache()
    expected = make(model)
    for _ in range(2):
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            make(fast(model, backend, cache))
        assert not comfy.model_management.processing_interrupted()
        assert all(entry.failure is None and entry.graphs for entry in cache.entries())
        assert fallbacks.rows() == []
        assert forwards_in_place(model.model) == []
    assert not presses
    assert torch.equal(make(fast(model, backend, cache)), expected)
    assert cache.statistics()["graphs"] == len(compilations) >= 2
    assert fallbacks.rows() == []

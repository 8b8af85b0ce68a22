"""Accelerate Model in a real ComfyUI: right images, one compilation per kind, no trace left behind."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import comfy.model_management
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings, Trouble
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch.compiled_layers import survey_model
from comfy_accel.accel.hosts.comfyui.models.accelerate import HOST, KEY, Run, accelerate
from comfy_accel.accel.modules.substitution import StandIn
from comfy_accel.accel.report.facts import line_of
from comfy_accel.accel.report.run_record import records
from kit import tiny_models
from kit.blocks import raising
from kit.compiled import forwards_in_place, graphs
from torch._dynamo.utils import counters

warm = GraphCache()
"""For tests that do not count compilations: tracing is most of a test's time."""


def fast(model, cache=warm, **settings):
    """Accelerated with a backend that captures graphs and runs them as they are: same bits, in seconds."""
    settings.setdefault("backend", "eager")
    return accelerate(model, CompileSettings(**settings), cache)


def test_any_size_batch_and_prompt_after_the_first_image_compiles_nothing(small_unet, sample):
    fast_model = fast(small_unet, GraphCache())
    assert torch.equal(sample(fast_model, 128, 128), sample(small_unet, 128, 128))
    compiled = graphs()
    assert compiled > 0
    for width, height, batch, tokens in [
        (128, 192, 1, 77),
        (160, 240, 1, 77),
        (240, 160, 2, 77),
        (184, 248, 1, 154),
        (128, 128, 4, 231),
        (128, 128, 1, 77),
    ]:
        arguments = dict(width=width, height=height, batch=batch, tokens=tokens, steps=1)
        assert torch.equal(sample(fast_model, **arguments), sample(small_unet, **arguments))
    assert graphs() == compiled
    assert not counters["graph_break"]
    assert fallbacks.rows() == []


def test_plain_model_is_bit_identical_after_an_accelerated_run(small_unet, sample):
    before = sample(small_unet, 160, 240)
    keys = list(small_unet.model.state_dict())
    sample(fast(small_unet), 160, 240)
    assert torch.equal(sample(small_unet, 160, 240), before)
    assert forwards_in_place(small_unet.model.diffusion_model) == []
    assert list(small_unet.model.state_dict()) == keys


def test_block_that_nobody_tried_to_compile_is_counted_named_in_the_log_and_in_the_line(small_unet, sample, caplog):
    block = small_unet.model.diffusion_model.input_blocks[2][0]

    class Replaced:
        def __call__(self, *args, **kwargs):
            return type(block).forward(block, *args, **kwargs)

    block.forward = Replaced()
    try:
        assert torch.equal(sample(fast(small_unet), steps=3), sample(small_unet, steps=3))
    finally:
        del block.forward
    run = records.last()
    assert run.totals.eager_calls == sum(run.fallbacks.values()) == 3
    said = "another extension has replaced its forward"
    assert "ResBlock" in caplog.text and caplog.text.count(said) == 1
    assert str(line_of(run, None)[-1]) == f"{3 / (3 + run.totals.compiled_calls):.0%} of the calls uncompiled: {said}"


def test_stop_with_the_reason_raises_instead(small_unet, sample):
    broken = raising(RuntimeError("the compiler is not installed"))
    with pytest.raises(Trouble, match="the compiler is not installed"):
        sample(fast(small_unet, backend=broken, stop_on_trouble=True))
    assert forwards_in_place(small_unet.model.diffusion_model) == []


def test_model_without_repeated_blocks_is_told_or_stops(caplog):
    model = torch.nn.Conv2d(1, 1, 1)
    settings = CompileSettings(backend="eager")
    survey_model(model, settings, HOST)
    assert "Conv2d runs uncompiled: it has no repeated blocks" in caplog.text
    with warm.lease() as lease:
        assert Run(settings, warm, lease)._prepare(model, {}).kinds == 0
        with pytest.raises(Trouble, match="Conv2d cannot run compiled: it has no repeated blocks"):
            Run(replace(settings, stop_on_trouble=True), warm, lease)._prepare(model, {})


def test_budget_smaller_than_the_model_compiles_what_fits_once(sample):
    model = tiny_models.small_unet(transformer_depth_output=[1, 1, 1], model_channels=64)  # three kinds
    cache = GraphCache(max_entries=1)
    for _ in range(2):
        assert torch.equal(sample(fast(model, cache), steps=4), sample(model, steps=4))
        assert graphs() == 1 and cache.statistics()["evictions"] == 0
    assert {row["reason"] for row in fallbacks.rows()} == {
        "the graph cache is full: all block types that it may hold (1) are in use"
    }


def test_wrong_prompt_is_an_error_as_without_us_and_the_right_one_is_compiled(small_unet, sample, caplog, capfd):
    cache, wrong = GraphCache(), tiny_models.conditioning(dim=512)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sample(fast(small_unet, cache), steps=1, positive=wrong, negative=wrong)
    assert fallbacks.rows() == [] and "Traceback" not in capfd.readouterr().err
    assert torch.equal(sample(fast(small_unet, cache), steps=1), sample(small_unet, steps=1))
    assert fallbacks.rows() == []
    assert "BasicTransformerBlock" in {entry.name for entry in cache.entries() if entry.graphs}


def test_attention_patch_runs_its_blocks_eagerly_and_the_rest_compiled(small_unet, sample):
    patched = small_unet.clone()
    patched.set_model_attn1_patch(lambda q, k, v, options: (q * 1.5, k, v))
    fast_model = fast(patched)
    assert torch.equal(sample(fast_model), sample(patched))
    assert {row["block"] for row in fallbacks.rows()} == {"BasicTransformerBlock"}
    assert warm.statistics()["hits"] > 0
    assert (sample(patched) - sample(small_unet)).abs().max() > 0


def test_applying_twice_wraps_once(small_unet, sample):
    twice = fast(fast(small_unet))
    assert len(twice.get_all_wrappers(WrappersMP.APPLY_MODEL)) == 1
    assert torch.equal(sample(twice), sample(small_unet))


def test_clones_called_by_threads_of_one_run_each_keep_their_own_layers():
    """As core's MultiGPU split calls them: one thread and one clone of the model for each device."""
    rounds = threading.Barrier(2)
    models = [tiny_models.small_unet(seed=seed, transformer_depth_output=[0, 0, 0]) for seed in (0, 1)]
    wrappers = fast(models[0]).wrappers
    noise, t, context = torch.randn(2, 4, 8, 8), torch.tensor([5.0, 5.0]), torch.randn(2, 77, 768)

    def output(model, options):
        with torch.no_grad():
            return model.model.apply_model(noise, t, c_crossattn=context, transformer_options=options)

    def calls(model):
        network, stand_ins = model.model.diffusion_model, []

        def look(*_):
            blocks = [module.__dict__.get("forward") for module in network.modules()]
            stand_ins.append([block.func for block in blocks if isinstance(block, StandIn)])
            rounds.wait(60)  # both clones are in a call, and both have their layers

        network.time_embed.register_forward_pre_hook(look)
        outputs = [output(model, {"wrappers": wrappers, KEY: run}) for _ in range(3)]
        return outputs, stand_ins

    with warm.lease() as lease, ThreadPoolExecutor(2) as threads:
        run = Run(CompileSettings(backend="eager"), warm, lease)
        found = list(threads.map(calls, models))
    for model, (outputs, stand_ins) in zip(models, found, strict=True):
        assert stand_ins[0] and stand_ins[0] == stand_ins[1] == stand_ins[2]  # made once, and there in every call
        model.model.diffusion_model.time_embed._forward_pre_hooks.clear()
        assert all(torch.equal(actual, output(model, {})) for actual in outputs)
        assert forwards_in_place(model.model.diffusion_model) == []


def test_half_weights_match_eager(sample):
    model = tiny_models.small_unet(dtype=torch.float16)
    assert torch.equal(sample(fast(model), 160, 240), sample(model, 160, 240))
    assert graphs() > 0


def test_unloaded_and_loaded_again_compiles_nothing(sample):
    model = tiny_models.small_unet()
    expected = sample(model, steps=1)
    fast_model = fast(model)
    sample(fast_model, steps=1)
    compiled = warm.statistics()["compilations"]
    for unload in (comfy.model_management.unload_all_models, fast_model.detach):
        unload()
        assert torch.equal(sample(fast_model, steps=1), expected)
    assert warm.statistics()["compilations"] == compiled > 0
    assert fallbacks.rows() == []


def test_model_that_is_gone_leaves_nothing_but_kernels(sample):
    model = tiny_models.small_unet()
    fast_model = fast(model)
    sample(fast_model, steps=1)
    network = model.model.diffusion_model
    left = [weakref.ref(network), *(weakref.ref(parameter) for parameter in network.parameters())]
    comfy.model_management.unload_all_models()
    del model, fast_model, network
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []
    assert warm.statistics()["graphs"] > 0
    again = tiny_models.small_unet(seed=3)
    compiled = warm.statistics()["compilations"]
    assert torch.equal(sample(fast(again), steps=1), sample(again, steps=1))
    assert warm.statistics()["compilations"] == compiled

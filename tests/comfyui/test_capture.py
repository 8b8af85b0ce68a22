"""Captured model calls with ComfyUI's own models, samplers, LoRAs, ControlNets and caches.

What captures here is `kit.captures`: operators on fixed storages, with the rules of CUDA graphs. Blocks stay eager
where a test is not about them, since tracing is most of a test's time.
"""

import functools
import gc
import sys
import types

import comfy.controlnet
import comfy.model_management
import pytest
import torch
from comfy.ldm.modules import attention
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models import capture
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.hosts.comfyui.models.warm_up import warm_up
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.sizing.resolution import Size
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit import tiny_models
from kit.captures import EAGER_BLOCKS, left, reasons
from kit.controls import control_net
from kit.deep_cache import SMALL, last_run
from kit.families import DITS
from kit.other_nodes import controlled, lora
from kit.step_cache import every


def unet(**changes):
    return tiny_models.unet(**SMALL, **changes)


def image(model, **changes):
    return tiny_models.sample(model, **({"width": 64, "height": 96, "steps": 8} | changes))


def fast(model, cache, settings=EAGER_BLOCKS):
    return accelerate(model, settings, cache, graphs=True)


def assert_reads_only_weights_and_buffers(capturer, cache, *networks):
    own = [tensor for member in cache.captures.members for tensor in member._buffers.tensors]
    weights = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    capturer.assert_reads_only(*own, *weights)


def load(name):
    """A model and a function that samples it in so many steps."""
    if name == "UNet":
        return unet(), lambda model, steps=10, **conds: image(model, steps=steps, **conds)
    tiny = DITS[name]
    return tiny.load(), lambda model, steps=10, **conds: tiny.sample(model, steps=steps, **conds)


@pytest.mark.parametrize("name", ["UNet", "Flux", "Wan"])
def test_image_of_replays_is_the_plain_one_and_the_next_image_is_nothing_else(name, capturer, cache):
    model, run = load(name)
    expected = run(model)
    model_fast = fast(model, cache)
    assert torch.equal(run(model_fast), expected)
    assert (capturer.warm_ups, capturer.captures) == (1, 1) and capturer.replays > 5
    before = capturer.replays
    other = {"positive": tiny_models.conditioning(seed=9)} if name == "UNet" else {}
    assert torch.equal(run(model_fast, **other), run(model, **other))
    assert (capturer.warm_ups, capturer.captures, capturer.replays - before) == (1, 1, 10)
    assert_reads_only_weights_and_buffers(capturer, cache, model.model.diffusion_model)
    assert reasons() == []


@pytest.mark.parametrize(
    ("name", "settings", "cached_first"), [("UNet", every(3), True), ("Flux", DeepCacheSettings(20.0), False)]
)
def test_full_steps_of_deep_cache_share_the_one_capture_and_skipped_ones_replay_nothing(
    name, settings, cached_first, capturer, cache
):
    model, run = load(name)
    expected = run(apply_deep_cache(model, settings), 12)
    steps = last_run()
    steps_skipped = functools.partial(apply_deep_cache, settings=settings)
    both = fast(steps_skipped(model), cache) if cached_first else steps_skipped(fast(model, cache))
    for _ in range(2):
        before = capturer.replays
        assert torch.equal(run(both, 12), expected) and last_run() == steps
    assert steps["skipped_steps"] and capturer.replays - before == steps["full_steps"]
    assert torch.equal(run(fast(model, cache), 12), run(model, 12))
    assert (capturer.captures, left(capturer)) == (1, 1)
    assert_reads_only_weights_and_buffers(capturer, cache, model.model.diffusion_model)
    assert reasons() == []


def test_session_of_sizes_batches_and_prompts_is_right_and_comes_back_to_replays(capturer, cache):
    model = unet()
    model_fast = fast(model, cache)
    session = [{}, {"width": 96}, {"batch": 2}, {"tokens": 154}, {"width": 80, "height": 120}, {"cfg": 1.0}]
    expected = [image(model, steps=5, **changes) for changes in session]
    for _ in range(2):
        captured = capturer.captures
        for changes, plain in zip(session, expected, strict=True):
            assert torch.equal(image(model_fast, steps=5, seed=0, **changes), plain)
    assert captured == capturer.captures == len(session)


def test_compiled_blocks_are_inside_and_a_new_kernel_makes_a_new_capture(capturer, cache):
    model, run = load("Wan")  # of one kind
    expected = run(model)
    model_fast = fast(model, cache, CompileSettings(backend="eager"))
    assert torch.equal(run(model_fast), expected)
    first = records.last()
    assert first.captures == 1 and first.totals.model_calls == 10 and 0 < first.totals.replays < 10
    assert torch.equal(run(model_fast), expected)
    assert capturer.captures == 1 and cache.statistics()["compilations"] > 0
    (member,) = cache.captures.members
    calls = sum(member._counters.values())
    entry, graph = next(iter(member._kernels.values()))
    del member
    second = records.last()
    assert calls == DITS["Wan"].blocks and second.totals.compiled_calls == 10 * calls and second.totals.eager_calls == 0
    assert (second.captures, second.totals.model_calls, second.totals.replays) == (0, 10, 10)
    cache.drop_graph(entry, graph)
    assert torch.equal(run(model_fast), expected)
    assert capturer.captures == 2 and reasons() == []


def test_lora_on_stronger_and_off_again_is_captured_anew_each_time_and_never_stale(capturer, cache):
    model = unet()
    for strength in (None, 0.5, 1.0, None):
        patched = model if strength is None else lora(model, strength=strength)
        expected = image(patched, steps=5)
        for _ in range(2):
            assert torch.equal(image(fast(patched, cache), steps=5), expected)
        assert left(capturer) == 1
    assert capturer.captures <= 4 and reasons() == []


@pytest.mark.parametrize("unload", ["detach", "gone"])
def test_unloading_the_model_frees_its_captures(unload, capturer, cache):
    model = unet()
    model_fast = fast(model, cache)
    expected = image(model_fast)
    assert left(capturer) == 1
    if unload == "detach":
        model_fast.detach()
    else:
        del model, model_fast
        comfy.model_management.unload_all_models()
        gc.collect()
    assert left(capturer) == 0 and cache.statistics()["bytes"] == 0
    if unload != "gone":
        assert torch.equal(image(model_fast), expected) and left(capturer) == 1


def test_model_loaded_in_part_is_left_alone_and_told_once(capturer, cache):
    model = unet()
    x, t, context = torch.randn(2, 4, 12, 15), torch.tensor([5.0, 5.0]), torch.randn(2, 77, tiny_models.CONTEXT_DIM)
    model.load(torch.device("cpu"), lowvram_model_memory=model.model_size() // 2)
    try:
        with torch.inference_mode():
            plain = model.model.apply_model(x, t, c_crossattn=context, transformer_options={})
            options = {"wrappers": fast(model, cache).wrappers}
            for _ in range(4):
                assert torch.equal(
                    model.model.apply_model(x, t, c_crossattn=context, transformer_options=options), plain
                )
    finally:
        model.detach()
    assert capturer.captures == 0


def test_residuals_of_a_control_net_are_inputs_and_which_there_are_is_in_the_key(capturer, cache):
    model = unet()
    both = fast(model, cache)
    one, other = (control_net(seed, **SMALL) for seed in (3, 5))
    for controls, end in (((one,), 1.0), ((other,), 1.0), ((one,), 0.5), ((), 1.0)):
        conds = {"positive": controlled(*controls, ends=(end,))} if controls else {}
        assert torch.equal(image(both, **conds), image(model, **conds))
    assert capturer.captures == 2  # with residuals and without
    assert_reads_only_weights_and_buffers(capturer, cache, model.model.diffusion_model)
    assert reasons() == []


def test_patch_with_code_of_its_own_runs_in_each_call_and_is_told_once(capturer, cache):
    model = unet()
    patched, seen = model.clone(), []

    def patch(q, k, v, options):
        seen.append(1)
        return q * (1 + len(seen) % 3), k, v

    patched.set_model_attn1_patch(patch)
    expected = image(patched)
    calls = len(seen)
    seen.clear()
    assert torch.equal(image(fast(patched, cache)), expected)
    assert len(seen) == calls and capturer.warm_ups == 0
    assert reasons() == ["another node patches it (attn1_patch)"]


def test_wrapper_around_the_forward_runs_in_each_call_and_what_is_inside_is_captured(capturer, cache):
    model, calls = unet(), []

    def halve(executor, *args, **kwargs):
        calls.append(1)
        return executor(*args, **kwargs) * (0.5 if len(calls) % 2 else 1.0)

    wrapped = model.clone()
    wrapped.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "somebody", halve)
    expected = image(wrapped)
    calls.clear()
    assert torch.equal(image(fast(wrapped, cache)), expected)
    assert len(calls) == 8 and capturer.replays > 4


def test_other_attention_is_another_capture(capturer, cache, monkeypatch):
    """As core selects it: a function that its modules look up at each call, and that every call does the work of."""
    model = unet()
    for attend in (attention.attention_pytorch, attention.attention_split):
        monkeypatch.setattr(attention, "optimized_attention", attend)
        assert torch.equal(image(fast(model, cache)), image(model))
    assert capturer.captures == 2 and reasons() == []


def test_attention_that_no_graph_has_in_it_is_not_captured_where_the_model_calls_it(capturer, cache, monkeypatch):
    model, elsewhere = unet(), types.ModuleType("a_pack")
    elsewhere.optimized_attention = attention.wrap_attn(lambda *args, **kwargs: None)
    monkeypatch.setitem(sys.modules, "a_pack", elsewhere)
    assert torch.equal(image(fast(model, cache)), image(model))
    assert capturer.captures == 1
    kernel = torch.compiler.disable(attention.attention_pytorch.__wrapped__)
    monkeypatch.setattr(attention, "optimized_attention", attention.wrap_attn(kernel))
    assert torch.equal(image(fast(model, cache)), image(model))
    assert capturer.captures == 1 and "optimized_attention) is not known to work in a CUDA graph" in str(reasons())


def test_warm_up_leaves_nothing_to_capture_to_the_first_image(capturer, cache):
    model = unet()
    model_fast = fast(model, cache)
    warm_up(model_fast, tiny_models.conditioning(), [Size(64, 96)], [1])
    assert capturer.captures == 1
    before = capturer.replays
    assert torch.equal(image(model_fast), image(model))
    assert (capturer.captures, capturer.replays - before) == (1, 8)


def test_nothing_is_left_on_model_or_options_and_off_leaves_none_of_it(capturer, cache):
    model = unet()
    model_fast = fast(model, cache)
    image(model_fast)
    assert capture.KEY not in model_fast.model_options["transformer_options"]
    assert [path for path, part in model.model.diffusion_model.named_modules() if "forward" in vars(part)] == []
    before = capturer.captures
    image(accelerate(model, EAGER_BLOCKS, cache))
    assert capturer.captures == before


def test_without_cuda_nobody_hears_of_cuda_graphs_and_the_image_is_plain():
    model, cache = unet(), GraphCache()
    assert torch.equal(image(fast(model, cache)), image(model))
    assert reasons() == [] and cache.statistics()["captures"] == 0
    assert records.last().totals.model_calls == 0

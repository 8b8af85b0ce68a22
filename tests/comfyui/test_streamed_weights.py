"""Models whose weights core streams, on the stand-in for comfy-aimdo: compiled blocks are right and stay compiled."""

import random
import sys
import types
from contextlib import contextmanager, nullcontext

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.benchmark import Benchmark
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import RunEagerly
from comfy_accel.accel.core.settings import Settings
from comfy_accel.accel.fingerprint.kinds import describe
from comfy_accel.accel.hosts.comfyui.models import capture, streamed
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.controlnet import accelerate_control
from kit import captures, tiny_models
from kit import streamed_weights as stand_in
from kit.blocks import heard, raising
from kit.captures import capturing_cache
from kit.compiled import graphs
from kit.families import DITS

pytestmark = pytest.mark.skipif(stand_in.why_not() is not None, reason=str(stand_in.why_not()))


FLUX = DITS["Flux"]
warm = GraphCache()
"""Tracing is most of a test's time; those that count graphs have a cache of their own."""


@pytest.fixture
def card():
    with stand_in.streaming() as card:
        yield card


def compiled(model, cache=warm, **settings):
    return accelerate(model, CompileSettings(backend="eager", **settings), cache)


def reasons() -> list[str]:
    return [row["code"] for row in fallbacks.rows()]


@contextmanager
def all_compiled():
    """Inside, no block may run without its graph."""
    with heard("run_calls") as runs:
        yield
    eager = [run["totals"].eager_calls for run in runs]
    assert eager and not any(eager) and reasons() == []


def with_lora(model, strength, dtype=torch.float32):
    """A clone with a patch on some of the streamed weights."""
    clone, generator = model.clone(), torch.Generator().manual_seed(5)
    weights = {
        name: weight
        for name, weight in model.model.named_parameters()
        if name.endswith(("qkv.weight", "to_q.weight", "r1.weight"))
    }
    patches = {
        name: ("diff", (torch.randn(weight.shape, generator=generator).to(dtype) * 0.05,))
        for name, weight in weights.items()
    }
    assert len(clone.add_patches(patches, strength)) == len(patches) > 4
    return clone


@contextmanager
def failing_patches(after=0, midway=False):
    """Inside, memory runs out when LoRA is added, but for the first times; before anything is added, or after."""
    call, left = comfy.model_patcher.LowVramPatch.__call__, [after]

    def failing(self, weight):
        left[0] -= 1
        if left[0] >= 0 or midway:
            weight = call(self, weight)
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory is left")
        return weight

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(comfy.model_patcher.LowVramPatch, "__call__", failing)
        yield


def sample(model, **how):
    return FLUX.sample(model, steps=1, **how)


def test_compiled_blocks_are_right_while_weights_come_and_go(card):
    """One cache entry serves the model in place and streamed."""
    cache, rng, plain = GraphCache(), random.Random(1), FLUX.load()
    expected = [sample(plain, size=size) for size in (0, 1)]
    assert torch.equal(sample(compiled(plain, cache)), expected[0])
    before = graphs()
    model = card.streamed(FLUX.load())
    made = compiled(model, cache)
    assert made.is_dynamic() and made.model is model.model
    with all_compiled():
        for number in range(12):
            assert torch.equal(sample(made, size=number % 2), expected[number % 2])
            assert card.pins == 0
            card.shake(rng)
    assert card.misses and graphs() == before


def test_lora_changes_in_mid_session_without_a_new_graph(card):
    rng, model = random.Random(2), card.streamed(FLUX.load())
    sample(compiled(model))
    before, seen = graphs(), []
    for strength in (1.0, 0.5, 0.0, 1.0):
        patched = with_lora(model, strength)
        card.capacity = 1 << 40
        expected = sample(patched)
        seen.append(expected)
        with all_compiled():
            for _ in range(3):
                card.shake(rng)
                assert torch.equal(sample(compiled(patched)), expected)
                assert card.pins == 0
    assert graphs() == before and card.misses
    assert torch.equal(seen[0], seen[3]) and not torch.equal(seen[0], seen[1])


def test_lora_on_fp8_weights_is_that_of_core_once_they_are_resident(card):
    """At a weight's first use core's eager layers get it before it is rounded to what is kept of it."""
    rng, cache = random.Random(3), GraphCache()
    plain = tiny_models.small_unet(inference_dtypes=(torch.float8_e4m3fn, torch.float32))
    model = with_lora(card.streamed(plain), 1.0)
    tiny_models.sample(model, steps=1)
    expected = tiny_models.sample(model, steps=1)
    with all_compiled():
        for number in range(6):
            assert torch.equal(tiny_models.sample(compiled(model, cache), steps=1), expected)
            if number == 0:
                before = graphs()
            card.shake(rng)
    assert graphs() == before and card.pins == 0


@pytest.mark.parametrize(
    ("kind", "after"), [("fault", 0), ("fault", 3), ("buffer", 0), ("buffer", 3), ("patch", 0), ("patch", 1)]
)
def test_memory_that_runs_out_while_weights_are_taken_makes_the_block_run_eagerly(card, monkeypatch, kind, after):
    model = with_lora(card.streamed(FLUX.load()), 1.0)
    expected, made = sample(model), compiled(model)
    sample(made)
    take, left = streamed.StreamedWeights._try, [after]

    def fail(asked):
        left[0] -= asked == kind
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory is left")

    def failing(self, inputs):
        left[0], card.fail = after, fail
        try:
            with failing_patches(after) if kind == "patch" else nullcontext():
                return take(self, inputs)
        finally:
            card.fail = lambda kind: None

    monkeypatch.setattr(streamed.StreamedWeights, "_try", failing)
    card.capacity = 0 if kind == "buffer" else 1 << 40
    card.vbars[0].free_memory(card.size)
    if kind == "patch":
        card.vbars[0].prioritize()
    assert torch.equal(sample(made), expected)
    assert set(reasons()) == {"weights_not_taken"} and card.pins == 0
    monkeypatch.undo()
    fallbacks.clear()
    with all_compiled():
        assert torch.equal(sample(made), expected)
    assert torch.equal(sample(model), expected)


@pytest.mark.parametrize("measured", [False, True], ids=["in a graph", "while it is compared"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, comfy.model_management.InterruptProcessingException])
def test_graph_that_runs_out_of_memory_or_is_interrupted_holds_no_weights(card, monkeypatch, measured, error):
    model, cache = with_lora(card.streamed(FLUX.load()), 1.0), GraphCache() if measured else warm
    expected, made = sample(model), compiled(model, cache, measured=measured)
    card.capacity = card.size // 2
    with monkeypatch.context() as patched:
        patched.setattr(Benchmark, "_judge", lambda self: None)  # it goes on
        sample(made)
        found = [graph for entry in cache._entries.values() for graph in entry.graphs]
        assert found
        for graph in found:
            patched.setattr(graph, "run", raising(error))
        if error is torch.OutOfMemoryError:
            assert torch.equal(sample(made), expected)
        else:
            with pytest.raises(error):
                sample(made)
    assert card.pins == 0 and set(reasons()) == ({"graph_failed"} if error is torch.OutOfMemoryError else set())
    assert torch.equal(sample(made), expected) and torch.equal(sample(model), expected)
    assert card.pins == 0


def test_graph_is_compared_with_its_block_while_weights_come_and_go(card):
    model, cache = with_lora(card.streamed(FLUX.load()), 1.0), GraphCache()
    expected = sample(model)
    card.capacity = card.size // 3
    for _ in range(3):
        assert torch.equal(sample(compiled(model, cache, measured=True)), expected)
        assert card.pins == 0
    assert set(reasons()) <= {"slower"}


@pytest.mark.parametrize("kind", ["fault", "buffer"])
def test_interrupt_passes_through_and_leaves_no_pin(card, kind):
    model, plain = card.streamed(FLUX.load()), sample(FLUX.load())
    made, left = compiled(model), [9]
    card.capacity = card.size // 3

    def fail(asked):
        left[0] -= asked == kind
        if asked == kind and not left[0]:
            raise comfy.model_management.InterruptProcessingException

    card.fail = fail
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        for _ in range(9):
            sample(made)
            card.vbars[0].free_memory(card.size)
    assert left[0] == 0 and card.pins == 0 and reasons() == []
    assert torch.equal(sample(made), plain)


def test_block_whose_weights_do_not_fit_beside_another_s_runs_eagerly(card, monkeypatch):
    model, plain = card.streamed(FLUX.load()), sample(FLUX.load())
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda device: 1 << 20)
    with all_compiled():
        assert torch.equal(sample(compiled(model)), plain)  # all resident: nothing has to be in a buffer
    card.capacity = 0
    card.vbars[0].free_memory(card.size)
    assert torch.equal(sample(compiled(model)), plain)
    assert set(reasons()) == {"weights_too_large"} and card.pins == 0


def test_weights_that_are_to_stay_in_place_by_the_setting_do(card, monkeypatch):
    model, other = card.streamed(FLUX.load()), FLUX.load()
    model.cached_patcher_init = lambda disable_dynamic: other, ()
    monkeypatch.setattr(streamed, "shared", warm)
    monkeypatch.setattr(streamed.preferences, "current", lambda: Settings(weights_in_place=True))
    made = compiled(model)
    assert not made.is_dynamic()
    with all_compiled():
        assert torch.equal(sample(made), sample(other))
    assert card.faults == 0


@pytest.mark.parametrize("name", ["cast_modules_with_vbar", "resolve_cast_module_with_vbar"])
def test_core_without_what_brings_a_block_s_weights_has_its_own_way_and_says_so_once(card, monkeypatch, caplog, name):
    model, plain, own = card.streamed(FLUX.load()), sample(FLUX.load()), getattr(comfy.ops, name)
    monkeypatch.setattr(comfy.ops, name, lambda *other, **named: own(*other, **named))
    card.capacity = card.size // 2
    made = compiled(model)
    assert torch.equal(sample(made), plain)
    assert torch.equal(sample(made), plain)
    assert card.pins == 0 and graphs() == 0
    (line,) = [record.getMessage() for record in caplog.records if "stay streamed" in record.getMessage()]
    assert "its blocks may run uncompiled" in line


def hide(monkeypatch, name) -> None:
    """Have this pack see core without a function. Core has it: its own layers could not run without most of them."""
    module, _, gone = name.rpartition(".")
    seen = types.ModuleType(module)
    vars(seen).update({known: value for known, value in vars(sys.modules[module]).items() if known != gone})
    monkeypatch.setitem(sys.modules, module, seen)
    if hasattr(streamed.comfy, module.removeprefix("comfy.")):
        parts = vars(streamed.comfy) | {module.removeprefix("comfy."): seen}
        monkeypatch.setattr(streamed, "comfy", types.SimpleNamespace(**parts))


@pytest.mark.parametrize(
    "name", ["comfy.model_management.sync_stream", "comfy.memory_management.tensors_to_geometries"]
)
def test_core_without_a_function_that_taking_weights_needs_has_its_own_way_and_says_so_once(
    card, monkeypatch, caplog, name
):
    model = with_lora(card.streamed(FLUX.load()), 1.0)
    expected = sample(model)
    card.capacity = card.size // 2
    card.vbars[0].free_memory(card.size)
    hide(monkeypatch, name)
    made = compiled(model)
    for _ in range(2):
        assert torch.equal(sample(made), expected) and card.pins == 0
    told = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    blocks_left = {line for line in told if "Block runs uncompiled: it cannot be compiled as it is" in line}
    assert len(told - blocks_left) == 1 and len(blocks_left) <= 2
    monkeypatch.undo()
    fallbacks.clear()
    with all_compiled():
        assert torch.equal(sample(compiled(model)), expected)


def test_control_net_whose_weights_are_streamed_runs_compiled(card):
    from kit import controls

    rng, cache, streamed_net = random.Random(5), GraphCache(), controls.unet_control(**controls.SMALL)
    streamed_net.control_model_wrapped = card.streamed(streamed_net.control_model_wrapped)
    fast = accelerate_control(streamed_net, CompileSettings(backend="eager"), cache)
    unet, hint = tiny_models.unet(**controls.SMALL), torch.rand(1, 3, 128, 128)

    def image(net):
        features = [
            [text, {"control": net.copy().set_cond_hint(hint, 0.8), "control_apply_to_uncond": True}]
            for text, _ in tiny_models.conditioning()
        ]
        return tiny_models.sample(unet, steps=1, positive=features)

    expected = image(controls.unet_control(**controls.SMALL))
    assert not torch.equal(expected, tiny_models.sample(unet, steps=1))
    for _ in range(4):
        before = cache.statistics()["hits"]
        assert torch.equal(image(fast), expected)
        assert cache.statistics()["hits"] > before and card.pins == 0
        card.shake(rng)
    assert card.misses and reasons() == []


def test_blocks_compile_where_an_extension_hides_core_s_casting_from_torch(card, monkeypatch):
    """As KJNodes does for its own compile node: for the whole process, and for good."""
    for name in ("cast_bias_weight", "uncast_bias_weight", "cast_modules_with_vbar", "resolve_cast_module_with_vbar"):
        monkeypatch.setattr(comfy.ops, name, torch._dynamo.disable(getattr(comfy.ops, name)))
    plain = tiny_models.res_blocks(inference_dtypes=(torch.float8_e4m3fn, torch.float32))
    expected, cache = tiny_models.sample(plain, steps=1), GraphCache()
    with all_compiled():
        assert torch.equal(tiny_models.sample(compiled(card.streamed(plain), cache), steps=1), expected)


class _LayerOfAnExtension(torch.nn.Linear):
    """Without what core's own layers have: a bias, and the lists of functions."""

    comfy_cast_weights = False

    def forward(self, x):
        if not self.comfy_cast_weights:
            return super().forward(x)
        weight, bias, stream = comfy.ops.cast_bias_weight(self, x, offloadable=True)
        out = torch.nn.functional.linear(x, weight, bias)
        comfy.ops.uncast_bias_weight(self, weight, bias, stream)
        return out


def with_layers_of_an_extension():
    model = FLUX.load()
    for block in model.model.diffusion_model.single_blocks:
        block.linear2.__class__, block.linear2.bias = _LayerOfAnExtension, None
    return model


def test_layers_that_lack_what_core_s_have_run_compiled(card):
    expected, model = sample(with_layers_of_an_extension()), card.streamed(with_layers_of_an_extension())
    card.capacity = card.size // 3
    with all_compiled():
        assert torch.equal(sample(compiled(model)), expected)


def test_block_whose_weights_nobody_knows_how_to_take_runs_eagerly(card, monkeypatch):
    expected, model = sample(FLUX.load()), card.streamed(FLUX.load())
    monkeypatch.setattr(streamed, "weight_slots", raising(AttributeError("an extension's layer")))
    assert torch.equal(sample(compiled(model)), expected)
    assert set(reasons()) == {"weights_not_taken"} and graphs() == 0 and card.pins == 0


@torch.inference_mode()
def test_weights_that_core_has_prefetched_are_used_and_stay_core_s(card):
    """LoRA is added once for each use, also after a failure: core adds it in place."""
    import comfy.model_prefetch

    model = with_lora(card.streamed(FLUX.load()), 1.0)
    sample(model)
    block = model.model.diffusion_model.double_blocks[0]
    source = streamed.StreamedWeights(block, describe(streamed.plain(block)).weights)
    inputs, parts = [torch.zeros(1)], [part for part in block.modules() if hasattr(part, "_v")]
    card.capacity = 0
    card.vbars[0].free_memory(card.size)
    expected = [tensor.clone() for tensor in source.take(inputs)]
    assert [stream.is_used and stream.is_read for stream in card.streams].count(True) == 1
    source.release()
    assert not any(stream.is_used for stream in card.streams)
    for capacity in (0, 1 << 40):
        card.capacity = capacity
        card.vbars[0].free_memory(card.size)
        card.vbars[0].prioritize()
        stream = comfy.ops.cast_modules_with_vbar(parts, None, torch.device("cpu"), None, True)
        comfy.model_management.sync_stream(torch.device("cpu"), stream)
        pins = card.pins
        with failing_patches(midway=True), pytest.raises(RunEagerly, match="no memory is left"):
            source.take(inputs)
        source.release()
        for _ in range(2):
            assert all(map(torch.equal, source.take(inputs), expected))
            source.release()
        assert all(hasattr(part, "_prefetch") for part in parts) and card.pins == pins
        comfy.model_prefetch.cleanup_prefetched_modules(block, parts)
        assert card.pins == 0
        assert all(map(torch.equal, source.take(inputs), expected))
        source.release()


class Captured:
    """Runs of streamed models whose calls are captured; the capturer counts captures and replays."""

    def __init__(self, card, **settings):
        self.card = card
        self.cache, self.capturer = capturing_cache()
        self._settings = CompileSettings(backend="eager", **settings)

    def replays(self, model, expected) -> int:
        """How many of the 6 calls of a run were replays; the image is as expected, and no weight stays held."""
        made, before = accelerate(model, self._settings, self.cache, graphs=True), self.capturer.replays
        assert torch.equal(FLUX.sample(made, steps=6), expected)
        assert self.card.pins == 0
        return self.capturer.replays - before


@pytest.mark.parametrize("repetitions", [1, 100], ids=["over compiled blocks", "over eager blocks"])
def test_calls_are_captured_once_and_replayed_whatever_happens_to_streamed_weights_in_between(card, repetitions):
    """A LoRA, an eviction or another model changes what is at the addresses, and not the addresses."""
    runs, model = Captured(card, min_repetitions=repetitions), card.streamed(FLUX.load())
    models = [model, with_lora(model, 1.0), with_lora(model, 0.5), model.clone()]
    expected = [FLUX.sample(model, steps=6)]
    small = next(
        name for name, part in model.model.named_modules() if name.endswith("query_norm") and not hasattr(part, "_v")
    )
    (weight,) = model.model.get_submodule(small).named_parameters()
    assert models[3].add_patches({f"{small}.{weight[0]}": ("diff", (torch.ones_like(weight[1]),))}, 1.0)
    expected += [FLUX.sample(one, steps=6) for one in models[1:]]
    assert all(torch.equal(one, other) == (one is other) for one in expected for other in expected)
    assert runs.replays(model, expected[0]) >= 2 and runs.capturer.captures == 1
    assert runs.replays(model, expected[0]) == 6  # though core has copied the small weights to the device anew
    for number in (1, 2, 3, 0):  # the first call has the LoRA added, or taken away
        assert runs.replays(models[number], expected[number]) == 5
    card.vbars[0].free_memory(card.size)
    card.vbars[0].prioritize()
    assert runs.replays(model, expected[0]) == 5
    sample(card.streamed(FLUX.load(seed=1)))
    assert runs.replays(model, expected[0]) == 6
    assert runs.capturer.captures == 1 and reasons() == []
    comfy.model_management.unload_all_models()
    assert captures.left(runs.capturer) == 0
    assert runs.replays(model, expected[0]) >= 2 and reasons() == []


def test_calls_are_not_captured_while_their_weights_do_not_all_fit(card):
    runs, model = Captured(card, min_repetitions=100), card.streamed(FLUX.load())
    expected = FLUX.sample(model, steps=6)
    for has_room in (False, True, False):
        fallbacks.clear()
        card.capacity = 1 << 40 if has_room else card.size // 2
        card.vbars[0].free_memory(card.size)
        card.vbars[0].prioritize()
        assert (runs.replays(model, expected) > 0) == has_room
        assert [row["fields"]["why"]["code"] for row in fallbacks.rows()] == ["weights_streamed"] * (not has_room)
    assert runs.capturer.captures == 1


def test_weights_that_do_not_all_fit_are_brought_no_more_often_where_calls_are_to_be_captured(card):
    """Pinned, those that fit are in the way of the others, and all are evicted."""
    runs, model = Captured(card, min_repetitions=100), card.streamed(FLUX.load())
    expected = FLUX.sample(model, steps=6)
    card.capacity = card.size // 2
    casts = []
    for sampled in (lambda: FLUX.sample(model, steps=6), lambda: runs.replays(model, expected)):
        card.vbars[0].free_memory(card.size)
        before = card.casts
        sampled()
        casts.append(card.casts - before)
    assert 0 < casts[1] < 1.2 * casts[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, comfy.model_management.InterruptProcessingException])
@pytest.mark.parametrize("number", [1, 3, 6, 7], ids=["first call", "dry run", "capture", "replay"])
def test_error_while_weights_are_held_for_captured_calls_leaves_none_held(card, monkeypatch, number, error):
    runs, model = Captured(card, min_repetitions=100), card.streamed(FLUX.load())
    expected, hold, asked = FLUX.sample(model, steps=6), capture._HeldWeights.hold, []

    def failing(self):
        asked.append(0)

        def fail(kind):
            asked[-1] += 1
            if asked[-1] == 3 and len(asked) == number:
                raise error("simulated")

        card.fail = fail
        try:
            return hold(self)
        finally:
            card.fail = lambda kind: None

    with monkeypatch.context() as patched:
        patched.setattr(capture._HeldWeights, "hold", failing)
        if error is torch.OutOfMemoryError:
            runs.replays(model, expected)
        else:
            with pytest.raises(error):
                runs.replays(model, expected)
    assert len(asked) >= number and card.pins == 0
    assert torch.equal(FLUX.sample(model, steps=6), expected)
    assert runs.replays(model, expected) > 0

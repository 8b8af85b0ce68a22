"""Compiled blocks: right at every size, batch and channel count, from one graph."""

import contextlib
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from comfy_accel.accel.compile import block_compiler, compiled_graph, generated_code, registry
from comfy_accel.accel.compile.backend import Artifact
from comfy_accel.accel.compile.compiled_graph import CompileFailed
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.fingerprint.code_hash import CodeReader
from comfy_accel.accel.fingerprint.kinds import describe, weight_slots
from kit.block_graphs import compiled, kind_of, saved_and_loaded, tensors_of
from kit.blocks import Stop, heard, in_new_process, raising
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode


def fixed(module):
    return module.eval().requires_grad_(False)


class ConvBlock(nn.Module):
    def __init__(self, width=32, out=64):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.conv = nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(16, out)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x, emb):
        return self.skip(x) + self.conv(torch.nn.functional.silu(self.norm(x))) + self.time(emb)[..., None, None]


def check(graph, weights, block, *inputs):
    """The graph serves this call as the block does."""
    tensors = tensors_of(weights, inputs)
    assert graph.accepts(tensors), [tensor.shape for tensor in tensors]
    torch.testing.assert_close(graph.run(tensors), block(*inputs))


def conv_inputs(batch, height, width, channels=32):
    return torch.randn(batch, channels, height, width), torch.randn(batch, 16)


@pytest.mark.parametrize(("backend", "stages"), [("eager", ["generate"]), ("inductor", ["generate", "build"])])
def test_a_compilation_tells_its_stages_and_a_call_none(backend, stages, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # with a hit nothing is built
    block, inputs = fixed(ConvBlock()), conv_inputs(2, 8, 8)
    with heard() as events:
        graph, weights = compiled(block, inputs, backend=backend)
        assert [(name, fields["stage"]) for name, fields in events] == [("compile_stage", stage) for stage in stages]
        graph.run((*weights.take(), *inputs))
        assert len(events) == len(stages)


@pytest.mark.parametrize("first", [(1, 8, 8), (2, 8, 8), (17, 4, 6)])
def test_one_graph_serves_every_batch_and_size(first):
    block = fixed(ConvBlock())
    block.norm.bias = block.norm.weight  # one tensor with two names
    graph, weights = compiled(block, conv_inputs(*first))
    for size in [(1, 8, 8), (1, 5, 9), (2, 7, 3), (3, 8, 8), (16, 2, 2), (33, 3, 4)]:
        check(graph, weights, block, *conv_inputs(*size))


def test_one_graph_serves_blocks_that_differ_in_channels():
    small, large = (fixed(ConvBlock(*widths)) for widths in ((32, 64), (64, 96)))
    kind = kind_of(small, large)
    graph, _ = compiled(small, conv_inputs(2, 8, 8), kind)
    for size in ((3, 5, 6), (2, 1, 1)):
        check(graph, weight_slots(large, kind.weights), large, *conv_inputs(*size, channels=64))


def test_new_weights_are_seen_at_the_next_call():
    block = fixed(ConvBlock())
    graph, weights = compiled(block, conv_inputs(2, 4, 4))
    block.conv.weight.mul_(0.5)
    block.skip.weight = nn.Parameter(torch.randn_like(block.skip.weight), requires_grad=False)
    check(graph, weights, block, *conv_inputs(2, 4, 4))


def in_one_place(layer):
    """As streamed weights are, whose layer is in one piece of memory."""
    numbers, shape = layer.weight.numel(), layer.weight.shape
    flat = torch.cat([layer.weight.flatten(), layer.bias])
    layer.weight = nn.Parameter(flat[:numbers].view(shape), requires_grad=False)
    layer.bias = nn.Parameter(flat[numbers:], requires_grad=False)


@pytest.mark.parametrize("streamed", [False, True], ids=["weights of their own", "streamed weights"])
def test_nothing_as_large_as_the_inputs_or_streamed_weights_outlasts_compiling(streamed):
    """Torch leaves what it was given to trace in cycles, and of a video that is gigabytes."""
    block = fixed(ConvBlock())
    if streamed:
        for layer in (block.conv, block.skip, block.time):
            in_one_place(layer)
    large = {(32, 13, 11), *([tuple(block.conv.bias.shape)] if streamed else [])}
    gc.collect()
    gc.disable()
    try:
        graph, weights = compiled(block, conv_inputs(1, 13, 11))
        left = [x for x in gc.get_objects() if type(x) is torch.Tensor and not x.is_meta]
        assert [x.shape for x in left if large & {tuple(x.shape), tuple(x.shape[1:])}] == []
    finally:
        gc.enable()
    check(graph, weights, block, *conv_inputs(1, 13, 11))


def test_channels_last_is_kept():
    block = fixed(ConvBlock()).to(memory_format=torch.channels_last)
    inputs = [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in conv_inputs(2, 6, 5)]
    graph, weights = compiled(block, inputs)
    check(graph, weights, block, *inputs)
    assert graph.run((*weights.take(), *inputs)).stride() == block(*inputs).stride()


class Called(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layout", "convolution"),
    [(torch.contiguous_format, "aten.convolution.default"), (torch.channels_last, "accel.convolution.default")],
)
def test_generated_code_calls_torchs_own_convolution_where_what_it_gives_is_contiguous(layout, convolution):
    block = fixed(ConvBlock()).to(memory_format=layout)
    x, emb = conv_inputs(2, 6, 5)
    graph, weights = compiled(block, inputs := (x.to(memory_format=layout), emb), backend="inductor")
    with Called() as called:
        out = graph.run((*weights.take(), *inputs))
    assert {name for name in called.names if "convolution" in name} == {convolution}
    torch.testing.assert_close(out, block(*inputs))


class Cut(nn.Conv3d):
    """As ComfyUI's: frames of zeros before the first are left out, with what they would be multiplied by."""

    def _conv_forward(self, x, weight, bias, autopad=None):
        return super()._conv_forward(x, weight[:, :, -x.shape[2] :] if autopad == "zeros" else weight, bias)

    def forward(self, x):
        return self._conv_forward(x, self.weight, self.bias, autopad="zeros")


class Standardised(nn.Conv2d):
    """With standardised weights, as some networks have them."""

    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return super()._conv_forward(x, weight / weight.std((1, 2, 3), keepdim=True), bias)


@pytest.mark.parametrize(("kind", "kernel", "depth"), [(Cut, (3, 1, 1), (1,)), (Standardised, 3, ())])
def test_what_a_convolution_makes_of_its_arguments_is_in_the_graph(kind, kernel, depth):
    block = fixed(nn.Sequential(kind(2, 4, kernel), nn.SiLU(), kind(4, 4, kernel)))
    graph, weights = compiled(block, [torch.randn(1, 2, *depth, 8, 8)])
    for batch, height in ((1, 8), (2, 9), (17, 7)):
        check(graph, weights, block, torch.randn(batch, 2, *depth, height, 8))


class Final(nn.Conv2d):
    def __init_subclass__(cls, **options):
        raise TypeError("no class may be derived from it")

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


class Broadcasts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, gate):
        return self.second(self.first(x) * gate)


class AsksForValues(Broadcasts):
    def forward(self, x, gate):
        return super().forward(x, gate) if x.sum() > 0 else x


class Carries(nn.Module):
    """As the convolutions of HunyuanVideo 1.5's VAE: what the next call needs goes into a list."""

    def __init__(self, carry):
        super().__init__()
        self.carry = carry

    def forward(self, x, kept):
        if self.carry == "append":
            kept.append(x[:1])
        elif self.carry == "replace":
            kept[0] = kept[0] + x
        return x + kept[0]


class Steps:
    """Time steps as LTX 2 gives them: an object in slots, with a slice as a method's default."""

    __slots__ = ("data", "frames")

    def __init__(self, frames):
        self.data, self.frames = torch.randn(frames, 4), frames

    def spread(self, rows: slice = slice(None, None)):
        self.frames  # noqa: B018
        return self.data[rows].repeat_interleave(2, 0)


class TakesSteps(nn.Module):
    def __init__(self, changes=False):
        super().__init__()
        self.changes, self.linear = changes, nn.Linear(4, 4)

    def forward(self, x, steps):
        if self.changes:
            steps.frames = 7
        return self.linear(x) + steps.spread()


INPUTS = torch.randn(2, 3, 4), torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    ("block", "inputs", "said"),
    [
        (nn.Sequential(Final(2, 4, 3), nn.SiLU()), (torch.randn(1, 2, 8, 8),), "no class may be derived"),
        (AsksForValues(), INPUTS, None),
        (Carries("append"), (torch.randn(2, 4), [torch.randn(2, 4)]), "may change a list"),
        (Carries("replace"), (torch.randn(2, 4), [torch.randn(2, 4)]), "may change a list"),
        (TakesSteps(changes=True), (torch.randn(6, 4), Steps(3)), "may change a list"),
    ],
    ids=["final convolution", "needs values", "appends to a list", "changes a list", "changes an object"],
)
def test_block_that_no_graph_can_stand_for_is_not_compiled(block, inputs, said):
    with pytest.raises(CompileFailed, match=said):
        compiled(block.eval(), inputs)


class Counting(nn.Module):
    """Has a buffer; how it counts is given."""

    def __init__(self, count):
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        self.count(self)
        return self.layer(x) + self.calls


class SetsOwn(Counting):
    def forward(self, x):
        self.calls = self.calls + 1
        return self.layer(x) + self.calls


@pytest.mark.parametrize(
    "block",
    [
        Counting(lambda block: block.calls.add_(1)),
        Counting(lambda block: block.layer.bias.data.mul_(2)),
        SetsOwn(lambda block: None),
    ],
    ids=["writes to a buffer", "writes to a weight's data", "sets a buffer"],
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_block_that_changes_its_own_tensors_is_not_compiled(block, is_inference):
    """A comparison would write twice in one call, and what is set within a graph is lost."""
    with torch.inference_mode(is_inference), pytest.raises(CompileFailed, match="weights or buffers of its own"):
        compiled(fixed(block), (torch.randn(3, 4),))


def test_list_and_object_with_slots_that_a_block_reads_are_made_inside_of_the_graph():
    block, inputs = Carries(None).eval(), (torch.randn(2, 4), [torch.randn(2, 4)])
    check(*compiled(block, inputs), block, *inputs)
    block = fixed(TakesSteps())
    graph, weights = compiled(block, (torch.randn(6, 4), Steps(3)))
    for frames in (3, 5):
        check(graph, weights, block, torch.randn(2 * frames, 4), Steps(frames))


def test_size_that_was_one_is_not_taken_for_granted():
    graph, weights = compiled(fixed(Broadcasts()), (torch.randn(3, 5, 4), torch.randn(3, 1, 4)))
    assert graph.accepts((*weights.take(), torch.randn(2, 7, 4), torch.randn(2, 1, 4)))
    assert not graph.accepts((*weights.take(), torch.randn(2, 7, 4), torch.randn(2, 7, 4)))


def test_exact_size_matches_eager():
    block, inputs = fixed(Broadcasts()), (torch.randn(3, 5, 4), torch.randn(3, 1, 4))
    check(*compiled(block, inputs, any_size=False), block, *inputs)


def test_broken_compiler_gives_one_line():
    with pytest.raises(CompileFailed) as failed:
        compiled(Broadcasts().eval(), INPUTS, backend=raising(OSError("g++ was not found\nand much more")))
    assert "g++ was not found" in str(failed.value) and "\n" not in str(failed.value)


def test_settings_of_torch_are_as_before():
    def settings():
        config = torch.fx.experimental._config
        aot = getattr(torch._dynamo.config, "enable_aot_compile", None)
        return config.use_duck_shape, config.backed_size_oblivious, aot

    before = settings()
    compiled(fixed(ConvBlock()), conv_inputs(2, 4, 4))
    assert settings() == before


class Scales(nn.Module):
    def forward(self, x):
        return x * 3.25 + 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [(Stop(), Stop), (torch.OutOfMemoryError(), torch.OutOfMemoryError), (MemoryError(), torch.OutOfMemoryError)],
)
@pytest.mark.parametrize("backend", ["the block's", "inductor"])
def test_interrupts_and_want_of_memory_are_no_fault_of_the_block(backend, error, raised, monkeypatch):
    """Inductor wraps them."""
    monkeypatch.setattr(GraphLowering, "run", raising(error))
    # Else inductor may find the graph in its cache, and not run.
    with pytest.raises(raised), torch._inductor.config.patch(fx_graph_cache=False):
        chosen = backend if backend == "inductor" else raising(error)
        compiled(Broadcasts().eval(), INPUTS, backend=chosen, interrupts=(Stop,))


class Gates(nn.Module):
    """A linear layer over a slice, as after joint attention: torch guards against a batch of 1, though needlessly."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        joint = torch.cat((x, y), dim=1)
        return self.linear(joint[:, x.shape[1] :])


def test_what_a_graph_serves_is_found_out_once_for_sizes_and_strides_and_weights(monkeypatch):
    """By tracing the block once with these ones, for all blocks of the kind, every run and other sizes of the rest."""
    block = fixed(Gates())
    graph, weights = compiled(block, (torch.randn(2, 5, 8), torch.randn(2, 3, 8)))
    traced, with_ones = [], graph.with_ones
    monkeypatch.setattr(graph, "with_ones", lambda *sizes: traced.append(1) or with_ones(*sizes))
    monkeypatch.setattr(graph, "guards", asked := Asked(graph.guards))
    inputs = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    tensors = (*weights.take(), *inputs)
    assert graph.accepts(tensors)
    assert len(traced) == 1
    others = [tensor.clone() for tensor in tensors]
    assert graph.accepts(tensors) and graph.accepts(others)
    assert (len(traced), asked.times) == (1, 3)
    assert graph.accepts((*others[:2], torch.randn(1, 6, 8), others[3]))
    assert len(traced) == 1 and len(graph.facts.ones) == 1
    transposed = others[0].T.contiguous().T
    for weight in (transposed, torch.randn(65)[1:].view(8, 8), others[0].double()):
        before = asked.times
        graph.accepts((weight, *others[1:]))
        assert asked.times > before


class Asked:
    """Guards that count."""

    def __init__(self, guards):
        self.guards, self.times = guards, 0

    def __call__(self, tensors):
        self.times += 1
        return self.guards(tensors)


def test_answers_of_a_graph_are_bounded_and_the_latest_stay(monkeypatch):
    monkeypatch.setattr(compiled_graph, "_MOST_ANSWERS", 2)
    graph, weights = compiled(fixed(Gates()), (torch.randn(2, 5, 8), torch.randn(2, 3, 8)))
    monkeypatch.setattr(graph, "guards", asked := Asked(graph.guards))

    def times(tokens):
        before = asked.times
        assert graph.accepts((*weights.take(), torch.randn(2, tokens, 8), torch.randn(2, 3, 8)))
        return asked.times - before

    assert [times(tokens) for tokens in (5, 6, 5, 7, 5, 6)] == [1, 1, 0, 1, 0, 1]


class WithReferences(nn.Module):
    """As Qwen-Image-Edit 2511: two rows of time steps an image, the second for the pictures to edit."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, times, own):
        half = times.shape[0] // 2
        times, others = times[:half].unsqueeze(1), times[half:].unsqueeze(1)
        return self.linear(torch.cat((torch.addcmul(times, x[:, :own], times), x[:, own:] * others), dim=1))


def test_graph_for_two_rows_an_image_serves_a_batch_of_one_and_larger_ones():
    block = fixed(WithReferences())

    def call(batch):
        return torch.randn(batch, 7, 4), torch.randn(2 * batch, 4), 5

    graph, weights = compiled(block, call(1))
    assert graph.facts.grown == ((3, 0, 2),)
    for batch in (1, 3):
        check(graph, weights, block, *call(batch))


class Rotates(nn.Module):
    """As LTX 2: as many heads as a table of positions has, in halves; and an even number of tokens, in pairs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, table, scales, width):
        x = self.linear(x)
        heads = x.reshape(*x.shape[:2], table.shape[1], -1).reshape(*x.shape[:2], table.shape[1], 2, -1)
        x = (heads * table).reshape(x.shape) * scales.reshape(len(x), 1, 3, width // 3)[:, :, 0]
        return x.reshape(len(x), x.shape[1] // 2, 2, 32).sum(2)


def test_only_sizes_that_are_the_models_are_fixed():
    block = fixed(Rotates())

    def call(batch, tokens):
        return torch.randn(batch, tokens, 32), torch.randn(tokens, 4, 2, 4), torch.randn(batch, 1, 96), 96

    graph, weights = compiled(block, call(3, 6))
    of_inputs = [item for item in graph.facts.fixed if item[0] >= graph.facts.weights]
    assert of_inputs == [(2, 2, 32), (3, 1, 4), (3, 2, 2), (3, 3, 4), (5, 0, 96)]
    for batch, tokens in [(1, 4), (5, 10), (3, 6), (2, 32)]:
        check(graph, weights, block, *call(batch, tokens))


def test_missing_cpp_compiler_is_said_before_anything_is_traced(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    before = counters["stats"].copy()
    with pytest.raises(CompileFailed, match="needs a C\\+\\+ compiler for the CPU, and no-such-compiler was not found"):
        compiled(Broadcasts().eval(), INPUTS, backend="inductor")
    assert counters["stats"] == before


@pytest.fixture
def scopes(monkeypatch):
    """The globals of the functions that are compiled."""
    found = []

    def make_function(*args):
        function = block_function(*args)
        found.append(function.__globals__)
        return function

    block_function = block_compiler._block_function
    monkeypatch.setattr(block_compiler, "_block_function", make_function)
    return found


def test_weight_of_another_size_is_refused_before_and_no_generated_code_asserts_its_inputs():
    block, before = fixed(ConvBlock()), set(map(id, generated_code.all_modules()))
    graph, weights = compiled(block, conv_inputs(2, 8, 8), backend="inductor")
    tensors = tensors_of(weights, conv_inputs(3, 6, 8))
    assert graph.accepts(tensors)
    assert not graph.accepts([torch.cat([tensors[0]] * 2), *tensors[1:]])
    made = [module for module in generated_code.all_modules() if id(module) not in before]
    assert made and not any("assert_size_stride(arg" in Path(module.__file__).read_text() for module in made)


def test_dropped_graph_leaves_nothing_in_inductor_whether_compiled_or_loaded(scopes):
    def kept():
        return [len(PyCodeCache.modules), len(PyCodeCache.modules_no_attr), len(PyCodeCache.linemaps)]

    gc.collect()
    before = kept()
    block = fixed(Broadcasts())
    graph, weights = compiled(block, INPUTS, backend="inductor")
    assert kept() != before and any(name.startswith("__compiled_fn") for scope in scopes for name in scope)
    again = saved_and_loaded(graph, block, INPUTS)
    del graph
    gc.collect()
    assert not any(value is not None for scope in scopes for value in scope.values())
    check(again, weights, block, *INPUTS)
    assert kept() != before
    del again
    gc.collect()
    assert kept() == before


def test_library_is_loaded_once_and_takes_no_name_of_others(monkeypatch):
    block, inputs = fixed(Scales()), (torch.randn(3, 4),)
    graph, _ = compiled(block, inputs, backend="inductor")
    monkeypatch.setitem(sys.modules, "kernel", others := object())

    def libraries():
        return {name for name in sys.modules if name.startswith("accel_") and name.endswith(".kernel")}

    before = set(sys.modules)
    for _ in range(2):
        saved_and_loaded(graph, block, inputs)
    new = {name for name in set(sys.modules) - before if name.endswith(".kernel")}
    assert len(new) <= 1 and new <= libraries() != set()
    assert sys.modules["kernel"] is others


def test_compiling_runs_nothing():
    """With two rows in place of one, it took twice the memory of a call."""
    ran = []

    def backend(graph, examples):
        return lambda *given: ran.append(graph) or graph(*given)

    block = fixed(ConvBlock())
    graph, weights = compiled(block, conv_inputs(1, 4, 4), backend=backend)
    assert ran == []
    check(graph, weights, block, *conv_inputs(3, 5, 4))
    assert len(ran) == 1


class Replays:
    """A backend that compiles nothing."""

    name = "replays"
    is_faster = False
    load = None

    def __init__(self):
        self.compiled = 0

    def find_missing(self, device=None):
        return None

    def compile(self, function, tensors):
        self.compiled += 1
        return Artifact(lambda tensors: function(*tensors), guards=lambda tensors: True)


def test_registered_backend_compiles_blocks_and_says_where_its_compiler_is_missing(monkeypatch):
    monkeypatch.setitem(registry.BACKENDS, "replays", toy := Replays())
    block = fixed(ConvBlock())
    graph, weights = compiled(block, conv_inputs(1, 8, 8), backend="replays")
    assert toy.compiled == 1 and graph.save is None
    for size in [(1, 8, 8), (3, 5, 9)]:
        check(graph, weights, block, *conv_inputs(*size))
    toy.find_missing = lambda device=None: Reason("compile_failed", error="no such compiler here")
    with pytest.raises(CompileFailed, match="^no such compiler here$"):
        compiled(Broadcasts().eval(), INPUTS, backend="replays")
    assert toy.compiled == 1


IN_THREADS = """
import threading
import torch
from kit.block_graphs import compiled

for _ in range(2):
    thread = threading.Thread(target=compiled, args=(torch.nn.Linear(4, 4), [torch.randn(3, 4)]))
    thread.start()
    thread.join()
    print("compiled")
"""


def test_threads_that_end_may_compile_one_after_another_without_a_gpu():
    """In a process of its own, which crashed."""
    assert in_new_process(IN_THREADS, CUDA_VISIBLE_DEVICES="") == "compiled\n" * 2


# What inductor's code makes is its calls' own, as what "eager" makes is.
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_threads_may_run_one_graph_at_once(backend):
    """As two samplers on one device; each thread asks whether the graph fits and runs it, at sizes of its own."""
    threads, block = 4, fixed(ConvBlock())
    others = [fixed(ConvBlock()) for _ in range(threads)]
    graph, _ = compiled(block, conv_inputs(2, 6, 8), backend=backend)
    together = Barrier(threads)

    def calls(index):
        weights = weight_slots(others[index], kind_of(block).weights).take()
        inputs = [conv_inputs(2 + index, 4 + 3 * index + size, 9) for size in range(3)]
        with torch.inference_mode():
            alone = [graph.run((*weights, *given)) for given in inputs]
            together.wait(60)
            for turn in range(150):
                given, expected = inputs[turn % 3], alone[turn % 3]
                assert graph.guards((*weights, *given))
                assert torch.equal(graph.run((*weights, *given)), expected)
            assert all(map(torch.allclose, alone, [others[index](*given) for given in inputs], [1e-4] * 3, [1e-5] * 3))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(calls, range(threads)))
    finally:
        sys.setswitchinterval(before)


class Held:
    """As core's newer layers hold their cast weights."""

    def __init__(self, weight):
        self.weight = weight

    def __enter__(self):
        return self.weight * 2

    def __exit__(self, *error):
        return None


@contextlib.contextmanager
def held(layer):
    with Held(layer.weight) as weight:
        yield weight


class Yielding(nn.Linear):
    """As Kandinsky 6's layers, whose weights a generator holds."""

    def forward(self, x):
        with held(self) as weight:
            return torch.nn.functional.linear(x, weight, self.bias)


def test_what_a_with_statement_runs_is_code_that_the_analysis_found():
    block, reader = fixed(Yielding(4, 4)), CodeReader()
    describe(block, reader)
    graph, weights = compiled(block, (torch.randn(2, 4),), code=reader.collect_code())
    check(graph, weights, block, torch.randn(3, 4))

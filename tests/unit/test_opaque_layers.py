"""Linear layers of weights that nothing explains: the blocks around them are compiled, and call them as they are."""

import functools

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import benchmark
from comfy_accel.accel.dispatch.block_observer import BlockObserver
from comfy_accel.accel.dispatch.compiled_layers import Host
from comfy_accel.accel.hosts.diffusers.peft import PeftLayers
from comfy_accel.accel.modules import host_calls
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.blocks import Stored, heard, layers_of, model_of, of_a_pack, reasons
from kit.stores import saving
from torch import nn

WIDTH = 8


class StoredLinear(nn.Linear):
    """Runs code that no compiler follows."""

    def __init__(self, seed):
        super().__init__(WIDTH, WIDTH)
        numbers = torch.randint(-9, 9, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(seed))
        self.weight = Stored(numbers.to(torch.int8), requires_grad=False)
        self.weight.state = object()
        self.scale = 0.1

    def forward(self, x):
        data = self.weight.as_subclass(torch.Tensor).numpy().astype("float32")
        return nn.functional.linear(x, torch.from_numpy(data) * self.scale, self.bias)


class Halving(StoredLinear):
    def forward(self, x):
        return super().forward(x).half()


class Block(nn.Module):
    def __init__(self, seed, layer=StoredLinear):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), layer(seed), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).to(x.dtype)


class Reading(Block):
    def forward(self, x):
        return super().forward(x.to(self.up.weight.device))


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def both_ways(model, cache, x=X, backend="eager"):
    """(eager, compiled)"""
    with torch.inference_mode():
        eager = model(x.clone())
        with substitute(layers_of(model, cache, Host(wraps=PeftLayers()), backend=backend), Order.COMPILED):
            return eager, model(x.clone())


def check(model, cache=None, x=X):
    """Both ways give the same."""
    eager, compiled = both_ways(model, cache or GraphCache(), x)
    assert torch.equal(compiled, eager)


def test_blocks_are_compiled_around_layers_that_run_as_they_are():
    called, cache, models = [], GraphCache(), [model_of(Block(seed), Block(seed + 1)) for seed in (0, 5)]

    def forward(x):
        called.append(None)
        return x * 3

    models[1].blocks[0].up.forward = of_a_pack(forward)  # whatever is there is called, and once
    for model, x in zip((*models, models[0]), (X, torch.cat([X, X]), X[:1, :2]), strict=True):
        check(model, cache, x)
    assert cache.statistics()["compilations"] == 1 and reasons() == [] and len(called) == 2


@pytest.mark.parametrize(("seconds", "turns"), [(0.5, 8), (2.0, 16)])
def test_blocks_are_timed_by_turns_around_code_of_others_which_runs_once_in_each_call(seconds, turns, monkeypatch):
    def timed(run, _):
        return run(), seconds if isinstance(run, functools.partial) else 1.0  # the graph, or the block

    monkeypatch.setattr(benchmark, "_time", timed)
    called, cache, model, stable, eager = [], GraphCache(), model_of(Block(0), Block(1)), [], []

    def forward(x):
        called.append(None)
        return x * 3

    for block in model.blocks:
        block.norm.forward = of_a_pack(forward)
    with torch.inference_mode(), heard() as events:
        expected = model(X)
        for _ in range(10):
            layers, observer = layers_of(model, cache, Host(wraps=PeftLayers()), measured=True), BlockObserver()
            for block in model.blocks:
                layers[block].observer = observer
            called.clear()
            with substitute(layers, Order.COMPILED):
                assert torch.equal(model(X), expected)
            assert len(called) == 2
            stable.append(observer.is_stable)
            eager.append(observer.eager_calls)
    is_left, passes = seconds > 1, turns // 2  # two blocks take turns
    assert [fields["gain"] for name, fields in events if name == "probe_end"] == [None if is_left else 0.5]
    assert stable == [number >= passes for number in range(10)]  # a capture waits so long, and no longer
    assert sum(eager[:passes]) == passes and eager[passes:] == [2 * is_left] * (10 - passes)
    assert ["slower at this size" in reason for reason in reasons()] == [True] * is_left
    assert sum(entry.calls for entry in cache.entries()) == 20 - sum(eager)


@pytest.mark.parametrize("changes", [True, False])
def test_forward_that_another_program_put_on_a_part_gets_memory_of_its_own(changes):
    kept, model = [], model_of(Block(0), Block(1))

    def forward(x):
        kept.append(x)
        return x.mul_(2) if changes else x * 2

    forward = of_a_pack(forward)
    forward.__module__ = __name__  # as a wrapper has taken it over from what it wraps
    for block in model.blocks:
        block.norm.forward = forward
    check(model)
    assert any("norm changes what it is given" in reason for reason in reasons()) == changes
    if not changes:
        values = kept[2:], [x.clone() for x in kept[2:]]
        assert len(kept) == 4
        check(model, x=X + 1)
        assert all(map(torch.equal, *values))


class Told(Block):
    def __init__(self, seed):
        super().__init__(seed, lambda seed: nn.Linear(WIDTH, WIDTH))

    def forward(self, x, transformer_options):
        return x + self.up(self.norm(x), transformer_options=transformer_options)


def test_part_with_others_forward_is_given_a_hosts_options_with_tensors_of_inference_mode(monkeypatch):
    with torch.inference_mode():
        options = {"sigmas": torch.ones(3)}
    of_call = host_calls.Options((), lambda of_block: options | of_block)
    monkeypatch.setitem(host_calls.OPTIONS, "transformer_options", of_call)
    given, model = [], model_of(Told(0), Told(1))

    def forward(x, transformer_options):
        given.append(transformer_options)
        return x * 2

    for block in model.blocks:
        block.up.forward = of_a_pack(forward)
    cache = GraphCache()
    host = Host(wraps=PeftLayers(), simplifier=lambda region: lambda named: {} if "sigmas" in named else named)
    layers = layers_of(model, cache, host)
    with torch.inference_mode():
        eager = [block(X, options) for block in model.blocks]
        with substitute({block: layers[block] for block in model.blocks}, Order.COMPILED):
            assert all(torch.equal(block(X, options), one) for block, one in zip(model.blocks, eager, strict=True))
    assert reasons() == [] and cache.statistics()["hits"] == 2
    assert [sorted(one) for one in given] == 4 * [["sigmas"]]


class Marked(nn.Linear):
    mark = is_others = features = 2


class Asking(Block):
    """Asks something of a part before it calls it."""

    def __init__(self, seed, asks):
        super().__init__(seed)
        self.up, self.asks = Marked(WIDTH, WIDTH), asks
        self.up.left = 2

    def forward(self, x):
        asked = {
            "class": lambda: isinstance(self.up, Marked),
            "there": lambda: hasattr(self.up, "left"),
            "value": lambda: getattr(self.up, "left", 1) == 2,
            "of its class": lambda: self.up.mark + self.up.features == 4,
        }
        return super().forward(x) * (3 if asked[self.asks]() else 1)


@pytest.mark.parametrize("asks", ["class", "there", "value", "of its class"])
def test_code_that_asks_something_of_a_part_with_others_forward_gets_what_the_part_would_say(asks):
    model = model_of(Asking(0, asks), Asking(1, asks))
    for block in model.blocks:
        block.up.forward = lambda x: x * 2
    check(model)
    assert (reasons() == []) == (asks in ("class", "of its class"))


def test_part_that_calls_another_block_leaves_the_layers_of_its_own():
    model = model_of(Block(0), Block(1))
    first, second = model.blocks
    first.norm.forward = lambda x: second(x)
    check(model)
    assert reasons() == []


@pytest.mark.parametrize("text", ["", "Ellipsis"])
def test_part_gets_the_same_tensor_twice_and_text_as_they_are_given(text):
    class Twice(Block):
        def forward(self, x):
            return x + self.norm(x, x, text=text)

    model, given = model_of(Twice(0), Twice(1)), []
    for block in model.blocks:
        block.norm.forward = lambda x, same, text: given.append((same is x, text)) or x * 2
    check(model)
    assert given == [(True, text)] * 4


def test_layer_that_gives_another_type_than_it_got_leaves_its_block_uncompiled():
    class OfHalves(Block):
        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).to(x.dtype))

    check(model_of(OfHalves(0, Halving), OfHalves(1, Halving)))
    assert all("up gives torch.float16 (2, 5, 8) for torch.float32 (2, 5, 8)" in reason for reason in reasons())
    assert reasons()


def test_block_that_reads_such_a_weight_itself_runs_uncompiled_with_a_reason():
    check(model_of(Reading(0), Reading(1)))
    (reason,) = reasons()
    assert "up" in reason and "reads weights of its parts" in reason


@pytest.mark.thorough  # compiles with inductor
def test_saved_graph_calls_the_layers_of_another_model(tmp_path):
    caches = [saving(tmp_path), saving(tmp_path)]
    for seed, cache in enumerate(caches):
        eager, compiled = both_ways(model_of(Block(seed), Block(seed + 9)), cache, X[: 2 - seed], "inductor")
        torch.testing.assert_close(compiled, eager)
    assert reasons() == []
    assert [cache.statistics()["loaded"] for cache in caches] == [0, 1]

"""Which shapes count as compiled: those that a run ended well with, while the cache still holds its graphs."""

import pytest

torch = pytest.importorskip("torch")

from comfy_accel.accel.cache.compiled_sizes import Compiled, architecture, compiled_for, remember  # noqa: E402
from comfy_accel.accel.cache.graph_cache import GraphCache  # noqa: E402
from comfy_accel.accel.compile.compiled_graph import CompiledGraph  # noqa: E402
from comfy_accel.accel.core.compile_settings import CompileSettings  # noqa: E402
from comfy_accel.accel.dispatch.block_runner import BlockRunner  # noqa: E402
from comfy_accel.accel.fingerprint.kinds import GraphKey, Kind  # noqa: E402
from comfy_accel.accel.fingerprint.survey import survey  # noqa: E402
from comfy_accel.accel.modules.substitution import Order, substituted  # noqa: E402

WIDTH = 8


class Block(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x))


class Network(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(width), Block(width)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def run(model, cache, *shape, any_size=False):
    """One run with Accelerate Model's engine over a tensor of this shape; remembered as such."""
    settings = CompileSettings(backend="eager", any_size=any_size)
    with torch.inference_mode(), cache.lease() as lease:
        layers = {
            region.block: BlockRunner(region, cache, settings, lease=lease) for region in survey(model, 1).regions
        }
        with substituted(layers, Order.COMPILED):
            model(torch.randn(*shape, WIDTH))
    remember(cache, architecture(model), shape, lease.keys)


def test_exact_shapes_are_those_that_were_run():
    model, cache = Network(), GraphCache()
    assert compiled_for(cache, architecture(model)) == Compiled()
    run(model, cache, 1, 4, 4)
    run(model, cache, 1, 4, 6)
    assert compiled_for(cache, architecture(model)) == Compiled(((1, 4, 4), (1, 4, 6)))
    assert compiled_for(cache, architecture(Network())).shapes == ((1, 4, 4), (1, 4, 6))  # other weights, same shapes
    assert compiled_for(cache).shapes == ((1, 4, 4), (1, 4, 6))  # of the model that ran last


def test_a_shape_whose_graphs_have_left_is_forgotten():
    model, cache = Network(), GraphCache(max_entries=1)
    run(model, cache, 1, 4, 4)
    run(model, cache, 1, 4, 6)
    assert compiled_for(cache, architecture(model)).shapes == ((1, 4, 6),)
    cache.clear()
    assert compiled_for(cache, architecture(model)) == Compiled()


def test_graphs_for_any_size_say_so():
    model, cache = Network(), GraphCache()
    run(model, cache, 1, 4, 4, any_size=True)
    assert compiled_for(cache, architecture(model)) == Compiled((), any_size=True)
    run(model, cache, 1, 4, 6)
    assert compiled_for(cache, architecture(model)) == Compiled(((1, 4, 6),), any_size=False)


def test_another_architecture_has_shapes_of_its_own():
    model, cache = Network(), GraphCache()
    run(model, cache, 1, 4, 4)
    assert compiled_for(cache, architecture(Network(16))) == Compiled()
    assert compiled_for(GraphCache(), architecture(model)) == Compiled()


def test_a_run_that_compiled_nothing_is_not_remembered():
    cache = GraphCache()
    remember(cache, "model", (1, 4, 4), ())
    assert compiled_for(cache, "model") == Compiled()


def test_the_oldest_of_many_runs_is_forgotten():
    cache, key = GraphCache(), GraphKey(Kind("block", "digest", ()), (), (), "eager", sizes=(torch.Size([1]),))
    cache.find(key, "block", lambda graph: True, lambda: CompiledGraph(len, bool))
    for width in range(300):
        remember(cache, "model", (1, 4, width), [key])
    assert compiled_for(cache, "model").shapes == tuple((1, 4, width) for width in range(300 - 256, 300))

"""What another pack's code keeps from one call of a block to the next: the image stays what it is uncompiled.

Each way of keeping something (`kit/keeping_pack.py`) is run uncompiled and compiled, from the same state.
"""

import collections
import functools
import importlib.util
import itertools
import sys
import types
from pathlib import Path

import kit
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.fingerprint.code_facts import may_keep
from comfy_accel.accel.hosts.diffusers import pipeline, runs
from kit.blocks import reasons
from kit.thorough import thorough_except
from torch import nn

PACK = "a_pack_of_others"


def loaded():
    """The pack's module, which has kept nothing yet."""
    file = Path(kit.__file__).with_name("keeping_pack.py")
    spec = importlib.util.spec_from_file_location(PACK, file)
    pack = sys.modules[PACK] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    return pack


WAYS = [
    name
    for name, value in vars(loaded()).items()
    if getattr(value, "__code__", loaded.__code__).co_varnames[:2] == ("part", "x")
]
HARMLESS = ("reads_only", "changes_its_own")
BY_TORCH = ("tensors_in_list", "tensors_in_list_of_cell")
"""Torch itself refuses to trace them."""

QUICK = (
    *("in_global", "tensor_in_object", "on_part_for_others", "in_slots", "tensors_in_list", "in_queue", "in_tensor"),
    *("in_thread", "in_iterator", "at_random", "is_written_only", "in_default", "deep_in_cell", "whatever_happens"),
    *("by_bound_method", "with_two_rows", *HARMLESS),
)
"""Ways of different kinds: the others keep it where one of these does, or by other words."""

CALLS_OTHERS = {"by_method", "by_property", "by_class_method", "in_what_is_called", "by_partial"}
CALLS_OTHERS |= {"by_operator", "in_heap", "over_iterator", "with_two_rows"}
"""Ways whose own code changes nothing: what it calls does."""


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Block(nn.Module):
    layer = Layer

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), self.layer(8, 16), nn.Linear(16, 8)

    def forward(self, x, e):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x) * (1 + e))))


class Other(Block):
    layer = nn.Linear


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        self.first, self.blocks = nn.ModuleList(Other() for _ in range(2)), nn.ModuleList(Block() for _ in range(2))
        self.eval().requires_grad_(False)

    def forward(self, frames, t):
        x, e = self.embed(frames), t[:, None, None].expand(-1, 1, 8)
        for block in (*self.first, *self.blocks):
            x = block(x, e)
        return self.head(x)


def images(model, shapes):
    out = []
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for level in (1.0, 0.6):
            x = x - 0.2 * model(x, torch.full(shape[:1], level))
        out.append(x)
    return out


def state(value, seen):
    """All that a pack, or an object of it, has kept, and where its tensors are. seen: by id, kept alive."""
    if isinstance(value, torch.Tensor):
        return (type(value), str(value.device), value.tolist())
    if isinstance(value, (int, float, str, itertools.count)):
        return repr(value)
    is_packs = getattr(value, "__module__", None) == PACK or getattr(value, "__name__", None) == PACK
    if id(value) in seen or isinstance(value, types.ModuleType) and not is_packs:
        return None
    seen[id(value)] = value
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return state([*cells, value.__dict__, value.__defaults__, value.__kwdefaults__], seen)
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [state(item, seen) for item in value]
    if isinstance(value, dict):
        return [(key, state(item, seen)) for key, item in value.items()]
    if hasattr(value, "__slots__") and not isinstance(value, type):
        return value.calls
    if is_packs or isinstance(value, types.SimpleNamespace):
        return state({name: item for name, item in vars(value).items() if not name.startswith("__")}, seen)
    return None


@pytest.fixture(scope="module")
def with_others_compiled():
    return GraphCache()


def by_class(patch, model, function):
    own = nn.Linear.forward
    patch.setattr(Layer, "forward", lambda self, x: function(self, own(self, x)))


def by_part(patch, model, function):
    for block in model.blocks:
        block.up.forward = functools.partial(lambda part, x: function(part, nn.Linear.forward(part, x)), block.up)


def by_hook(patch, model, function):
    for block in model.blocks:
        block.up.register_forward_hook(lambda part, args, out: function(part, out))


def check(way, cache, monkeypatch, put=by_class, shapes=((1, 5, 4), (2, 5, 4), (1, 3, 4))):
    monkeypatch.setattr(pipeline, "attach", lambda *_: None)
    monkeypatch.setattr(runs, "shared", cache)
    got = []
    for is_compiled in (False, True):
        pack, model = loaded(), Model()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(Layer, "calls", 0, raising=False)
            put(patch, model, getattr(pack, way))
            if is_compiled:
                pipeline.accelerate_module(model, backend="eager")
            made = images(model, shapes)
            counts = [(part.__dict__.get("calls"), hasattr(part, "kept")) for part in model.modules()], Layer.calls
            got.append((made, state(pack, {}), counts))
    (expected, *was), (made, *now) = got
    for one, other in zip(expected, made, strict=True):
        torch.testing.assert_close(one, other)
    assert was == now
    return reasons()


@pytest.mark.parametrize("way", thorough_except(WAYS, *QUICK))
def test_what_is_kept_from_one_call_to_the_next_counts(way, with_others_compiled, monkeypatch):
    why = check(way, with_others_compiled, monkeypatch)
    assert (not why) == (way in HARMLESS)
    if why and way not in BY_TORCH:
        assert "from one call to the next" in why[0] or f"which {way} (kit/keeping_pack.py) uses" in why[0]


@pytest.mark.parametrize("way", ["in_global", "whatever_happens", "with_two_rows"])
def test_compiling_leaves_what_is_kept_alone(way, monkeypatch):
    cache = GraphCache()
    check(way, cache, monkeypatch)
    assert cache.statistics()["compilations"] >= 1


@pytest.mark.parametrize(("way", "put"), [("in_global", by_part), ("by_bound_method", by_hook)])
def test_forward_or_hook_of_a_part_runs_once_in_each_call_and_the_block_is_compiled_around_it(way, put, monkeypatch):
    cache = GraphCache()
    assert check(way, cache, monkeypatch, put) == []
    assert cache.statistics()["compilations"] == 2


def test_a_graph_of_two_images_is_not_tried_for_one_with_which_something_is_kept(monkeypatch):
    shapes = (2, 5, 4), (1, 5, 4), (1, 3, 4), (3, 5, 4), (2, 5, 4)  # nor for more once something was kept
    assert check("with_one_row", GraphCache(), monkeypatch, shapes=shapes)


def test_the_ways_may_keep_something_and_plain_code_may_not():
    def plain(x, context=None):
        parts = [part * 2 for part in x.chunk(2)]
        return torch.cat(parts).view(-1), (context or {}).get("scale")

    pack = loaded()
    assert not may_keep(plain.__code__) and not may_keep(pack.reads_only.__code__)
    assert {way for way in WAYS if not may_keep(getattr(pack, way).__code__)} == {"reads_only", *CALLS_OTHERS}

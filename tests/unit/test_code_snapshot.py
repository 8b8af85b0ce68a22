"""Code that was read is compared with what stands: what is read of objects and tables counts, and nothing else does.

What may be swapped is in test_current_code.py."""

import dataclasses
import functools
import types

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.compiled_graph import CompileFailed
from comfy_accel.accel.dispatch import current_code
from comfy_accel.accel.dispatch.block_runner import BlockRunner, BlocksRun
from comfy_accel.accel.fingerprint.code_hash import CodeReader, find_unread_code
from comfy_accel.accel.fingerprint.kinds import describe
from comfy_accel.accel.fingerprint.plain_values import Indescribable, number_of
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.blocks import eagerly, layers_of, model_of
from torch import nn

OFFSETS = {"a": 1.0}


def shifted(x, y):
    return x + y


def offset(x, by=0.5, *, more=0.0):
    return torch.add(shifted(x, by) + more, OFFSETS["a"])  # a name that methods of sets have too


class Choice:
    chosen = "one"
    functions: dict = {}

    @classmethod
    def get(cls):
        return cls.functions[cls.chosen]


def double(x):
    return x * 2


def triple(x):
    return x * 3


Choice.functions = {"one": double, "two": triple}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.mix = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        return Choice.get()(offset(self.mix(self.norm(x))))


def holds(found) -> bool:
    return found.code.is_current() and found.settings.is_current()


def test_table_in_a_closure_counts_and_a_default_that_calls_fill_does_not(monkeypatch):
    table = {"factor": 2.0}

    def scaled(x, options={}):  # noqa: B006
        options["shape"] = x.shape
        return x * table["factor"]

    monkeypatch.setitem(globals(), "offset", scaled)
    found = survey(model_of(Block(), Block()))
    scaled(torch.ones(2))
    assert holds(found)
    table["factor"] = 3.0
    assert not holds(found)
    assert survey(model_of(Block(), Block())).kinds != found.kinds


class Settings:
    """Of which a function reads a part, and which changes all the time otherwise."""

    def __init__(self, length):
        self.length, self.step, self.last = length, 0, None

    @property
    def half(self):
        return self.length / 2


class Around:
    def __init__(self, settings):
        self.settings, self.noted = settings, object()


def scaled_by(settings):
    def scaled(x):
        return x * settings.settings.half

    return scaled


def test_object_in_a_closure_counts_with_what_is_read_of_it_alone(monkeypatch):
    settings = Settings(4)
    monkeypatch.setitem(globals(), "offset", scaled_by(Around(settings)))
    found = survey(model_of(Block(), Block()))
    settings.step, settings.last = 1, torch.ones(1)
    assert holds(found)
    monkeypatch.setitem(globals(), "offset", scaled_by(Around(Settings(4))))
    assert survey(model_of(Block(), Block())).kinds == found.kinds
    settings.length = 5
    assert not holds(found)
    monkeypatch.setitem(globals(), "offset", scaled_by(Around(settings)))
    assert survey(model_of(Block(), Block())).kinds != found.kinds


class Registry:
    @functools.cached_property
    def capability(self):
        return 8


REGISTRY = Registry()


def test_what_is_kept_at_the_first_call_is_no_change(monkeypatch):
    """As core's rope finds the card's capability, and torch patches modules as it first compiles."""

    def asking(x):
        return x * REGISTRY.capability

    monkeypatch.setitem(globals(), "offset", asking)
    monkeypatch.setattr(Block, "device", torch.device("cpu"), raising=False)
    found = survey(model_of(Block(), Block()))
    asking(torch.ones(1))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    monkeypatch.setattr(Block, "device", torch.device("cpu"))
    assert holds(found) and survey(model_of(Block(), Block())).kinds == found.kinds


def test_module_that_torch_script_has_compiled_stops_no_analysis(monkeypatch):
    scripted = types.SimpleNamespace(act=torch.jit.script(nn.ReLU()))
    monkeypatch.setitem(globals(), "SCRIPTED", scripted)
    monkeypatch.setitem(globals(), "offset", lambda x: SCRIPTED.act(x))  # noqa: F821
    assert len(survey(model_of(Block(), Block())).regions) == 2


def passed_on(settings):
    def scaled(x):
        return read(settings) * x

    def read(settings):
        return settings.length

    return scaled


def test_object_in_a_closure_that_is_passed_on_counts_as_itself(monkeypatch):
    class Odd(Settings):
        """Of which nothing can be told as a whole."""

        __slots__ = ("more",)

    kinds = set()
    for _ in range(2):
        monkeypatch.setitem(globals(), "offset", passed_on(Odd(4)))
        found = survey(model_of(Block(), Block()))
        kinds.update(found.kinds)
        assert all(region.kind.opaque for region in found.regions)
    assert len(kinds) == 2


def test_function_that_hides_the_one_it_calls_is_refused(monkeypatch):
    """Torch's graphs name functions of torch, and would run what stands under the name."""
    own = nn.functional.silu
    monkeypatch.setattr(nn.functional, "silu", lambda x: own(x) * 2)

    class Calls(nn.Linear):
        def forward(self, x):
            return nn.functional.silu(super().forward(x))

    with pytest.raises(Indescribable, match="silu"):
        describe(Calls(2, 2))


def test_code_that_ran_and_was_not_read_is_named():
    read = CodeReader()
    read.read(frozenset({Block}))
    assert (
        find_unread_code(
            [Block.forward.__code__, offset.__code__, nn.GroupNorm.forward.__code__], read.collect_code().codes
        )
        is None
    )
    inner = functools.partial.__new__  # no code of Python's
    assert inner and find_unread_code([passed_on.__code__], read.collect_code().codes) is passed_on.__code__
    nested = next(part for part in scaled_by.__code__.co_consts if isinstance(part, types.CodeType))
    assert find_unread_code([nested], [scaled_by.__code__]) is None


def test_graph_of_code_that_was_not_read_is_not_kept(monkeypatch):
    model = model_of(Block(), Block())
    (region, _) = survey(model).regions
    cache = GraphCache()
    read = dataclasses.replace(region.context.code, codes=region.code.codes - {offset.__code__})
    unread = dataclasses.replace(region, context=dataclasses.replace(region.context, code=read))
    runner = BlockRunner(unread, BlocksRun(cache, eagerly()))
    x = torch.ones(2, 4, 3)
    assert torch.equal(runner(region.block.forward, x), region.block(x))
    assert runner.eager_calls and not cache.statistics()["graphs"]
    assert issubclass(CompileFailed, Exception)


def test_code_that_changes_again_and_again_runs_eagerly_after_a_while(monkeypatch):
    monkeypatch.setattr(current_code, "MOST_SURVEYS", 4)
    model = model_of(Block(), Block())
    layers = layers_of(model, GraphCache())
    x, runners = torch.ones(2, 4, 3), [layer for layer in layers.values() if isinstance(layer, BlockRunner)]
    with torch.no_grad(), substitute(layers, Order.COMPILED):
        for amount in range(7):
            OFFSETS["a"] = float(amount)
            plain = Choice.get()(offset(model.blocks[0].mix(model.blocks[0].norm(x))))
            assert torch.equal(model.blocks[0](x), plain)
        OFFSETS["a"] = 1.0
        before = [runner.eager_calls for runner in runners]
        model(x)
        assert [runner.eager_calls for runner in runners] == before
    assert sum(before)


def test_numbers_of_objects_are_never_given_again():
    class Thing:
        pass

    numbers = [number_of(Thing()) for _ in range(100)]
    assert len(set(numbers)) == 100
    kept = Thing()
    assert number_of(kept) == number_of(kept)

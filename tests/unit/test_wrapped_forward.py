"""Forwards that other programs have wrapped: what is inside is compiled, and the wrapper runs around it as it is."""

import functools
import types

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.modules.substitution import Order, substitute
from comfy_accel.accel.modules.wrapped_forward import WrappedForward
from kit.blocks import Block, layers_of, model_of, of_a_pack, reasons

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


class Noted:
    given = None
    calls = 0


def noting(function):
    @functools.wraps(function)
    def forward(self, x):
        Noted.given = {"x": x}
        return function(self, x)

    return forward


def scaling(function, factor=0.5):
    calls = 0

    def another(*args, by=factor):
        nonlocal calls
        calls += 1
        Noted.calls = calls
        return function(*args) * by

    return another


def twice(function, *_):
    other = function
    return lambda *args: function(*args) + other(*args)


noting, scaling, twice = map(of_a_pack, (noting, scaling, twice))


class Own(Block):
    def forward(self, x):
        return torch.sin(self.second(self.first(x)))


OWN = Own.forward


@pytest.fixture
def model():
    torch.manual_seed(0)
    return model_of(*(Own() for _ in range(3)))


def compiled(model, cache, before_each=(lambda: None,)):
    """What calls of the model give in one run with compiled blocks, and how many calls of blocks ran uncompiled."""
    with torch.inference_mode():
        layers = layers_of(model, cache)
        outs = []
        for change in before_each:
            change()
            with substitute(layers, Order.COMPILED):
                outs.append(model(X))
    return outs, sum(layer.eager_calls for layer in layers.values() if isinstance(layer, BlockRunner))


@torch.inference_mode()
def plain(model):
    return model(X)


@pytest.mark.parametrize(
    "wrappers",
    [(noting,), (scaling,), (noting, scaling, noting), (torch.no_grad(), noting)],
    ids=["one", "with a state", "nested", "torch's inside"],
)
def test_wrapper_of_a_class_runs_around_the_graph_of_what_was_there(model, monkeypatch, wrappers):
    cache, kinds = GraphCache(), survey(model).kinds
    monkeypatch.setattr(Own, "forward", functools.reduce(lambda forward, wrap: wrap(forward), wrappers, OWN))
    assert survey(model).kinds == kinds
    expected = plain(model)
    calls, Noted.given = Noted.calls, None
    (out,), eager_calls = compiled(model, cache)
    assert torch.equal(out, expected) and eager_calls == 0 and cache.statistics()["hits"] == 3 and reasons() == []
    assert (Noted.given is None) == (noting not in wrappers)
    assert Noted.calls == calls + 3 * (scaling in wrappers)  # it counts in a variable of its own
    monkeypatch.undo()
    compiled(model, cache)
    assert cache.statistics()["compilations"] == 1


@pytest.mark.parametrize("is_bound", [True, False])
def test_wrapper_of_a_module_runs_around_the_graph_too(model, is_bound):
    cache, block, seen = GraphCache(), model.blocks[1], []
    own = block.forward

    def forward(*args):
        seen.append(args)
        return own(args[-1]) * 0.5

    block.forward = types.MethodType(forward, block) if is_bound else forward
    expected, before = plain(model), vars(block)["forward"]
    (out,), eager_calls = compiled(model, cache)
    assert torch.equal(out, expected) and len(seen) == 2 and eager_calls == 0 and reasons() == []
    assert vars(block)["forward"] is before and cache.statistics()["compilations"] == 1


@pytest.mark.parametrize("on_a_module", [False, True])
def test_what_wraps_or_wraps_no_more_during_a_run_is_what_runs(model, monkeypatch, on_a_module):
    cache, holder = GraphCache(), model.blocks[1] if on_a_module else Own
    own = model.blocks[1].forward if on_a_module else OWN
    forwards = [own, scaling(own), scaling(own, 2.0), twice(own), lambda *args: args[-1]]
    changed = scaling(own)
    monkeypatch.setattr(Own, "forward", OWN)
    for first in forwards:
        holder.forward = first
        order = [*forwards, first, changed]
        outs, _ = compiled(model, cache, [functools.partial(setattr, holder, "forward", f) for f in order])
        for forward, out in zip(order, outs, strict=True):
            holder.forward = forward
            assert torch.equal(out, plain(model))
    cell = changed.__closure__[changed.__code__.co_freevars.index("function")]
    holder.forward = changed
    try:
        (out, then), _ = compiled(
            model, cache, [lambda: None, lambda: setattr(cell, "cell_contents", scaling(own, 3.0))]
        )
        assert torch.equal(then, plain(model)) and not torch.equal(then, out)
    finally:
        cell.cell_contents = own


def test_forward_that_does_not_lead_to_the_class_s_own_in_one_way_is_no_wrapper(model, monkeypatch):
    for forward in (OWN, of_a_pack(lambda self, x: x), twice(OWN), torch.no_grad()(OWN)):
        monkeypatch.setattr(Own, "forward", forward)
        assert WrappedForward.find(model.blocks[0]) is None

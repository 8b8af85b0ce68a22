"""Code and settings that change while a model is called: each call gives what the uncompiled model gives in it."""

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch import current_code
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.dispatch.compiled_layers import Host, compiled_layers, survey_model
from comfy_accel.accel.fingerprint.survey import KeptSurveys, survey
from comfy_accel.accel.modules.substitution import Order, Substitution
from kit.blocks import Stop
from kit.code_swaps import attribute, item
from kit.thorough import thorough_except
from torch import nn

EAGER = CompileSettings(backend="eager")
X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
_HERE = sys.modules[__name__]


class Half:
    """Of which code reads attributes of its own and of its class."""

    factor, kept = 1.0, 0.5

    def of(self, x):
        return torch.tanh(x) * self.factor


class Found:
    """Whose attributes are found by name."""

    def __init__(self):
        self.items = {"factor": 1.0}

    def __getattr__(self, name):
        return self.items[name]


class Around:
    """Of which nothing can be told as a whole."""

    def __init__(self):
        self.lock, self.half = threading.Lock(), Half()


class Tanh(nn.Module):
    factor = 1.0

    def forward(self, x):
        return torch.tanh(x) * self.factor


class HalfTanh(Tanh):
    factor = 0.5


Pair = collections.namedtuple("Pair", "first second")
half, found, around = Half(), Found(), Around()
functions = {"act": torch.tanh, "by": 1.0, "other": object()}
calls: dict = {}


def act(x):
    return torch.tanh(x)


def slow_act(x):
    return torch.tanh(x) * 0.5


class Block(nn.Module):
    """Which reads all that is changed here."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.act = nn.Linear(8, 8, bias=False), nn.LayerNorm(8), Tanh()
        self.scale, self.sides_2, self.made = 1.0, (1.0, 2.0), Half
        self.beside = [Tanh()]

    def forward(self, x):
        x = nn.functional.silu(self.lin(self.norm(x))).softmax(-1)
        x = self.act(x) * self.scale + half.of(x) + x * found.factor + around.half.of(x) + act(x)
        x = x + self.beside[0](x) + self.made.of(half, x) * functions["by"]
        if hasattr(self, "gate"):
            x = x * self.gate
        sides = Pair(*getattr(self, f"sides_{len(self.sides_2)}"))
        return x + sides.first * min(x.shape[-1], 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.eval().requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@contextlib.contextmanager
def of_class(value, cls):
    before, value.__class__ = value.__class__, cls
    try:
        yield
    finally:
        value.__class__ = before


class Halving(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 0.5 if function is torch.tanh else out


def like(function):
    @functools.wraps(function)
    def halved(*args, **kwargs):
        return function(*args, **kwargs) * 0.5

    return halved


SWAPS: dict[str, Callable[[Net], AbstractContextManager]] = {
    "an attribute that is equal to its class's": lambda net: attribute(net.blocks[1], "scale", 0.5),
    "a weight where none was": lambda net: item(
        net.blocks[1].lin._parameters, "bias", nn.Parameter(torch.ones(8), False)
    ),
    "a new part": lambda net: attribute(net.blocks[1], "gate", 0.5),
    "the class of a block": lambda net: of_class(
        net.blocks[1], type("Other", (Block,), {"forward": lambda self, x: x})
    ),
    "the class of a part": lambda net: of_class(net.blocks[1].act, HalfTanh),
    "the class of an object": lambda net: of_class(half, type("Other", (Half,), {"of": lambda self, x: x})),
    "a method of tensors that was their base's": lambda net: attribute(
        torch.Tensor, "softmax", like(torch.Tensor.softmax)
    ),
    "a function of torch by one in its name": lambda net: attribute(nn.functional, "silu", like(nn.functional.silu)),
    "a method of modules by one in its name": lambda net: attribute(nn.Module, "__call__", like(nn.Module.__call__)),
    "an attribute of an object's class": lambda net: attribute(Half, "factor", 0.5),
    "an attribute that hides the class's": lambda net: attribute(half, "factor", 0.5),
    "what an object finds by name": lambda net: item(found.items, "factor", 0.5),
    "an attribute of an object in another": lambda net: attribute(around.half, "factor", 0.25),
    "an item beside a function in a table": lambda net: item(functions, "by", 0.5),
    "a setting of a part in a list": lambda net: attribute(net.blocks[1].beside[0], "factor", 0.5),
    "a part in a list": lambda net: item(net.blocks[1].beside, 0, HalfTanh()),
    "an attribute by a name that is made": lambda net: attribute(net.blocks[1], "sides_2", (0.5, 2.0)),
    "a class in an attribute": lambda net: attribute(net.blocks[1], "made", type("Other", (), {"of": lambda s, x: x})),
    "a built-in function": lambda net: attribute(_HERE, "min", lambda *sizes: 2),
    "torch's functions": lambda net: Halving(),
}


class Run:
    """A model's blocks compiled for a run; `swap` is in place as the model is called."""

    def __init__(self, net, host=None):
        self.net, host = net, host or Host()
        self.cache = GraphCache()
        layers = compiled_layers(net, survey_model(net, EAGER, host), EAGER, host, self.cache)
        self.runners = [layer for layer in layers.values() if isinstance(layer, BlockRunner)]
        assert len(self.runners) == 2
        self._place = Substitution(layers, Order.COMPILED)

    def __call__(self, swap=contextlib.nullcontext):
        with torch.no_grad(), self._place.in_place(), swap():
            return self.net(X)

    @property
    def eager_calls(self):
        return sum(runner.eager_calls for runner in self.runners)


@pytest.mark.parametrize("what", [what for what in SWAPS if what != "torch's functions"])
def test_run_that_begins_under_other_code_is_surveyed_for_it(what):
    net, host, kept = Net(), Host(), KeptSurveys()
    first = survey_model(net, EAGER, host, kept)
    with SWAPS[what](net):
        found, anew = survey_model(net, EAGER, host, kept), survey(net)
        assert (found.kinds, found.left_eager) == (anew.kinds, anew.left_eager)
        assert found.kinds != first.kinds
    assert survey_model(net, EAGER, host, kept).kinds == survey(net).kinds


BOTH_WAYS = {"the class of a block", "a function of torch by one in its name"}
QUICK = {
    *("a weight where none was", "a new part", "a method of modules by one in its name", "torch's functions"),
    *("what an object finds by name", "an item beside a function in a table", *BOTH_WAYS),
}
"""One of each place that a call looks at. That a survey finds all of them is tested above."""


@pytest.mark.parametrize(
    ("what", "first"),
    [
        pytest.param(what, first, marks=() if what in (QUICK, BOTH_WAYS)[first == "swapped"] else pytest.mark.thorough)
        for what in SWAPS
        for first in ("plain", "swapped")
    ],
)
def test_call_is_of_the_code_and_settings_that_stand_in_it(what, first):
    net = Net()
    swap = functools.partial(SWAPS[what], net)
    with torch.no_grad():
        plain = net(X)
        with swap():
            swapped = net(X)
    assert not torch.equal(plain, swapped)
    run = Run(net)
    for number in range(4):
        is_swapped = (number % 2 == 1) == (first == "plain")
        out = run(swap) if is_swapped else run()
        assert torch.allclose(out, swapped if is_swapped else plain, atol=1e-5)
        if number == 1:
            compiled = run.cache.statistics()["graphs"]
    assert run.cache.statistics()["graphs"] == compiled >= 1


class Setting:
    """A node's, which makes what it puts in place anew for each call."""

    def __init__(self, factor):
        self.factor = factor

    def scaled(self, x):
        return torch.tanh(x) * self.factor


SETTING = Setting(0.5)


def closure(factor):
    def scaled(x):
        return torch.tanh(x) * factor if factor else scaled(x)

    return scaled


ANEW = {
    "a function that closes over an equal number": lambda: attribute(_HERE, "act", closure(float("0.5"))),
    "a method of the same object": lambda: attribute(_HERE, "act", SETTING.scaled),
    "a partial of the same": lambda: attribute(_HERE, "act", functools.partial(torch.mul, other=float("0.5"))),
    "an equal number in a table": lambda: item(functions, "by", float("0.5")),
}


@pytest.mark.parametrize("what", thorough_except(ANEW, *list(ANEW)[:1]))  # the others are compared as the first is
def test_what_is_made_anew_for_each_call_and_is_the_same_costs_one_more_graph(what):
    run = Run(Net())
    with torch.no_grad():
        plain = run.net(X)
        with ANEW[what]():
            swapped = run.net(X)
    for number in range(current_code.MOST_SURVEYS + 1):
        assert torch.allclose(run(ANEW[what]), swapped, atol=1e-5)
        assert torch.allclose(run(), plain, atol=1e-5)
        if not number:
            graphs = run.cache.statistics()["graphs"], run.eager_calls
    assert (run.cache.statistics()["graphs"], run.eager_calls) == graphs == (2, 0)


def test_hook_on_all_modules_that_is_put_on_in_a_run_costs_one_survey():
    run, hooks = Run(Net()), torch.nn.modules.module._global_forward_hooks
    run()
    for _ in range(current_code.MOST_SURVEYS + 1):
        run(functools.partial(item_added, hooks))
    before = run.eager_calls
    run()
    assert run.eager_calls == before


@contextlib.contextmanager
def item_added(hooks):
    hooks[-1] = lambda module, args, out: None
    try:
        yield
    finally:
        del hooks[-1]


def test_model_that_cannot_be_surveyed_in_a_call_runs_eagerly_there(monkeypatch):
    net = Net()
    run = Run(net, Host(interrupts=(Stop,)))
    plain = run()
    swap = functools.partial(attribute, _HERE, "act", slow_act)
    for error in (RuntimeError("simulated"), Stop()):
        with monkeypatch.context() as patch:
            patch.setattr("comfy_accel.accel.dispatch.compiled_layers.survey", fail := raising(error))
            if isinstance(error, Stop):
                with pytest.raises(Stop):
                    run(swap)
            else:
                with torch.no_grad(), swap():
                    expected = net(X)
                assert torch.allclose(run(swap), expected, atol=1e-5)
            assert fail.called
        assert torch.equal(run(), plain)
    assert torch.allclose(run(swap), expected, atol=1e-5)
    assert any(row["reason"] for row in fallbacks.rows())


def raising(error):
    def fail(*args, **kwargs):
        fail.called = True
        raise error

    fail.called = False
    return fail


class Staged(Net):
    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(self.blocks[1])

    def forward(self, x):
        return self.stage(self.blocks[0](x))


@pytest.mark.parametrize("how", ["a hook", "a forward"])
def test_code_that_others_change_between_two_blocks_counts_from_there_on(how):
    net = Staged()
    undo = contextlib.ExitStack()

    def change(*_):
        undo.enter_context(attribute(_HERE, "act", slow_act))

    if how == "a hook":
        net.stage.register_forward_pre_hook(change)
    else:
        inner = net.stage.forward
        net.stage.forward = lambda x: (change(), inner(x))[1]
    with torch.no_grad(), undo:
        expected = net(X)
    run = Run(net)
    for _ in range(3):
        with undo:
            assert torch.allclose(run(), expected, atol=1e-5)
    assert not run.eager_calls

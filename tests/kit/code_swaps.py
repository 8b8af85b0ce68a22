"""Other code in a function's place for a while, as other nodes put it there for a call; and blocks that show it.

A *swap* is a function without arguments that gives such a context. No host here.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

Swap = Callable[[], AbstractContextManager]

_ABSENT = object()


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The value in the place of an attribute of a class, a module of Python's or torch's, a function or an object."""
    is_child = isinstance(owner, torch.nn.Module) and name in owner._modules
    before = owner._modules[name] if is_child else getattr(owner, "__dict__", {}).get(name, _ABSENT)
    if before is _ABSENT and hasattr(inspect.getattr_static(type(owner), name, None), "__set__"):
        before = getattr(owner, name)  # what functions and cells have is in no dict
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def item(container: Any, key: Any, value: Any) -> Iterator[None]:
    """The value in the place of an item of a list or dict."""
    before, container[key] = container[key], value
    try:
        yield
    finally:
        container[key] = before


def all_of(*swaps: Swap) -> Swap:
    """One after the other, and taken back in the reverse order."""

    @contextmanager
    def swap() -> Iterator[None]:
        with ExitStack() as stack:
            for each in swaps:
                stack.enter_context(each())
            yield

    return swap


def scaled(function: Callable, factor: float) -> Callable:
    """A function that calls another and scales the tensor that it gives."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return out * factor if isinstance(out, torch.Tensor) and out.is_floating_point() else out

    return call


@contextmanager
def scaling(owner: Any, name: str, factor: float) -> Iterator[None]:
    """The function that is found there, scaled."""
    with attribute(owner, name, scaled(getattr(owner, name), factor)):
        yield


# Blocks that read something of every sort

SCALES = [1.0, 3.0]
SETTINGS = {"scale": 1.0, "other": 3.0}


def activation(x):
    return torch.tanh(x)


def stronger(x):
    return torch.tanh(x) * 1.5


def weaker(x):
    return torch.tanh(x) * 0.5


class Gain:
    """An object that is called, or a method of which is."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def apply(self, x):
        return x * self.factor


gain = Gain(1.0)


def softening(factor):
    def soften(x):
        return x * factor

    return soften


soften = softening(1.0)


def shifted(x, by=0.0, *, times=1.0):
    return (x + by) * times


class Ops:
    slope = 1.0

    @staticmethod
    def act(x):
        return torch.sigmoid(x)


class StrongerOps(Ops):
    slope = 1.5


class WeakerOps(Ops):
    slope = 0.5


class Mixing(torch.nn.Module):
    def mix(self, x):
        return x * 1.0


class Block(Mixing):
    """[B, T, width] in and out."""

    inherited = 1.0

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)
        self.amount = 1.0

    @property
    def strength(self):
        return 1.0

    def forward(self, x):
        h = activation(self.first(self.norm(x)))
        h = shifted(soften(gain(h))) * SCALES[0] * SETTINGS["scale"]
        h = Ops.act(h) * Ops.slope
        h = self.mix(h) * self.strength * self.amount * self.inherited
        return x + self.second(h)


class Network(torch.nn.Module):
    """Two blocks of one kind over the points of a latent [B, 4, H, W]."""

    def __init__(self, seed: int = 0, width: int = 8):
        super().__init__()
        self.dtype = torch.float32
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.start = torch.nn.Linear(4, width)
            self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
            self.end = torch.nn.Linear(width, 4)
        self.eval().requires_grad_(False)

    def forward(self, x):
        h = self.start(x.flatten(2).transpose(1, 2))
        for block in self.blocks:
            h = block(h)
        return self.end(h).transpose(1, 2).reshape(x.shape)


_HERE = sys.modules[__name__]
_AT = {1.5: stronger, 0.5: weaker}

IN_BLOCKS: dict[str, Callable[[Network, float], AbstractContextManager]] = {
    "a function of a module": lambda net, amount: attribute(_HERE, "activation", _AT[amount]),
    "a function by an object": lambda net, amount: attribute(_HERE, "activation", Gain(amount)),
    "a function by a method of an object": lambda net, amount: attribute(_HERE, "activation", Gain(amount).apply),
    "a function by one with another cell": lambda net, amount: attribute(_HERE, "soften", softening(amount)),
    "the code of a function": lambda net, amount: attribute(activation, "__code__", _AT[amount].__code__),
    "a default of a function": lambda net, amount: attribute(shifted, "__defaults__", (amount,)),
    "a keyword default of a function": lambda net, amount: attribute(shifted, "__kwdefaults__", {"times": amount}),
    "an item of a function's keyword defaults": lambda net, amount: item(shifted.__kwdefaults__, "times", amount),
    "the content of a cell": lambda net, amount: attribute(soften.__closure__[0], "cell_contents", amount),
    "an object by one with another state": lambda net, amount: attribute(_HERE, "gain", Gain(amount)),
    "the state of an object": lambda net, amount: attribute(gain, "factor", amount),
    "the method that calls an object": lambda net, amount: attribute(
        Gain, "__call__", {1.5: lambda self, x: x * 1.5, 0.5: lambda self, x: x * 0.5}[amount]
    ),
    "an item of a list": lambda net, amount: item(SCALES, 0, amount),
    "an item of a dict": lambda net, amount: item(SETTINGS, "scale", amount),
    "a list by another": lambda net, amount: attribute(_HERE, "SCALES", [amount, 3.0]),
    "a number of a class without instances": lambda net, amount: attribute(Ops, "slope", amount),
    "a function of a class without instances": lambda net, amount: attribute(Ops, "act", staticmethod(_AT[amount])),
    "a class without instances": lambda net, amount: attribute(
        _HERE, "Ops", {1.5: StrongerOps, 0.5: WeakerOps}[amount]
    ),
    "a property": lambda net, amount: attribute(
        Block, "strength", {1.5: property(lambda self: 1.5), 0.5: property(lambda self: 0.5)}[amount]
    ),
    "a method by one that shadows it": lambda net, amount: attribute(
        Block, "mix", {1.5: lambda self, x: x * 1.5, 0.5: lambda self, x: x * 0.5}[amount]
    ),
    "a method of a base": lambda net, amount: attribute(
        Mixing, "mix", {1.5: lambda self, x: x * 1.5, 0.5: lambda self, x: x * 0.5}[amount]
    ),
    "the forward of the block's class": lambda net, amount: attribute(
        Block, "forward", {1.5: lambda self, x: x + self.first(x), 0.5: lambda self, x: x - self.first(x)}[amount]
    ),
    "a number of the block's class": lambda net, amount: attribute(Block, "inherited", amount),
    "a number of a block": lambda net, amount: attribute(net.blocks[1], "amount", amount),
    "a number of a block, in its class's place": lambda net, amount: attribute(net.blocks[1], "inherited", amount),
    "a method on a block": lambda net, amount: attribute(net.blocks[1], "mix", Gain(amount).apply),
    "a number of a layer": lambda net, amount: attribute(net.blocks[1].norm, "eps", amount),
    "a layer's forward": lambda net, amount: attribute(net.blocks[1].first, "forward", _AT[amount]),
    "a block's forward": lambda net, amount: attribute(net.blocks[1], "forward", _AT[amount]),
    "a layer by one of another class": lambda net, amount: attribute(
        net.blocks[1], "norm", {1.5: torch.nn.Tanh(), 0.5: torch.nn.Sigmoid()}[amount]
    ),
    "a layer by one with other weights": lambda net, amount: attribute(
        net.blocks[1], "first", Network(seed=int(amount * 10)).blocks[0].first
    ),
    "a weight": lambda net, amount: item(
        net.blocks[1].first._parameters, "bias", torch.nn.Parameter(torch.full((8,), amount), requires_grad=False)
    ),
    "a function that torch's layers call": lambda net, amount: scaling(torch.nn.functional, "linear", amount),
    "a method of torch's layers": lambda net, amount: scaling(torch.nn.LayerNorm, "forward", amount),
    "a function of torch under another": lambda net, amount: scaling(torch, "layer_norm", amount),
}
"""What is swapped → the swap for a network and an amount, 1.5 or 0.5."""


# Whatever code a model runs


def _calls_of(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    """Where the functions are found that its code names: in its module, or in one that is named with them."""
    codes = [function.__code__]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    owners, seen = [sys.modules.get(function.__module__)], set()
    while owners:
        owner = owners.pop()
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        for name in sorted(names.intersection(vars(owner))):
            value = vars(owner)[name]
            if isinstance(value, types.ModuleType):
                owners.append(value)
            elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                yield owner, name


def functions_of(blocks: list[torch.nn.Module]) -> list[tuple[Any, str]]:
    """(class or module of Python's, name) of the functions that the code of these blocks may run, in a fixed order."""
    classes = {type(part) for block in blocks for part in block.modules()}
    found: dict[tuple[str, str], tuple[Any, str]] = {}
    functions: list[types.FunctionType] = []
    for cls in sorted({base for cls in classes for base in cls.__mro__}, key=lambda cls: cls.__qualname__):
        if cls in (torch.nn.Module, object):
            continue
        for name, value in sorted(vars(cls).items()):
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                found[f"{cls.__module__}.{cls.__qualname__}", name] = cls, name
                functions.append(value)
    seen = set()
    while functions:
        function = functions.pop()
        if function in seen:
            continue
        seen.add(function)
        for owner, name in _calls_of(function):
            found[owner.__name__, name] = owner, name
            value = vars(owner)[name]
            if isinstance(value, types.FunctionType):
                functions.append(value)
    return [found[key] for key in sorted(found)]


def that_give_tensors(places: list[tuple[Any, str]], call: Callable[[], Any]) -> list[tuple[Any, str]]:
    """Those of the places whose function is called within `call` and gives a tensor of floating numbers."""
    gave = set()

    def noted(place: int, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                gave.add(place)
            return out

        return run

    with ExitStack() as stack:
        for place, (owner, name) in enumerate(places):
            stack.enter_context(attribute(owner, name, noted(place, vars(owner)[name])))
        call()
    return [places[place] for place in sorted(gave)]

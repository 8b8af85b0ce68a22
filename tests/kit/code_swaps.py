"""Other code in a function's place for a while, as other nodes put it there for a call; and blocks that show it.

A *swap* is a function without arguments that gives such a context. No host here.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from kit.compiled import graphs

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


@contextmanager
def flash_attention(is_on: bool) -> Iterator[None]:
    """Torch's switch for it so."""
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(is_on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


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


# Places that every host has


class Swapping:
    """Called once for each call of something: the swap in those that `when` chooses, and nothing in the others."""

    def __init__(self, swap: Swap, when: Callable[[int], bool] = lambda number: True):
        self._swap, self._when, self._numbers = swap, when, itertools.count()

    def __call__(self) -> AbstractContextManager:
        return self._swap() if self._when(next(self._numbers)) else contextlib.nullcontext()


@contextmanager
def in_hooks(first: torch.nn.Module, last: torch.nn.Module, swap: Swap) -> Iterator[None]:
    """The swap from before each call of a module until after that of another, or of the same."""
    with ExitStack() as held:

        def begin(*_: Any) -> None:
            held.enter_context(swap())

        hooks = (
            first.register_forward_pre_hook(begin),
            last.register_forward_hook(lambda *_: held.close(), always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# Blocks that read something of every sort

SCALES = [1.0, 3.0]
SETTINGS = {"scale": 1.0, "other": 3.0}
TABLE = {"act": torch.tanh, "by": 1.0, "other": object()}
Pair = collections.namedtuple("Pair", "first second")


def activation(x):
    return torch.tanh(within(x))


def within(x):
    return x * Choice.get()


class Choice:
    """Of which a class method chooses by a setting."""

    chosen, amounts = "one", {"one": 1.0, 1.5: 1.5, 0.5: 0.5}

    @classmethod
    def get(cls):
        return cls.amounts[cls.chosen]


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


def softening(factor):
    def soften(x):
        return x * factor

    return soften


def shifted(x, by=0.0, *, times=1.0):
    return (x + by) * times


class Ops:
    """A class without instances."""

    slope = 1.0

    @staticmethod
    def act(x):
        return torch.sigmoid(x)


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


gain, soften, half, found, around = Gain(1.0), softening(1.0), Half(), Found(), Around()


class Tanh(torch.nn.Module):
    factor = 1.0

    def forward(self, x):
        return torch.tanh(x) * self.factor


class Mixing(torch.nn.Module):
    def mix(self, x):
        return x * 1.0


class Block(Mixing):
    """[B, T, width] in and out."""

    inherited = scale = 1.0

    def __init__(self, width):
        super().__init__()
        self.norm, self.act, self.beside = torch.nn.LayerNorm(width), Tanh(), [Tanh()]
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width, bias=False)
        self.amount, self.scale, self.sides_2, self.made = 1.0, 1.0, (1.0, 2.0), Half

    @property
    def strength(self):
        return 1.0

    def forward(self, x):
        h = activation(self.first(self.norm(x)))
        h = shifted(soften(gain(h))) * SCALES[0] * SETTINGS["scale"]
        h = Ops.act(h) * Ops.slope
        h = self.mix(h) * self.strength * self.amount * self.inherited * self.scale
        h = torch.nn.functional.silu(h) + h.softmax(-1)
        h = self.act(h) + self.beside[0](h) + half.of(h) + around.half.of(h) + h * found.factor
        h = h + self.made.of(half, h) * TABLE["by"]
        if hasattr(self, "gate"):
            h = h * self.gate
        sides = Pair(*getattr(self, f"sides_{len(self.sides_2)}"))
        return x + self.second(h + sides.first * min(h.shape[-1], 4))


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


class Scaling(torch.overrides.TorchFunctionMode):
    """What is left of `torch.tanh` while it is on."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * self.factor if function is torch.tanh else out


def renamed(cls: type, amount: float, **attributes: Any) -> type:
    """A class derived from this one, another each time."""
    return type("Other", (cls,), {"amount": amount, **attributes})


def times(amount: float) -> Callable:
    """A method that scales."""
    return {1.5: lambda self, x: x * 1.5, 0.5: lambda self, x: x * 0.5}[amount]


def named_like(owner: Any, name: str, amount: float) -> AbstractContextManager:
    """The function there, scaled by one that has its name."""
    own = getattr(owner, name)
    return attribute(owner, name, functools.wraps(own)(scaled(own, amount)))


_HERE = sys.modules[__name__]
_AT = {1.5: stronger, 0.5: weaker}

SWAPS: dict[str, Callable[[Network, float], AbstractContextManager]] = {
    # Functions
    "a function of a module": lambda net, amount: attribute(_HERE, "activation", _AT[amount]),
    "a function two calls down": lambda net, amount: attribute(_HERE, "within", softening(amount)),
    "a function by an object": lambda net, amount: attribute(_HERE, "activation", Gain(amount)),
    "a function by a method of an object": lambda net, amount: attribute(_HERE, "activation", Gain(amount).apply),
    "a function by one with another cell": lambda net, amount: attribute(_HERE, "soften", softening(amount)),
    "the code of a function": lambda net, amount: attribute(activation, "__code__", _AT[amount].__code__),
    "a default of a function": lambda net, amount: attribute(shifted, "__defaults__", (amount,)),
    "a keyword default of a function": lambda net, amount: attribute(shifted, "__kwdefaults__", {"times": amount}),
    "an item of a function's keyword defaults": lambda net, amount: item(shifted.__kwdefaults__, "times", amount),
    "the content of a cell": lambda net, amount: attribute(soften.__closure__[0], "cell_contents", amount),
    "a built-in function": lambda net, amount: attribute(_HERE, "min", lambda *sizes: 2 * amount),
    # Objects, lists and dicts
    "an object by one with another state": lambda net, amount: attribute(_HERE, "gain", Gain(amount)),
    "the state of an object": lambda net, amount: attribute(gain, "factor", amount),
    "the method that calls an object": lambda net, amount: attribute(Gain, "__call__", times(amount)),
    "the class of an object": lambda net, amount: attribute(half, "__class__", renamed(Half, 0, of=times(amount))),
    "an attribute of an object's class": lambda net, amount: attribute(Half, "factor", amount),
    "an attribute that hides the class's": lambda net, amount: attribute(half, "factor", amount),
    "what an object finds by name": lambda net, amount: item(found.items, "factor", amount),
    "an attribute of an object in another": lambda net, amount: attribute(around.half, "factor", amount),
    "an item of a list": lambda net, amount: item(SCALES, 0, amount),
    "an item of a dict": lambda net, amount: item(SETTINGS, "scale", amount),
    "an item beside a function in a table": lambda net, amount: item(TABLE, "by", amount),
    "a list by another": lambda net, amount: attribute(_HERE, "SCALES", [amount, 3.0]),
    # Classes
    "a number of a class without instances": lambda net, amount: attribute(Ops, "slope", amount),
    "a setting of a class that its method reads": lambda net, amount: attribute(Choice, "chosen", amount),
    "a function of a class without instances": lambda net, amount: attribute(Ops, "act", staticmethod(_AT[amount])),
    "a class without instances": lambda net, amount: attribute(_HERE, "Ops", renamed(Ops, 0, slope=amount)),
    "a class in an attribute": lambda net, amount: attribute(
        net.blocks[1], "made", renamed(object, 0, of=times(amount))
    ),
    "a property": lambda net, amount: attribute(
        Block, "strength", {1.5: property(lambda self: 1.5), 0.5: property(lambda self: 0.5)}[amount]
    ),
    "a method by one that shadows it": lambda net, amount: attribute(Block, "mix", times(amount)),
    "a method of a base": lambda net, amount: attribute(Mixing, "mix", times(amount)),
    "the forward of the block's class": lambda net, amount: attribute(
        Block, "forward", {1.5: lambda self, x: x + self.first(x), 0.5: lambda self, x: x - self.first(x)}[amount]
    ),
    "a number of the block's class": lambda net, amount: attribute(Block, "inherited", amount),
    # The block
    "a number of a block": lambda net, amount: attribute(net.blocks[1], "amount", amount),
    "a number of a block, in its class's place": lambda net, amount: attribute(net.blocks[1], "inherited", amount),
    "a number of a block that is equal to its class's": lambda net, amount: attribute(net.blocks[1], "scale", amount),
    "a number by a name that is made": lambda net, amount: attribute(net.blocks[1], "sides_2", (amount, 2.0)),
    "a number where none was": lambda net, amount: attribute(net.blocks[1], "gate", amount),
    "a method on a block": lambda net, amount: attribute(net.blocks[1], "mix", Gain(amount).apply),
    "a block's forward": lambda net, amount: attribute(net.blocks[1], "forward", _AT[amount]),
    "the class of a block": lambda net, amount: attribute(
        net.blocks[1], "__class__", renamed(Block, amount, forward=times(amount))
    ),
    # Its parts
    "a number of a layer": lambda net, amount: attribute(net.blocks[1].norm, "eps", amount),
    "a layer's forward": lambda net, amount: attribute(net.blocks[1].first, "forward", _AT[amount]),
    "a layer by one of another class": lambda net, amount: attribute(
        net.blocks[1], "norm", {1.5: torch.nn.Tanh(), 0.5: torch.nn.Sigmoid()}[amount]
    ),
    "a layer by one with other weights": lambda net, amount: attribute(
        net.blocks[1], "first", Network(seed=int(amount * 10)).blocks[0].first
    ),
    "the class of a part": lambda net, amount: attribute(
        net.blocks[1].act, "__class__", renamed(Tanh, 0, factor=amount)
    ),
    "a setting of a part in a list": lambda net, amount: attribute(net.blocks[1].beside[0], "factor", amount),
    "a part in a list": lambda net, amount: item(net.blocks[1].beside, 0, renamed(Tanh, 0, factor=amount)()),
    "a weight": lambda net, amount: item(
        net.blocks[1].first._parameters, "bias", torch.nn.Parameter(torch.full((8,), amount), requires_grad=False)
    ),
    "a weight where none was": lambda net, amount: item(
        net.blocks[1].second._parameters, "bias", torch.nn.Parameter(torch.full((8,), amount), requires_grad=False)
    ),
    # Torch
    "a function that torch's layers call": lambda net, amount: scaling(torch.nn.functional, "linear", amount),
    "a method of torch's layers": lambda net, amount: scaling(torch.nn.LayerNorm, "forward", amount),
    "a function of torch under another": lambda net, amount: scaling(torch, "layer_norm", amount),
    "a function of torch by one in its name": lambda net, amount: named_like(torch.nn.functional, "silu", amount),
    "a method of tensors that was their base's": lambda net, amount: named_like(torch.Tensor, "softmax", amount),
    "a method of modules by one in its name": lambda net, amount: named_like(torch.nn.Module, "__call__", amount),
    "torch's functions": lambda net, amount: Scaling(amount),
}
"""What is swapped → the swap for a network and an amount, 1.5 or 0.5."""


def assert_calls_follow_the_code(
    what: str, net: Network, call: Callable, first: str = "plain", amounts: tuple[float, ...] = (0.5,)
) -> None:
    """Each call is of the code that stands in it, whatever stood in those before, and later calls compile nothing.

    call: what the network gives under a swap, and whether it is compiled. first: what the first compiled call is of.
    """
    swaps = {None: contextlib.nullcontext} | {at: functools.partial(SWAPS[what], net, at) for at in amounts}
    expected = {amount: call(swap, False) for amount, swap in swaps.items()}
    assert torch.equal(call(swaps[None], False), expected[None]), "it is put back"
    for one, other in itertools.combinations(expected.values(), 2):
        assert not torch.equal(one, other)
    order = [part for amount in amounts for part in ((None, amount) if first == "plain" else (amount, None))]
    for is_again in (False, True):
        compiled = graphs()
        for amount in order:
            torch.testing.assert_close(call(swaps[amount], True), expected[amount], rtol=1e-5, atol=1e-6)
        assert graphs() == compiled or not is_again

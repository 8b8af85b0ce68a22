"""Parts of blocks that graphs call as they are: layers of weights that nothing explains, and others' code.

In the copy of a block that is compiled, another module stands for such a part. The graph calls the part that is at its
place in the block (`host_calls`), wrappers such as a LoRA included. So it depends neither on how the layer's weight is
stored nor on what is around it. Where another program has put its own forward or hooks on a part, these run once in
each call, and what they keep from call to call is theirs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch

from ..signature.tensors import PLAIN_TENSORS, tensors_in
from .code_owner import home_of, package_of
from .host_calls import FINDERS, OPTIONS, Callee, call_host, define_operator
from .stored_form import form_or_none
from .substitution import foreign_forward, has_foreign_forward

_called = threading.local()
"""block: a weak reference to the block that this thread calls."""


class OpaqueLayer(torch.nn.Module):
    """Stands for a part that gives a tensor of its first input's type and size, in code that does no more than call it.

    features: of the result, where its last size is another than the input's. path_in_block: of the part.
    is_others: another program's code runs in it. like: where it gives several, the argument that each is like; those
        without theirs are not there.
    """

    def __init__(self, features: int | None = None, is_others: bool = False, like: tuple[str, ...] = ()):
        torch.nn.Module.__init__(self)
        define_operator()
        self.path_in_block, self.width_of_result, self.is_others, self.like = "", features, is_others, like
        self.training = False

    __call__ = torch.nn.Module.__call__

    def __getattr__(self, name: str) -> Any:
        if torch.compiler.is_dynamo_compiling():  # asked by hasattr or getattr too, which would go the other way
            raise TypeError(f"the block's code reads {name} of a part that it should call")
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        like = [kwargs[name] for name in self.like if kwargs.get(name) is not None]
        first = (*args, *kwargs.values())[0]
        size = None if self.width_of_result is None else (*first.shape[:-1], self.width_of_result)
        out = call_host("part", self.path_in_block, args, kwargs, like, size)
        return tuple(out) if len(like) > 1 else out[0]


def runs_others_code(part: torch.nn.Module) -> bool:
    """Whether another program has put its own forward on the part, or hooks."""
    return bool(part._forward_hooks or part._forward_pre_hooks) or has_foreign_forward(part)


def begin(block: torch.nn.Module) -> None:
    """Note that this thread calls the block."""
    _called.block = weakref.ref(block)


def _part(path: str) -> Callee:
    """The part at this path in the block that this thread calls."""
    block = _called.block
    part = block().get_submodule(path)
    code = [foreign_forward(part), *part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    packages = {package_of(home_of(function)) for function in code if function is not None}
    is_others = not packages <= {package_of(type(block()).__module__)}

    def call(*args: Any, **kwargs: Any) -> Any:
        # Those of the graph, not of a host's dicts: hosts run in inference mode, whose tensors count no changes.
        of_graph = args, {name: item for name, item in kwargs.items() if name not in OPTIONS}
        given = tensors_in(of_graph) if is_others else []
        versions = [tensor._version for tensor in given]
        out = part(*args, **kwargs)
        _called.block = block  # the part may have called another
        if [tensor._version for tensor in given] != versions:
            raise TypeError(f"{path} changes what it is given")
        return out

    return Callee(call, is_others)


FINDERS["part"] = _part


class OpaqueLayers:
    """What stands for layers, the same module for a layer each time."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, bool, OpaqueLayer]]
        self._of = weakref.WeakKeyDictionary()

    def linear(self, layer: torch.nn.Module, is_wrapped: bool = False) -> OpaqueLayer | None:
        """What stands for the layer; None where it can be traced, or is no linear layer. is_wrapped: something around
        it adds to its result, which can be traced on plain weights alone."""
        weight = layer._parameters.get("weight")
        if weight is None or type(weight) in PLAIN_TENSORS or not isinstance(layer, torch.nn.Linear):
            return None
        known = self._of.get(layer)
        if known is None or known[0] is not type(weight):
            known = self._of[layer] = type(weight), form_or_none(weight) is None, OpaqueLayer(layer.out_features)
        _, is_opaque, stand_in = known
        return stand_in if is_opaque or is_wrapped else None

    def any(
        self, layer: torch.nn.Module, features: int | None = None, is_others: bool = False, like: tuple[str, ...] = ()
    ) -> OpaqueLayer:
        """What stands for a part. features, is_others, like: as of `OpaqueLayer`."""
        if layer not in self._of:
            cls = _make_stand_in_class(type(layer)) if is_others else OpaqueLayer  # type: ignore[arg-type]  # a class is hashable
            self._of[layer] = None, True, cls(features, is_others, like)
        return self._of[layer][2]


@functools.lru_cache(maxsize=256)
def _make_stand_in_class(cls: type) -> type:
    """A class of stand-ins for parts of a class, which code finds to be of it."""
    if hasattr(cls, "__iter__") or type(cls) is not type:  # which would be empty, or be made in a way of its own
        return OpaqueLayer
    try:
        return type(cls.__name__, (OpaqueLayer, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    except Exception:  # of an extension's `__init_subclass__`, of any type
        return OpaqueLayer

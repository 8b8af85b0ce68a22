"""A copy of a model's structure over the same tensors, so that state its code keeps on itself stays on the copy."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from ..fingerprint.plain_values import is_plain_object

_DICTS = (dict, OrderedDict, defaultdict)


class ModelCopy:
    """Copies of modules, and of the containers and plain objects that they refer to; tensors are shared.

    Hooks and forwards set on single modules are not copied: the copies run the code of their classes.
    """

    def __init__(self):
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # alive for as long as their ids stand for them
        self._made: set[int] = set()

    def made(self, value: Any) -> bool:
        """Whether the value is one of the copies."""
        return id(value) in self._made

    def of(self, value: Any) -> Any:
        """The copy of a module or of what it refers to; the value itself where none is needed."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        cls = type(value)
        if isinstance(value, torch.nn.Module):
            copied = self._enter(value, object.__new__(cls))
            copied.__dict__.update({name: self._part(name, item) for name, item in value.__dict__.items()})
            copied.__dict__.pop("forward", None)
        elif cls in _DICTS:
            copied = self._enter(value, copy.copy(value))
            for key, item in value.items():
                copied[key] = self.of(item)
        elif cls is list:
            copied = self._enter(value, [])
            copied.extend(self.of(item) for item in value)
        elif cls is tuple:
            copied = tuple(self.of(item) for item in value)
        elif cls is set:
            copied = self._enter(value, {self.of(item) for item in value})
        elif cls is types.MethodType:
            copied = types.MethodType(value.__func__, self.of(value.__self__))
        elif cls is functools.partial:
            copied = functools.partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
        elif is_plain_object(value) and not hasattr(cls, "__del__"):
            copied = self._enter(value, object.__new__(cls))
            copied.__dict__.update({name: self.of(item) for name, item in value.__dict__.items()})
        else:
            copied = value
        return copied

    def _part(self, name: str, value: Any) -> Any:
        is_hooks = name.endswith("_hooks") or "_hooks_" in name
        return type(value)() if is_hooks and type(value) in _DICTS else self.of(value)

    def _enter(self, value: Any, copied: Any) -> Any:
        self._copies[id(value)] = copied
        self._originals.append(value)
        self._made.add(id(copied))
        return copied

"""What a block's code has read, by the account of torch's trace, at places that are not watched.

Reading code (`code_hash`) finds the names in it. It does not find what code looks up otherwise: in a module by a
string, in what a function returns, in an object without a `__dict__`. Torch names each place in the guards of its
trace. A graph has the values in it, so where nobody would notice another value, there must be no graph.
"""

from __future__ import annotations

import enum
import functools
import re
import sys
import types
from typing import Any

import torch

from ..core import torch_internals
from ..core.reasons import Reason
from ..fingerprint.code_facts import facts_of
from ..fingerprint.code_hash import ReadCode, is_generated, is_installed, is_of_program
from ..fingerprint.code_references import is_of_library
from ..fingerprint.code_snapshot import CodeNotes
from ..fingerprint.kept_state import KeepsState, name_of, place_of
from ..fingerprint.plain_values import is_torchs
from .compiled_graph import CompileFailed

_FOLLOWS_BASE = {"TypeSource", "TypeDictSource", "TypeMROSource", "WeakRefCallSource", "CallFunctionNoArgsSource"}
"""Sources of which the value follows from that of their base."""

_FIXED = (
    *(tuple, range, slice, types.MethodType, types.BuiltinFunctionType, property, types.DynamicClassAttribute),
    *(staticmethod, classmethod, functools.partial, functools._lru_cache_wrapper),
)
"""What is in these stays there: who wants something else makes another one."""

_CONSTANT = (
    *(types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    *(torch.dtype, torch.memory_format, torch.layout),
)
"""What nobody puts anything else in place of, in a library's module."""

_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_MISSING = object()

_PROGRAM, _PACKAGE, _OTHER = "torch, Python or this engine", "an installed package", "any other"
"""Whose code reads a value."""


def refuse_unwatched(code: ReadCode, weights: int) -> None:
    """Raise CompileFailed where the code that torch is tracing here has read what no note on the code watches.

    The values and layouts of what the traced function itself is given, the block's weights and then the inputs, are in
    the graph's key. Raises KeepsState where the code assigns what it has read. Asks for nothing where this torch does
    not tell.
    """
    trace, names = torch_internals.CURRENT_TRACE.get()(), torch_internals.SOURCE_NAMES.get(dict)()
    if trace is None or not names:
        return
    scope = {  # with the modules that are loaded by their names now: torch imports each once in a process
        name: sys.modules.get(value.__name__, value) if isinstance(value, types.ModuleType) else value
        for name, value in trace.output.global_scope.items()
    }
    reads = _Reads(code, weights, {**names, "G": scope, "L": trace.output.local_scope})
    for guard in trace.output.guards:
        file = guard.user_stack[-1].filename if guard.user_stack else ""
        source, attribute = guard.originating_source, getattr(guard.create_fn, "keywords", {}).get("attr")
        if attribute is not None:  # from torch 2.13 on, whether what is there has it
            source = torch_internals.SOURCE_OF_ATTRIBUTE.get()(source, attribute)
        reader = _PROGRAM if is_of_program(file) else _PACKAGE if is_installed(file) else _OTHER
        if not reads.is_watched(source, reader):
            if any(getattr(source, "member", None) in facts_of(one).assigned for one in code.codes):
                raise KeepsState(place_of(source))
            raise CompileFailed(Reason("read_unwatched", place=place_of(source)))


def forget_guards() -> None:
    """Have torch build no guards but those of sizes: it would build all, to drop the others (`compile_function`)."""
    guards = torch_internals.CURRENT_TRACE.get()().output.guards
    for guard in [guard for guard in guards if guard.create_fn_name() != "SHAPE_ENV"]:
        guards.inner.discard(guard)


class _Reads:
    """scope: what torch's names of places begin with. Else as for `refuse_unwatched`."""

    def __init__(self, code: ReadCode, weights: int, scope: dict[str, Any]):
        self._notes, self._scope, self._weights = CodeNotes.join(*code.notes), scope, weights
        self._read = None if code.read is None else dict(code.read)
        template = scope["L"].get("template")  # not where weights are stored in classes of their own
        self._paths = {} if template is None else {part: path for path, part in template.named_modules()}
        self._known: dict[tuple[Any, str], bool] = {}
        self._values: dict[Any, Any] = {}
        self._trusted: set[Any] = set()
        """Sources of what is an engine's, a library's or an enumeration's own, with all that is in it."""

    def is_watched(self, source: Any, reader: str) -> bool:
        """Whether what is at the source is in the graph's key, watched, or of torch and Python alone."""
        known = self._known.get((source, reader))
        if known is None:
            base = getattr(source, "base", None)
            if base is None:  # a global of the traced function, which is the engine's; torch's settings; an input
                known = True
            elif not self.is_watched(base, reader):
                known = False
            elif _root_of(source).startswith("L["):
                known = self._is_own_watched(source)
            else:
                known = type(source).__name__ in _FOLLOWS_BASE or self._is_member_watched(source, reader)
            self._known[source, reader] = known
        return known

    def _is_own_watched(self, source: Any) -> bool:
        """Whether the key has this of what the function is given, or of the block: not what others put on an input, nor
        settings of the block that its code asks for by names which it makes."""
        holder, name = self._value_of(source.base), getattr(source, "member", getattr(source, "index", None))
        if isinstance(holder, torch.Tensor) and isinstance(name, str) and not hasattr(torch.Tensor, name):
            at = re.match(r"L\['tensors'\]\[(\d+)\]", name_of(source.base))
            return at is not None and int(at[1]) < self._weights and not hasattr(holder, name)
        if isinstance(holder, type) and issubclass(holder, torch.nn.Module) and name in dir(holder):
            return self._is_class_watched(holder, name)
        path = self._paths.get(holder) if isinstance(holder, torch.nn.Module) else None
        if path is None or self._read is None or not isinstance(name, str) or is_torchs(name) or name == "training":
            return True
        if name in vars(holder):
            code = getattr(vars(holder)[name], "__code__", None)  # what this engine has put on its copy of the block
            return name in self._read.get(path, ()) or (code is not None and is_of_program(code.co_filename))
        return name not in dir(type(holder)) or self._is_class_watched(type(holder), name)  # a new one is noticed

    def _is_member_watched(self, source: Any, reader: str) -> bool:
        """As `is_watched`, for a source whose base is watched."""
        base, name = source.base, getattr(source, "member", getattr(source, "index", None))
        holder = self._value_of(base)
        if base in self._trusted or isinstance(holder, enum.Enum) or (type(holder) is dict and is_generated(holder)):
            value = self._value_of(source)
            if not isinstance(value, types.FunctionType) or is_of_library(value.__module__):  # what a decorator wraps
                self._trusted.add(source)
            return True
        numbers = getattr(sys.modules.get("numpy"), "generic", ())
        if isinstance(holder, (*_FIXED, numbers)) or "__builtins_dict__" in name_of(base):
            return True
        if isinstance(holder, types.FunctionType):
            if is_of_library(holder.__module__) or is_of_program(holder.__code__.co_filename):
                self._trusted.add(source)
                return True
            return self._notes.has(vars(holder), name) if name in vars(holder) else self._notes.has_part(holder)
        if isinstance(holder, types.CellType):
            return reader == _PROGRAM or self._notes.has_part(holder)
        if isinstance(holder, types.ModuleType):
            value = self._value_of(source)
            if is_of_program(getattr(holder, "__file__", None) or "") and not is_of_library(holder.__name__):
                if not isinstance(value, types.ModuleType):
                    self._trusted.add(source)
                return True
            is_constant = is_of_library(holder.__name__) and (reader == _PROGRAM or isinstance(value, _CONSTANT))
            return is_constant or name == "__name__" or self._notes.has(vars(holder), name)
        if type(base).__name__ == "TypeDictSource":
            return self._is_class_watched(self._value_of(base.base), name)
        if isinstance(holder, (dict, list, set)):  # packages fill their tables as they are imported
            return reader == _PACKAGE or self._notes.has(holder, name)
        if isinstance(holder, type):
            return self._is_class_watched(holder, name)
        if is_of_library(type(holder).__module__) and name in self._notes.settings:
            return True
        state = getattr(holder, "__dict__", None)
        if not isinstance(state, dict):
            return False
        return self._notes.has(state, name) or (name not in state and self._is_class_watched(type(holder), name))

    def _is_class_watched(self, cls: type, name: Any) -> bool:
        """Whether the class has the attribute as its own, and it is watched or a library's."""
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or isinstance(vars(owner)[name], _DESCRIPTORS):
            return name in ("__dict__", "__class__")
        return is_of_library(owner.__module__) or self._notes.has(owner, name)

    def _value_of(self, source: Any) -> Any:
        try:
            return source.get_value(self._scope, {}, self._values)
        except Exception:  # of a property of others, of any type
            return _MISSING


def _root_of(source: Any) -> str:
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return name_of(source)

"""What code keeps from one call of a block to the next.

A graph would have all of it as it was when the block was traced, so such blocks run uncompiled. Torch tells: what a
traced function changes of what was there before is known, since the compiled one has to change it as well.

And code that keeps something must not be run for a question of ours: a run without values counts a call that the image
does not make, or leaves a tensor without values. So runs of that sort end where others' code may do so, before it runs.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import torch_internals
from ..modules.code_owner import package_of
from .code_facts import changes_by_name, facts_of, may_keep
from .code_hash import is_of_program, never_read
from .code_references import of_library

_INSTALLED, _EXTENSIONS = f"{os.sep}site-packages{os.sep}", f"{os.sep}custom_nodes{os.sep}"
_ARGUMENTS = "L['tensors']"
"""Where the traced function has its weights and inputs."""

_WEIGHTS = ("._parameters", "._buffers")
"""Dicts of modules in which `functional_call` puts a call's weights, and takes them out again."""

_HARMLESS = ("builtins", "collections", "math", "sys", "time", "torch")
"""Where functions and types written in C are from that change things by methods of known names alone."""


class KeepsState(Exception):
    """Code keeps something from one call to the next, or may do so. The text says where."""


class _MayKeep(BaseException):
    """As `KeepsState`, past whoever catches exceptions meanwhile."""


def refuse_kept_state(codes: Collection[types.CodeType], model: torch.nn.Module) -> None:
    """Raise KeepsState where the code that torch is tracing here has changed what was there before.

    codes: all that is traced, if known. A model's own may keep on the model what none of it reads.
    """
    trace = torch_internals.CURRENT_TRACE.get()()
    if trace is None:
        return
    for node in trace.output.graph.find_nodes(op="placeholder"):
        name = _name_of(getattr(node.meta.get("grapharg"), "source", None))
        if name and not name.startswith(_ARGUMENTS) and getattr(node.meta["example_value"], "_version", 0):
            raise KeepsState(name)
    effects = trace.output.side_effects
    for variable in list(effects.id_to_variable.values()):
        kind = variable.mutation_type
        if kind is None or type(kind).__name__.endswith("New") or not effects.is_modified(variable):
            continue
        name = _name_of(variable.source)
        names = frozenset(effects.store_attr_mutations.get(variable, ()))
        is_module = isinstance(getattr(variable, "value", None), torch.nn.Module)
        is_noted = is_module and codes and never_read(names, codes) == names and _are_set_by_own(names, codes, model)
        if not name.endswith(_WEIGHTS) and not is_noted:
            raise KeepsState(".".join([name, *names]))


def _are_set_by_own(names: frozenset[str], codes: Iterable[types.CodeType], model: torch.nn.Module) -> bool:
    """Whether no code of others than the model's sets these attributes, which they would read elsewhere."""
    own = packages_of(model)
    files = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if package_of(name) in own}
    others = (code for code in codes if code.co_filename not in files and _is_others(code.co_filename))
    return all(names.isdisjoint(facts_of(code).assigned) for code in others)


def _name_of(source: Any) -> str:
    """How torch names where a value of a trace comes from: a method or, from 2.10 on, a property. "" for none."""
    name = getattr(source, "name", "")
    return name() if callable(name) else name


class _Unasked(TorchDispatchMode):
    """Torch's operators run without a profile function: without values they are tens of thousands of Python calls."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asking = sys.getprofile()
        sys.setprofile(None)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            sys.setprofile(asking)


@contextmanager
def without_others_state(model: torch.nn.Module, is_plain: bool) -> Iterator[None]:
    """A context in which code of others than the model's that may keep something is not run: KeepsState ends it.

    To be entered after modes that run operators without values. is_plain: all weights are plain tensors; others may be
    made anew by operators in a mode, in a way that their classes do not know.
    """
    own = packages_of(model) | {package_of(__name__)}
    others: dict[types.CodeType, bool] = {}
    found: list[str] = []

    def ask(frame: types.FrameType, event: str, function: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            keeps = others.get(code, False) and _may_change(function)
        elif event == "call" and code not in others:
            home = frame.f_globals.get("__name__")
            is_others = not of_library(home) and package_of(home) not in own and _is_others(code.co_filename)
            others[code] = is_others
            keeps = is_others and (may_keep(code) or any(map(_changes_in_use, _values_of(frame))))
        else:
            return
        if keeps:
            found.append(code.co_name)
            raise _MayKeep(code.co_name)

    def pause(phase: str, _: Any) -> None:
        if threading.get_ident() != thread:
            return
        if phase == "start":  # an exception in what garbage runs would go no further, and end the asking
            paused.append(sys.getprofile())
            sys.setprofile(None)
        elif paused:
            sys.setprofile(paused.pop())

    before, thread, paused = sys.getprofile(), threading.get_ident(), []
    gc.callbacks.append(pause)
    sys.setprofile(ask)
    try:
        with _Unasked() if is_plain else nullcontext():
            yield
    except _MayKeep:
        pass
    finally:
        gc.callbacks.remove(pause)
        sys.setprofile(before)
        if found:  # whatever others' code has made of it
            raise KeepsState(found[0]) from None


def _values_of(frame: types.FrameType) -> Iterator[Any]:
    """The globals, free variables and arguments that a call is going to use."""
    yield from (frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals)
    yield from (value for name, value in frame.f_locals.items() if name != ".0")  # what a comprehension goes through


def _changes_in_use(value: Any) -> bool:
    """Whether a value is changed by being called or read, in a way that no bytecode shows."""
    while isinstance(value, functools.partial):
        value = value.func
    is_builtin = isinstance(value, types.BuiltinFunctionType)
    return isinstance(value, (Iterator, defaultdict, operator.methodcaller)) or is_builtin and _may_change(value)


def _may_change(function: Any) -> bool:
    """Whether a function written in C may change what it is given or bound to, or keep something itself."""
    home = getattr(function, "__module__", None) or type(function.__self__).__module__
    return changes_by_name(function.__name__) or package_of(home) not in _HARMLESS


def packages_of(model: torch.nn.Module) -> set[str]:
    """The packages in which the classes of the model and its weights are, but for torch's and Python's."""
    held = (value for part in model.modules() for value in (part, *part._parameters.values()))
    packages = {package_of(base.__module__) for cls in set(map(type, held)) for base in cls.__mro__}
    return packages - {"torch", "builtins"}


@functools.lru_cache(maxsize=4096)
def _is_others(file: str) -> bool:
    """Whether code in the file is neither of torch, Python or this engine nor of an installed package."""
    return not is_of_program(file) and (_INSTALLED not in file or _EXTENSIONS in file)

"""What code keeps from one call of a block to the next.

A graph would have all of it as it was when the block was traced, so such blocks run uncompiled. Torch tells: what a
traced function changes of what was there before is known, since the compiled one has to change it as well.

And code that keeps something must not be run for a question of ours: a run without values counts a call that the image
does not make, or leaves a tensor without values. So runs of that sort end where others' code may do so, before it runs.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core import torch_internals
from .code_facts import may_keep
from .code_hash import is_of_program, never_read
from .code_references import of_library

_INSTALLED, _EXTENSIONS = f"{os.sep}site-packages{os.sep}", f"{os.sep}custom_nodes{os.sep}"
_ARGUMENTS = "L['tensors']"
"""Where the traced function has its weights and inputs."""

_WEIGHTS = ("._parameters", "._buffers")
"""Dicts of modules in which `functional_call` puts a call's weights, and takes them out again."""


class KeepsState(Exception):
    """Code keeps something from one call to the next, or may do so. The text says where."""


class _MayKeep(BaseException):
    """As `KeepsState`, past whoever catches exceptions meanwhile."""


def refuse_kept_state(codes: Iterable[types.CodeType]) -> None:
    """Raise KeepsState where the code that torch is tracing here has changed what was there before.

    codes: of the code that is traced. A model may keep on itself what none of it reads.
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
        if not name.endswith(_WEIGHTS) and not (is_module and never_read(names, codes) == names):
            raise KeepsState(".".join([name, *names]))


def _name_of(source: Any) -> str:
    """How torch names where a value of a trace comes from: a method or, from 2.10 on, a property. "" for none."""
    name = getattr(source, "name", "")
    return name() if callable(name) else name


@contextmanager
def without_others_state(model: torch.nn.Module) -> Iterator[None]:
    """A context in which code of others than the model's that may keep something is not run: KeepsState ends it."""
    own = packages_of(model) | {package_of(__name__)}
    asked: set[types.CodeType] = set()

    def ask(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in asked:
            return
        asked.add(code)
        home = frame.f_globals.get("__name__")
        if may_keep(code) and not of_library(home) and package_of(home) not in own and _is_others(code.co_filename):
            raise _MayKeep(code.co_name)

    before = sys.getprofile()
    sys.setprofile(ask)
    try:
        yield
    except _MayKeep as where:
        raise KeepsState(str(where)) from None
    finally:
        sys.setprofile(before)


def packages_of(model: torch.nn.Module) -> set[str]:
    """The packages in which the classes of the model and its weights are, but for torch's and Python's."""
    held = (value for part in model.modules() for value in (part, *part._parameters.values()))
    packages = {package_of(base.__module__) for cls in set(map(type, held)) for base in cls.__mro__}
    return packages - {"torch", "builtins"}


def package_of(name: Any) -> str:
    """The outermost package of a module's name."""
    return str(name).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _is_others(file: str) -> bool:
    """Whether code in the file is neither of torch, Python or this engine nor of an installed package."""
    return not is_of_program(file) and (_INSTALLED not in file or _EXTENSIONS in file)

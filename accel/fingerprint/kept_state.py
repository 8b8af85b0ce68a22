"""What code keeps from one call of a block to the next.

A graph would have all of it as it was when the block was traced, so such blocks run uncompiled. Torch's trace tells,
since the compiled function has to change what the traced one changes; a run would count a call that no image makes.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ..core import torch_internals
from ..modules.code_owner import package_of
from .code_facts import facts_of, is_of_dataclass, may_keep
from .code_hash import find_unread_attributes, is_installed, is_of_program

_WEIGHTS = ("._parameters", "._buffers")
"""Dicts of modules in which `functional_call` puts a call's weights, and takes them out again."""


class KeepsState(Exception):
    """Code keeps something from one call to the next, or may do so. The text says where."""


def refuse_kept_state(
    codes: Collection[types.CodeType], read: Collection[types.CodeType], model: torch.nn.Module
) -> None:
    """Raise KeepsState where the code that torch is tracing here has changed objects that were there before.

    codes: all that is traced, if known. read: all that was read in and around the blocks. A model's own may keep on the
        model what neither reads.
    """
    trace = torch_internals.CURRENT_TRACE.get()()
    if trace is None:
        return
    effects = trace.output.side_effects
    for variable in list(effects.id_to_variable.values()):
        kind = variable.mutation_type
        if kind is None or type(kind).__name__.endswith("New") or not effects.is_modified(variable):
            continue
        name = name_of(variable.source)
        names = frozenset(effects.store_attr_mutations.get(variable, ()))
        is_module = isinstance(getattr(variable, "value", None), torch.nn.Module)
        is_unread = is_module and codes and find_unread_attributes(names, (*codes, *read)) == names
        others = code_of_others(codes, model)  # which would read elsewhere what they set
        is_noted = is_unread and all(names.isdisjoint(facts_of(code).assigned) for code in others)
        if not name.endswith(_WEIGHTS) and not is_noted:
            raise KeepsState(".".join([place_of(variable.source), *sorted(names)]))


def place_of(source: Any) -> str:
    """Where a value of a trace comes from, as code would name it."""
    name = name_of(source).replace("L['template']", "self")
    name = re.sub(r"\._modules\['(.*?)'\]", r".\1", re.sub(r"L\['tensors'\]\[\d+\]", "tensor", name))
    return re.sub(r"G\['(?:__import_)?(.*?)'\]", lambda found: found[1].replace("_dot_", "."), name)


def name_of(source: Any) -> str:
    """How torch names where a value of a trace comes from: a method or, from 2.10 on, a property. "" for none."""
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def others_may_keep(codes: Iterable[types.CodeType], model: torch.nn.Module) -> bool:
    """True where code of others than the model's may leave something that its next call finds.

    For code that torch runs while it traces, since it cannot follow the classes of the model's weights.
    """
    return any(map(may_keep, code_of_others(codes, model)))


def code_of_others(codes: Iterable[types.CodeType], model: torch.nn.Module) -> Iterator[types.CodeType]:
    """Those of the codes that are of neither the model's packages nor an installed one."""
    own = packages_of(model)
    files = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if package_of(name) in own}
    for code in codes:
        file = code.co_filename
        if not (file in files or is_of_program(file) or is_installed(file) or is_of_dataclass(code)):
            yield code


def packages_of(model: torch.nn.Module) -> set[str]:
    """The packages in which the classes of the model and its weights are, but for torch's and Python's."""
    held = (value for part in model.modules() for value in (part, *part._parameters.values()))
    packages = {package_of(base.__module__) for cls in set(map(type, held)) for base in cls.__mro__}
    return packages - {"torch", "builtins"}

"""A block's forward that other programs have wrapped: the function inside, and the same wrappers around another.

A pack wraps the forward of a class when it is imported, notes something in each call, and calls what was there. What
was there can be compiled, and the wrapper runs around it as it is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from .code_owner import home_of, package_of
from .substitution import foreign_forward, forward_of

_DEEPEST = 16
"""Wrappers around wrappers. Closures may also refer to themselves."""


class WrappedForward:
    """The forward of one module, which is another program's, around that of the module's class.

    owner: the class that has the forward. outermost: the wrapper, on the class or on the module. own: the function
    inside, as the class was made with it. cells: of the closures in between, each with the next one inwards.
    """

    def __init__(self, module: torch.nn.Module, outermost: Any, own: types.FunctionType, cells: list[types.CellType]):
        self.owner, on_class = forward_of(type(module))
        self.outermost, self.own, self.cells = outermost, own, cells
        self.is_on_class = outermost is on_class
        self._contents = [cell.cell_contents for cell in cells]

    @classmethod
    def find(cls, module: torch.nn.Module) -> WrappedForward | None:
        """The wrapped forward of the module; None where it is its class's own, or does not lead to that in one way."""
        owner, on_class = forward_of(type(module))
        outermost = foreign_forward(module) or on_class
        found: list[tuple[types.FunctionType, list[types.CellType]]] = []
        _search(outermost, owner, module, [], found)
        if len(found) != 1 or not found[0][1] or (outermost is on_class and not is_replaced(type(module))):
            return None
        return cls(module, outermost, *found[0])

    def stands(self, module: torch.nn.Module, forward: Any) -> bool:
        """Whether the wrappers are still there, where the module's own forward is this one."""
        now = forward_of(type(module))[1] if self.is_on_class else forward
        return now is self.outermost and all(
            cell.cell_contents is inner for cell, inner in zip(self.cells, self._contents, strict=True)
        )

    def wrap(self, function: Callable, module: torch.nn.Module) -> Callable:
        """The wrappers as they are, but around this function, bound to the module. They share their variables with
        those that stay in place."""
        functools.update_wrapper(function, self.own)
        changed: dict[int, Any] = {id(self.own): function}
        for cell, inner in zip(reversed(self.cells), reversed(self._contents), strict=True):
            changed[id(cell)] = types.CellType(_replace_cells(inner, changed))
        made = _replace_cells(self.outermost, changed)
        return types.MethodType(made, module) if self.is_on_class else made


def is_replaced(cls: type) -> bool:
    """Whether the forward of the class is from another package than the class that has it."""
    owner, forward = forward_of(cls)
    if not isinstance(forward, types.FunctionType):
        return False
    return package_of(home_of(forward)) not in ("torch", package_of(owner.__module__))


def _search(value: Any, owner: type, module: torch.nn.Module, cells: list[types.CellType], found: list) -> None:
    """Append to `found` each way from the value to the owner's own forward: that function, and the cells passed."""
    if type(value) is types.MethodType and value.__self__ is module:
        value = value.__func__
    if type(value) is not types.FunctionType or len(cells) > _DEEPEST:
        return
    if home_of(value) == owner.__module__ and value.__qualname__ == f"{owner.__qualname__}.forward":
        found.append((value, cells))
        return
    for cell in value.__closure__ or ():
        try:
            _search(cell.cell_contents, owner, module, [*cells, cell], found)
        except ValueError:  # not filled yet
            pass


def _replace_cells(value: Any, changed: dict[int, Any]) -> Any:
    """The function or bound method with what has changed in its closure."""
    if type(value) is types.MethodType:
        return types.MethodType(_replace_cells(value.__func__, changed), value.__self__)
    if id(value) in changed:
        return changed[id(value)]
    cells = tuple(changed.get(id(cell), cell) for cell in value.__closure__)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__qualname__ = value.__qualname__
    made.__dict__.update(value.__dict__)
    return made

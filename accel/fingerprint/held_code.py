"""What is found beside plain values while they are described: code to look at next, and where it lies."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .functions_in import methods_of
from .module_files import Unknown, source_of

if TYPE_CHECKING:
    from .code_reach import CodeReader

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"psutil", "torch"}
"""Whose functions are told by their own code alone, not by what they call in turn."""


class Held:
    """The functions and classes found among plain values, to be looked at with the code that holds them."""

    def __init__(self, reader: CodeReader):
        self._reader = reader
        self.functions: list[types.FunctionType] = []
        self.classes: set[type] = set()
        self.sources: set[str] = set()
        self.opaque: set[str] = set()
        self.within: set[int] = set()
        """The ids of the values that are being described, from the outermost in."""

    def add(self, other: Held) -> None:
        self.functions.extend(other.functions)
        self.classes |= other.classes
        self.opaque |= other.opaque

    def lies_in(self, scope: Mapping[str, Any]) -> None:
        """Note the namespace of a module that code or a value is from."""
        try:
            self.sources.add(source_of(scope) or "")
        except Unknown as unknown:
            self.opaque.add(str(unknown))

    def lies_where(self, cls: type) -> None:
        """Note the module that a class is from."""
        if not is_library_module(cls.__module__):
            self.lies_in(vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {"__name__": cls})

    def function(self, function: types.FunctionType) -> tuple:
        self.functions.append(function)
        return ("function", self._reader.own(function))

    def class_of(self, value: Any) -> tuple:
        self.classes.add(type(value))
        return (type(value).__module__, type(value).__qualname__)

    def class_value(self, cls: type, name: str) -> str | None:
        """The description of what the class itself holds under the name; None where there is none."""
        return self._reader.class_value(cls, name)

    def all_functions(self) -> Iterator[types.FunctionType]:
        yield from self.functions
        for cls in self.classes:
            yield from (function for _, function in methods_of(cls))


@functools.lru_cache(maxsize=4096)
def is_library_module(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES

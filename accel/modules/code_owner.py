"""Whose code something is: the module that a function is from, and the package of a module."""

from __future__ import annotations

import functools
import types
from typing import Any


def home_of(function: Any) -> str:
    """The name of the module whose code it runs; "" where the code has none.

    Not its `__module__`: a wrapper may have taken over the name of what it wraps. Of a method or partial it is that of
    the function inside, of anything else that can be called its class's.
    """
    while isinstance(function, (types.MethodType, functools.partial)):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    if isinstance(function, types.FunctionType):
        return function.__globals__.get("__name__") or ""
    return type(function).__module__


def package_of(name: Any) -> str:
    """The outermost package of a module's name."""
    return str(name).partition(".")[0]

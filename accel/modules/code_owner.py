"""Whose code something is: the module that a function is from, and the package of a module."""

from __future__ import annotations

import functools
import pathlib
import types
from typing import Any


def home_of(function: Any) -> str:
    """The name of the module whose code a function runs; "" where the code has none.

    Not its `__module__`: a wrapper may have taken over the name of what it wraps. Of a method or partial it is that of
    the function inside, of anything else that can be called its class's.
    """
    while isinstance(function, (types.MethodType, functools.partial)):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    if isinstance(function, types.FunctionType):
        return function.__globals__.get("__name__") or ""
    return type(function).__module__


def owner_of(file: str) -> str:
    """The extension or installed package that a file of code is in; else its folder and name."""
    parts = pathlib.PurePath(file).parts
    folder = next((name for name in ("custom_nodes", "site-packages") if name in parts[:-1]), None)
    return "/".join(parts[-2:]) if folder is None else parts[parts.index(folder) + 1]


def package_of(name: Any) -> str:
    """The outermost package of a module's name."""
    return str(name).partition(".")[0]

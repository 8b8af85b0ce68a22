"""One engine in a process, however often this package is in it: one cache, one budget.

ComfyUI loads its node pack by file, the engine in it under a name of ComfyUI's own; a script in the same process
imports the installed package. What a script calls is then done by the engine that ComfyUI's nodes use.
"""

from __future__ import annotations

import functools
import logging
import sys
from importlib import import_module
from types import FunctionType
from typing import Any

log = logging.getLogger("accel")

_LOADED = "hosts.comfyui.models.accelerate"
"""The module of an engine that is there once ComfyUI has loaded the nodes over it."""


def shared_by_all(package: str, module: str, name: str) -> Any:
    """What `module` of this package (`package`) has under the name, for scripts to use.

    A function does at every call what the engine's function of this name does that is the process' own just then; it
    takes this package's classes for the engine's.
    """
    own = getattr(import_module(f"{package}.{module}"), name)
    if not isinstance(own, FunctionType):
        return own

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine = engine_of_process(package)
        if engine == package:
            return own(*args, **kwargs)
        function = getattr(import_module(f"{engine}.{module}"), name)
        args = tuple(_translated(value, package, engine) for value in args)
        return function(*args, **{key: _translated(value, package, engine) for key, value in kwargs.items()})

    return call


def engine_of_process(package: str) -> str:
    """The package of the engine that ComfyUI's nodes use, if they are loaded and it is of this version; else this."""
    if f"{package}.{_LOADED}" in sys.modules:
        return package
    for name in list(sys.modules):
        engine = name.removesuffix(f".{_LOADED}")
        if engine == name or not engine.endswith(".accel"):
            continue
        theirs, ours = (getattr(sys.modules.get(one), "__version__", None) for one in (engine, package))
        if theirs == ours:
            return engine
        _say_once(f"ComfyUI has loaded version {theirs} of Accel and this is {ours}: each has a graph cache of its own")
    return package


@functools.lru_cache(maxsize=8)
def _say_once(sentence: str) -> None:
    log.warning("%s.", sentence)


def _translated(value: Any, package: str, engine: str) -> Any:
    """An object of a class of this package's (DeepCacheSettings) as one of the engine's class of that name."""
    cls = type(value)
    if not cls.__module__.startswith(f"{package}."):
        return value
    theirs = getattr(import_module(engine + cls.__module__.removeprefix(package)), cls.__qualname__)
    return theirs(**vars(value))

"""The modules of generated code that inductor keeps for the life of the process, and letting go of some."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence


def all_modules() -> list[types.ModuleType]:
    """All of them; none before anything was compiled or loaded."""
    codecache = sys.modules.get("torch._inductor.codecache")  # importing it takes seconds
    if codecache is None:
        return []
    cache = codecache.PyCodeCache
    return [*cache.modules, *getattr(cache, "modules_no_attr", {}).values()]


def bytes_of(modules: Sequence[types.ModuleType]) -> int:
    """What generated code weighs: its source and the libraries built from it, as files, bytes."""
    files = set()
    for module in modules:
        files.add(module.__file__)
        for value in vars(module).values():
            files.add(getattr(getattr(value, "lib", None), "_name", None))
    return sum(os.path.getsize(file) for file in files if file and os.path.isfile(file))


def release(scope: dict, modules: Sequence[types.ModuleType]) -> None:
    """Give a dropped graph's memory back: torch would keep its code and what it compiled for good."""
    scope.update(dict.fromkeys(scope))  # the names stay: torch deletes some itself, later
    if not modules:
        return
    cache = sys.modules["torch._inductor.codecache"].PyCodeCache
    gone = set(map(id, modules))
    cache.modules[:] = [module for module in cache.modules if id(module) not in gone]
    without_attributes = getattr(cache, "modules_no_attr", {})
    for path in [path for path, module in without_attributes.items() if id(module) in gone]:
        del without_attributes[path]
    kept = {module.__file__ for module in all_modules()}
    for module in modules:
        if module.__file__ not in kept:
            getattr(cache, "linemaps", {}).pop(module.__file__, None)
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]

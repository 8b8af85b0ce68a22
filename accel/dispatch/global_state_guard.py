"""Restores state of the whole process: `functools` caches, globals, attributes of classes.

Torch cannot follow the classes of quantised weights and runs their code as it traces. Tensors without values that it
keeps must not be there for the next real call to find.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ..fingerprint.plain_values import is_plain_object
from ..modules.code_owner import package_of

_DICTS = (dict, OrderedDict, defaultdict)
_CACHE = type(functools.lru_cache(lambda: None))
_DEPTH = 4
"""Levels of nested containers that are searched."""


@contextmanager
def global_state_restored(packages: Collection[str], foreign: Callable[[Any], bool]) -> Iterator[None]:
    """On exit, no `functools` cache and no global of these packages refers to a foreign value.

    foreign: whether a value must not stay. A cache with such a value is cleared; a container or name with one gets its
        former content back; all others stay as they are.
    """
    before = [(namespace, dict(vars(namespace))) for namespace in _namespaces(packages)]
    held = [part for _, names in before for value in names.values() for part in _within(value)]
    containers = {id(part): part for part in held if type(part) in (*_DICTS, list, set)}
    contents = [(container, container.copy()) for container in containers.values()]
    try:
        yield
    finally:
        for container, content in contents:
            if any(map(foreign, _within(container))):
                container.clear()
                container.extend(content) if type(container) is list else container.update(content)
        for namespace, names in before:
            for name, value in list(vars(namespace).items()):
                if any(map(foreign, _within(value))):
                    setattr(namespace, name, names[name]) if name in names else delattr(namespace, name)
        for cache in _caches([namespace for namespace, _ in before]):
            if any(foreign(value) for part in gc.get_referents(cache) for value in _within(part)):
                cache.cache_clear()


def _caches(namespaces: list[Any]) -> list[Any]:
    """Every `functools` cache; of those that somebody froze, which Python does not list, the ones that have a name."""
    found = gc.get_objects()
    if gc.get_freeze_count():
        named = (*namespaces, *list(sys.modules.values()))
        found += [value for holder in named for value in list(getattr(holder, "__dict__", {}).values())]
    return [value for value in found if type(value) is _CACHE]


def _namespaces(packages: Collection[str]) -> list[Any]:
    """The modules of these packages, and the classes in them."""
    modules = [
        module
        for name, module in sys.modules.copy().items()  # collecting garbage may drop generated code
        if package_of(name) in packages and type(module) is types.ModuleType
    ]
    classes = {
        id(value): value
        for module in modules
        for value in list(vars(module).values())
        if issubclass(type(value), type) and package_of(value.__module__) in packages
    }
    return [*modules, *classes.values()]


def _within(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The value and all that is in it: items of containers, and attributes of plain objects."""
    yield value
    if depth == 0:
        return
    inside: Any = value
    if is_plain_object(value):
        inside = [vars(value)]  # which is filled again itself
    elif type(value) in _DICTS:
        inside = (*value, *value.values())
    elif not issubclass(type(value), (list, tuple, set)):
        return
    for part in tuple(inside):
        yield from _within(part, depth - 1)

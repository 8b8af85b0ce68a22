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
_CONTAINERS = (*_DICTS, list, set)
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
    containers: dict[int, Any] = {}
    for _, names in before:
        for value in names.values():
            _collect(value, containers)
    contents = [(container, container.copy()) for container in containers.values()]
    try:
        yield
    finally:
        for container, content in contents:
            if _refers_to(container, foreign):
                _refill(container, content)
        for namespace, names in before:
            for name, value in list(vars(namespace).items()):
                if _refers_to(value, foreign):
                    setattr(namespace, name, names[name]) if name in names else delattr(namespace, name)
        for cache in _caches([namespace for namespace, _ in before]):
            if any(_refers_to(part, foreign) for part in gc.get_referents(cache)):
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


def _collect(value: Any, containers: dict[int, Any], depth: int = _DEPTH) -> None:
    """Add the containers within a value and within plain objects, by id."""
    if depth == 0 or id(value) in containers:
        return
    if type(value) in _CONTAINERS:
        containers[id(value)] = value
        for item in value.values() if type(value) in _DICTS else value:
            _collect(item, containers, depth - 1)
    elif type(value) is tuple:
        for item in value:
            _collect(item, containers, depth - 1)
    elif is_plain_object(value):
        _collect(vars(value), containers, depth - 1)


def _refers_to(value: Any, foreign: Callable[[Any], bool], depth: int = _DEPTH) -> bool:
    if foreign(value):
        return True
    if depth == 0:
        return False
    if type(value) in _DICTS:
        return any(_refers_to(item, foreign, depth - 1) for pair in list(value.items()) for item in pair)
    if issubclass(type(value), (list, tuple, set)):
        return any(_refers_to(item, foreign, depth - 1) for item in list(value))
    return False


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if type(container) is list else container.update(content)

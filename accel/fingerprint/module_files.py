"""A digest of the files that code comes from, equal in every process that runs the same files."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BEGAN = time.time()
"""When this module, and with it the pack, was imported: a file that changed later is not what runs here."""

_LOOK_EVERY = 10.0
"""Seconds. The kinds of a model are from the same folders and are looked up within a moment."""

_NO_CODE = ("__pycache__", "node_modules", "site-packages", "venv")


class Unknown(Exception):
    """The code of a module cannot be identified by its files; the message says why."""


def source_of(scope: Mapping[str, Any]) -> str | None:
    """The folder of the outermost package of a module with this namespace, or else the module's file.

    The whole package, since what the module imports may come from any part of it. None for a folder of modules without
    code itself. Raises Unknown: the module was not loaded from a file.
    """
    name, file = str(scope.get("__name__")), scope.get("__file__")
    if file is None:
        if scope.get("__path__") is not None:
            return None
        raise Unknown(f"{name} has no file by which to tell it from another version of it")
    folder, base = os.path.split(os.path.abspath(file))
    inner = name.split(".")[1:]
    if base.partition(".")[0] == "__init__":
        inner.append("")
    elif inner and inner[-1] != base.partition(".")[0]:
        return file  # loaded under a name that does not reflect its path
    for part in reversed(inner[:-1]):
        folder, base = os.path.split(folder)
        if base != part:
            return file
    return folder if inner else file


def digest(sources: Iterable[str]) -> str:
    """A digest of the code in these files and folders, wherever they are. Each folder is looked through at most once in
    `_LOOK_EVERY` seconds. Raises Unknown: a file has changed since this process began, or cannot be read."""
    period = int(time.monotonic() / _LOOK_EVERY)
    digests = sorted(_hash_source(source, _BEGAN, period) for source in sources)
    return hashlib.sha256(repr(digests).encode()).hexdigest()[:24]


@functools.lru_cache(maxsize=1024)
def _hash_source(source: str, began: float, period: int) -> str:
    files = sorted((name, _hash_unchanged_file(file, began)) for name, file in _files(source))
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(source: str) -> Iterator[tuple[str, str]]:
    """(name within the source, path) of each file of code."""
    if not os.path.isdir(source):
        yield os.path.basename(source), source
        return
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name not in _NO_CODE and not name.startswith(".")]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, source).replace(os.sep, "/"), path


def _hash_unchanged_file(file: str, began: float) -> str:
    try:
        status = os.stat(file)
        if max(status.st_mtime, status.st_ctime) > began:
            raise Unknown(f"{os.path.basename(file)} has changed since this process began")
        return _hash_file(file, status.st_mtime_ns, status.st_size)
    except OSError:
        raise Unknown(f"{os.path.basename(file)}, a file of its code, is gone") from None


@functools.lru_cache(maxsize=1 << 16)
def _hash_file(file: str, changed: int, size: int) -> str:
    with open(file, "rb") as code:
        return hashlib.sha256(code.read()).hexdigest()

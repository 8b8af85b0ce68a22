"""What the code behind a block is, told from its files: a name for it that other processes find too."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BEGAN = time.time()
"""When this module was imported, which is when the pack is: a file changed later is not what runs here."""

_NO_CODE = ("__pycache__", "node_modules", "site-packages", "venv")


class Unknown(Exception):
    """Nothing can be told of the code of a module; the message says why."""


def source_of(scope: Mapping[str, Any]) -> str | None:
    """Where the code of a module with this namespace lies: the folder of its outermost package, or its file.

    A value that it imports may come from any module of the package. None for a folder of modules without code.

    Raises:
        Unknown: it was loaded from no file.
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
        return file  # loaded under a name that says nothing of its place
    for part in reversed(inner[:-1]):
        folder, base = os.path.split(folder)
        if base != part:
            return file
    return folder if inner else file


def digest(sources: Iterable[str]) -> str:
    """A name for the code in these files and folders, wherever they are.

    Raises:
        Unknown: a file has changed since this process began, or cannot be read.
    """
    told = [(name, _digest(file)) for source in sorted(sources) for name, file in _files(source)]
    return hashlib.sha256(repr(sorted(told)).encode()).hexdigest()[:24]


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


def _digest(file: str) -> str:
    try:
        status = os.stat(file)
        if max(status.st_mtime, status.st_ctime) > _BEGAN:
            raise Unknown(f"{os.path.basename(file)} has changed since this process began")
        return _of_file(file, status.st_mtime_ns, status.st_size)
    except OSError:
        raise Unknown(f"{os.path.basename(file)}, a file of its code, is gone") from None


@functools.lru_cache(maxsize=1 << 16)
def _of_file(file: str, changed: int, size: int) -> str:
    with open(file, "rb") as code:
        return hashlib.sha256(code.read()).hexdigest()

"""What the code of modules is, told from their files: a name for it that other processes find too."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator

_BEGAN = time.time()
"""When this module was imported, which is when the pack is: a file changed later is not what runs here."""


class Unknown(Exception):
    """Nothing can be told of the code of a module; the message says why."""


def digest(modules: Iterable[str]) -> str:
    """A name for the files that the modules were loaded from, whatever these are called.

    modules: by their names in `sys.modules`.

    Raises:
        Unknown: a module has no file, or its file is another by now.
    """
    return digest_of_files(file for module in modules for file in _files_of(module))


def digest_of_files(files: Iterable[str]) -> str:
    """A name for what these files, which this process has loaded, hold.

    Raises:
        Unknown: one is not there, or is another by now.
    """
    return hashlib.sha256("".join(sorted({_digest(file) for file in files})).encode()).hexdigest()[:24]


def _files_of(name: str) -> Iterator[str]:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is not None:
        yield file
    elif not hasattr(module, "__path__"):  # else it is a folder of modules with no code of its own
        raise Unknown(f"{name} has no file by which to tell it from another version of it")


def _digest(file: str) -> str:
    try:
        status = os.stat(file)
        if max(status.st_mtime, status.st_ctime) > _BEGAN:
            raise Unknown(f"{os.path.basename(file)} has changed since this process began")
        return _of_file(file, status.st_mtime_ns, status.st_size)
    except OSError:
        raise Unknown(f"{os.path.basename(file)}, which it was loaded from, is gone") from None


@functools.lru_cache(maxsize=1024)
def _of_file(file: str, changed: int, size: int) -> str:
    with open(file, "rb") as code:
        return hashlib.sha256(code.read()).hexdigest()

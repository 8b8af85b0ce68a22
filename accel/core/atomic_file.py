"""Atomic file writes: under a unique temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".tmp"
"""Suffix of unfinished files."""

UNFINISHED_NAME = re.compile("[0-9a-f]{16}" + re.escape(UNFINISHED))
"""Names of our own unfinished files."""

_PATIENCE = 1.0
"""Seconds in which Windows may refuse to replace a file that somebody has open: a reader, a virus scanner."""


def write_whole(path: Path, data: bytes) -> None:
    """Create or replace a file, and create its folder; no reader ever sees part of it."""
    with new_file(path.parent) as (file, unfinished):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut may leave the name without the bytes
        file.close()
        _replace(unfinished, path)


@contextlib.contextmanager
def new_file(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """(file, path) of an empty file with a unique name, deleted afterwards unless it was renamed. Close it before you
    rename it: Windows renames no open files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{secrets.token_hex(8)}{UNFINISHED}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags, 0o666), "w+b") as file:
            yield file, path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def open_file(path: Path) -> BinaryIO:
    """The file, open for reading. Raises OSError: it is no regular file, and a pipe might never end; FileNotFoundError
    without one."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is not a regular file")
    return open(path, "rb")


def _replace(unfinished: Path, path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return os.replace(unfinished, path)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
        time.sleep(0.02)

"""Where the store's files lie: a folder of this machine or of a shared disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from ..core.atomic_file import UNFINISHED, UNFINISHED_NAME, new_file, opened, write_whole


class File(NamedTuple):
    """A file's name, its bytes, and when it was last used, in seconds since 1970 by the folder's clock."""

    name: str
    size: int
    used: float


class Folder(Protocol):
    """Files by name. Everything raises OSError when the disk, or the network before it, fails.

    Others may write the folder too, so nothing here may hang or fill the memory because of what lies in it.
    """

    def files(self, prefix: str = "") -> Iterator[File]:
        """The finished files whose names begin so; none where the folder does not exist yet. Changes nothing."""

    def unfinished(self) -> Iterator[File]:
        """The files that somebody is writing, or was when their process ended."""

    def read(self, name: str, largest: int) -> bytes:
        """The whole file; FileNotFoundError where there is none, OSError where it has more than `largest` bytes."""

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file. Nobody ever sees a part of it."""

    def remove(self, name: str) -> None:
        """Delete the file, if it is there."""

    def touch(self, name: str) -> None:
        """Note that the file was used just now, where that can be noted."""

    def now(self) -> float:
        """The time by the clock that dates the files, which may be another machine's. Writes a file to learn it."""


class LocalFolder:
    """A folder of the file system, made at the first write. Needs no locks, so it may be on NFS.

    A file is written under a name of its own and then renamed; who reads meanwhile finds the old one or none.
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def files(self, prefix: str = "") -> Iterator[File]:
        return self._scan(lambda name: name.startswith(prefix) and not name.endswith(UNFINISHED))

    def unfinished(self) -> Iterator[File]:
        return self._scan(lambda name: UNFINISHED_NAME.fullmatch(name) is not None)

    def read(self, name: str, largest: int) -> bytes:
        with opened(self.path / name) as (file, status):
            if status.st_size > largest:
                raise OSError(f"{name} has {status.st_size} bytes, more than {largest}")
            return file.read(status.st_size)

    def write(self, name: str, data: bytes) -> None:
        write_whole(self.path / name, data)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        os.utime(self.path / name)  # without a time it is the file server's

    def now(self) -> float:
        with new_file(self.path) as (file, _):
            return os.fstat(file.fileno()).st_mtime

    def _scan(self, wanted: Callable[[str], bool]) -> Iterator[File]:
        try:
            found = os.scandir(self.path)
        except FileNotFoundError:
            return
        with found:
            for item in found:
                # By name first: asking a file server about each file costs a round trip.
                if not wanted(item.name):
                    continue
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError:  # pruned by another process, or one that cannot be told about: the others can
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield File(item.name, status.st_size, status.st_mtime)

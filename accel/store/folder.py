"""Where the store's files are: the protocol, and a folder on a local or shared disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from ..core.atomic_file import UNFINISHED, UNFINISHED_NAME, new_file, opened, write_whole


class File(NamedTuple):
    """A file's name, size in bytes, and last use in seconds since 1970 by the folder's clock.

    Where a folder cannot date a file that is read, its last use is when it was written.
    """

    name: str
    size: int
    used: float


class Folder(Protocol):
    """Files by name. Every method raises OSError if the disk or the network fails.

    Others may write to the folder: whatever they put there must not make a method hang or fill the memory.
    """

    def files(self, prefix: str = "") -> Iterator[File]:
        """All finished files whose names begin with `prefix`; none if there is no folder. Changes nothing."""

    def unfinished(self) -> Iterator[File]:
        """All files that a process is writing, or was writing when it died."""

    def read(self, name: str, largest: int) -> bytes:
        """The file's bytes. Raises FileNotFoundError; OSError if it has more than `largest` bytes."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file; no reader ever sees part of it."""

    def remove(self, name: str) -> None:
        """Delete the file, if it is there."""

    def touch(self, name: str) -> None:
        """Date the file now, if the folder can."""

    def now(self) -> float:
        """The time on the clock that dates the files, which may be another machine's. Writes a file to find out."""


class LocalFolder:
    """A folder of the file system, created by the first write. Uses no locks, so it may be on NFS.

    A file is written under a unique name, then renamed: until then readers find the old file or none.
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
        # Without a time argument the file server's clock counts. Windows cannot date a link itself.
        os.utime(self.path / name, follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def now(self) -> float:
        with new_file(self.path) as (file, _):
            return os.fstat(file.fileno()).st_mtime

    def _scan(self, matches: Callable[[str], bool]) -> Iterator[File]:
        try:
            found = os.scandir(self.path)
        except FileNotFoundError:
            return
        with found:
            for item in found:
                # By name first: on a file server each stat costs a round trip.
                if not matches(item.name):
                    continue
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError:  # another process has pruned it
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield File(item.name, status.st_size, status.st_mtime)

"""The store's folder, on a local or a shared disk."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..core.atomic_file import UNFINISHED, UNFINISHED_NAME, open_file, write_whole

LEFTOVER = 3600.0
"""Seconds after which an unfinished file counts as abandoned."""

_SAVED = re.compile(r"[0-9a-f]{1,64}-[0-9a-f]{12}\.graph")
"""Names of saved graphs."""


class File(NamedTuple):
    """A file's name, size in bytes, and last use in seconds since 1970."""

    name: str
    size: int
    used: float


class Folder:
    """Files by name, in a folder that is created by the first write. Uses no locks, so it may be on NFS.

    A file is written under a unique name, then renamed: until then readers find the old file or none. Every method
    raises OSError if the disk or the network fails.
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def files(self, prefix: str = "") -> Iterator[File]:
        """All finished files whose names begin with `prefix`; none if there is no folder. Changes nothing."""
        return self._scan(lambda name: name.startswith(prefix) and not name.endswith(UNFINISHED))

    def open(self, name: str) -> BinaryIO:
        """The file, open for reading. Raises FileNotFoundError; OSError also for a pipe and the like."""
        return open_file(self.path / name)

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file; no reader ever sees part of it."""
        write_whole(self.path / name, data)

    def remove(self, name: str) -> bool:
        """Delete the file, if it is there; whether it is gone, which it is not where somebody keeps it open."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink(missing_ok=True)
            return True
        return False

    def touch(self, name: str) -> None:
        """Date the file now."""
        # Without a time argument the file server's clock counts. Windows cannot date a link itself.
        os.utime(self.path / name, follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def prune(self, max_bytes: int) -> int:
        """Delete the least recently used graphs until the rest fits; the number deleted.

        Also deletes what killed processes left behind. Other programs' files stay, and what cannot be deleted.
        """
        now = time.time()
        for file in self._scan(lambda name: UNFINISHED_NAME.fullmatch(name) is not None):
            if now - file.used > LEFTOVER:  # another process may be about to finish the others
                self.remove(file.name)
        saved = [file for file in self.files() if _SAVED.fullmatch(file.name)]
        left, deleted = sum(file.size for file in saved), 0
        for file in sorted(saved, key=lambda file: file.used):
            if left <= max_bytes:
                break
            if self.remove(file.name):
                left -= file.size
                deleted += 1
        return deleted

    def _scan(self, matches: Callable[[str], bool]) -> Iterator[File]:
        try:
            found = os.scandir(self.path)
        except FileNotFoundError:
            return
        with found as items:
            # By name first: on a file server each stat costs a round trip.
            for item in (item for item in items if matches(item.name)):
                with contextlib.suppress(OSError):  # another process has pruned it
                    status = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield File(item.name, status.st_size, status.st_mtime)

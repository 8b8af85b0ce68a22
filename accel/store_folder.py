"""Where the store's files lie: a folder of this machine or of a shared disk."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

LEFTOVER = 3600.0
"""Seconds after which an unfinished file is nobody's any more."""


class File(NamedTuple):
    """A file's name in its folder, its bytes, and when it was last used, in seconds since 1970."""

    name: str
    size: int
    used: float


class Folder(Protocol):
    """Files by name. Everything raises OSError when the disk, or the network before it, fails."""

    def files(self) -> Iterator[File]:
        """All finished files; none where the folder does not exist yet."""

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError where there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file. Nobody ever sees a part of it."""

    def remove(self, name: str) -> None:
        """Delete the file, if it is there."""

    def touch(self, name: str) -> None:
        """Note that the file was used just now, where that can be noted."""


class LocalFolder:
    """A folder of the file system, made at the first write. Needs no locks, so it may be on NFS.

    A file is written under a name of its own and then renamed; who reads meanwhile finds the old one or none.
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def files(self) -> Iterator[File]:
        try:
            found = os.scandir(self.path)
        except FileNotFoundError:
            return
        with found:
            for item in found:
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process pruned it
                    continue
                if item.name.endswith(".tmp"):
                    if time.time() - status.st_mtime > LEFTOVER:
                        self.remove(item.name)
                elif item.is_file(follow_symlinks=False):
                    yield File(item.name, status.st_size, status.st_mtime)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / f"{secrets.token_hex(8)}.tmp"
        try:
            with open(unfinished, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # or a power cut may leave the name without the bytes
            os.replace(unfinished, self.path / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        os.utime(self.path / name)

"""Where the store of this machine is: a home given by its host, and what the environment or its settings say instead.

The environment wins. No setting is one of ComfyUI's own: those any page or request may change, and the server
would then write where somebody else wants it to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from . import settings
from .folder import File, Folder, LocalFolder

VARIABLE = "ACCEL_STORE"
LIMIT_VARIABLE = "ACCEL_STORE_MB"
OFF = "off"
DEFAULT_MEGABYTES = 2048


def folder(home: Path | None) -> Folder | None:
    """The folder of the saved graphs: what ACCEL_STORE names, else what the home says. None: nothing is to be kept.

    ACCEL_STORE: a folder, an address such as s3://bucket/graphs (needs the package fsspec), or "off".
    Touches no disk; a home's settings are read when the folder is used first.

    Raises:
        OSError: ACCEL_STORE is no address.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() == OFF:
        return None
    if named:
        return at(named)
    return HomeFolder(home) if home is not None else None


def at(named: str) -> Folder:
    """The folder that a person names by a path or an address. Touches no disk.

    Raises:
        OSError: it is no address.
    """
    if named.startswith("file:"):
        try:
            address = urlsplit(named)
        except ValueError as error:
            raise OSError(f"{named} is no address: {error}") from None
        if address.netloc in ("", "localhost"):  # fsspec would show files that are half written
            return LocalFolder(Path(url2pathname(address.path)))
    if "://" in named:
        from .remote import RemoteFolder

        return RemoteFolder(named)
    return LocalFolder(Path(os.path.expanduser(named)))


def secret(home: Path | None) -> Path | None:
    """The file with this installation's secret: in its home, never where the graphs have been moved to.

    A folder that others may write must not be able to bring its own secret.
    """
    return None if home is None else home / "secret"


def max_bytes(home: Path | None) -> int:
    """What the folder may hold: ACCEL_STORE_MB, where that is a number, else what the home's settings say.

    Raises:
        OSError: the settings cannot be read.
    """
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if given.isdecimal():
        return int(given) << 20
    limit = None if home is None else settings.read(home).max_mb
    return (DEFAULT_MEGABYTES if limit is None else limit) << 20


class HomeFolder:
    """The folder that a home's settings name, else `graphs` in it. Which one is read at the first use, once."""

    def __init__(self, home: Path):
        self._home = home
        self._found: Folder | None = None

    def __str__(self) -> str:
        try:
            return str(self._folder())
        except OSError as error:
            return str(error)

    def files(self, prefix: str = "") -> Iterator[File]:
        return self._folder().files(prefix)

    def unfinished(self) -> Iterator[File]:
        return self._folder().unfinished()

    def read(self, name: str, largest: int) -> bytes:
        return self._folder().read(name, largest)

    def write(self, name: str, data: bytes) -> None:
        self._folder().write(name, data)

    def remove(self, name: str) -> None:
        self._folder().remove(name)

    def touch(self, name: str) -> None:
        self._folder().touch(name)

    def now(self) -> float:
        return self._folder().now()

    def _folder(self) -> Folder:
        if self._found is None:
            named = settings.read(self._home).folder
            self._found = LocalFolder(self._home / "graphs") if named is None else at(named)
        return self._found

"""Where an installation keeps its saved graphs: in a home that its host names, or where the environment says.

The environment wins. No setting of the host's own page decides it: any page or request may change those, and the
server would then write where somebody else wants it to.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..core import settings
from ..core.events import log
from .folder import Folder, LocalFolder

VARIABLE = "ACCEL_STORE"
LIMIT_VARIABLE = "ACCEL_STORE_MB"
OFF = "off"

PERSONAL_NAME = "comfy-accel"
"""Of the home for scripts, in the folder where programs keep what they can make again."""


def folder(home: Path | None) -> Folder | None:
    """The folder of the saved graphs: the one that ACCEL_STORE names, else `graphs` in the home; None saves nothing.

    ACCEL_STORE: a folder, an address such as s3://bucket/graphs (needs the package fsspec), or "off".
    Touches no disk.

    Raises OSError: ACCEL_STORE is no address.
    """
    if is_off():
        return None
    named = _named()
    if named:
        return at(named)
    return LocalFolder(home / "graphs") if home is not None else None


def is_off() -> bool:
    """Whether ACCEL_STORE says that nothing is kept."""
    return _named().lower() == OFF


def _named() -> str:
    return os.environ.get(VARIABLE, "").strip().strip('"')  # Windows' `set` keeps the quotes


def at(named: str) -> Folder:
    """The folder at a path or an address. Touches no disk. Raises OSError: it is no address."""
    if named.startswith("file:"):
        try:
            address = urlsplit(named)
        except ValueError as error:
            raise OSError(f"{named} is not an address: {error}") from None
        if address.netloc in ("", "localhost"):  # fsspec would show files that are half written
            return LocalFolder(Path(url2pathname(address.path)))
    if "://" in named:
        from .remote import RemoteFolder

        return RemoteFolder(named)
    return LocalFolder(Path(os.path.expanduser(named)))


def secret(home: Path | None) -> Path | None:
    """The file with this installation's secret: in its home, wherever the graphs are.

    A folder that others may write must not be able to bring its own secret.
    """
    return None if home is None else home / "secret"


def max_bytes(home: Path | None) -> int:
    """What the folder may hold: ACCEL_STORE_MB, where that is a number, else what the home's settings say.

    Raises OSError: the settings cannot be read.
    """
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if given.isdecimal():
        return int(given) << 20
    if given:
        _warn_once(f"{LIMIT_VARIABLE} is {given!r}, which is no whole number of MB, and counts as unset.")
    return (settings.DEFAULT_STORE_MB if home is None else settings.read(home).store_mb) << 20


@functools.lru_cache(maxsize=4)
def _warn_once(sentence: str) -> None:
    log.warning(sentence)


def personal_home() -> Path | None:
    """The home for scripts, which may not exist yet; None for an account without a home folder."""
    if sys.platform == "win32":
        given, below = os.environ.get("LOCALAPPDATA"), ("AppData", "Local")
    elif sys.platform == "darwin":
        given, below = None, ("Library", "Caches")
    else:
        given, below = os.environ.get("XDG_CACHE_HOME"), (".cache",)
    if given and os.path.isabs(given):
        return Path(given) / PERSONAL_NAME
    try:
        return Path.home().joinpath(*below, PERSONAL_NAME)
    except RuntimeError:
        return None

"""Where saved graphs are: in the installation's home, unless the environment names another place.

The host's settings page cannot: any web page or request may change its settings, and could have the server write
wherever it likes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

from ..core import settings
from ..core.events import log
from .folder import Folder

VARIABLE = "ACCEL_STORE"
LIMIT_VARIABLE = "ACCEL_STORE_MB"
OFF = "off"

PERSONAL_NAME = "comfy-accel"
"""Name of the home for scripts, in the system's folder for caches."""


def folder(home: Path | None) -> Folder | None:
    """The folder that ACCEL_STORE names, else `graphs` in the home; None if nothing is to be saved. Touches no disk.

    ACCEL_STORE: a folder, which several machines may share, or "off". Whoever can write to it can run code here.

    Raises OSError: it is no folder's name.
    """
    if is_off():
        return None
    if named := _read_variable():
        if "://" in named:
            raise OSError(f"{VARIABLE} is {named}, and only a folder can be used")
        return Folder(Path(os.path.expanduser(named)))
    return Folder(home / "graphs") if home is not None else None


def is_off() -> bool:
    """Whether ACCEL_STORE turns the store off."""
    return _read_variable().lower() == OFF


def _read_variable() -> str:
    return os.environ.get(VARIABLE, "").strip().strip('"')  # Windows' `set` keeps the quotes


def max_bytes(home: Path | None) -> int:
    """The folder's limit: ACCEL_STORE_MB if that is a whole number, else the home's setting.

    Raises OSError: the settings cannot be read.
    """
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if given.isdecimal():
        return int(given) << 20
    if given:
        _warn_once(f"{LIMIT_VARIABLE} is {given!r}, which is no whole number of MB, and counts as unset.")
    return (settings.DEFAULT_STORE_MB if home is None else settings.read(home).store_mb) << 20


def warn_of_others(folder: Folder) -> None:
    """Say so, once, where other people than this one may write to the folder."""
    with contextlib.suppress(OSError):
        found = folder.path.stat()
        if os.name != "nt" and (found.st_mode & 0o002 or os.getuid() not in (0, found.st_uid) and found.st_uid):
            _warn_once(f"Others may write to {folder}, and graphs there run as code: name another in {VARIABLE}.")


@functools.lru_cache(maxsize=4)
def _warn_once(sentence: str) -> None:
    log.warning(sentence)


def personal_home() -> Path | None:
    """The home for scripts, which may not exist yet; None if the account has no home folder."""
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

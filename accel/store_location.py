"""Where the store of this machine is: a folder given by its host, and what the environment says instead."""

from __future__ import annotations

import os
from pathlib import Path

from .store_folder import Folder, LocalFolder

VARIABLE = "ACCEL_STORE"
LIMIT_VARIABLE = "ACCEL_STORE_MB"
OFF = "off"
DEFAULT_MEGABYTES = 2048


def folder(home: Path | None) -> Folder | None:
    """The folder of the saved graphs: what ACCEL_STORE names, else `graphs` in `home`. None: nothing is to be kept.

    ACCEL_STORE: a folder, an address such as s3://bucket/graphs (needs the package fsspec), or "off".
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() == OFF:
        return None
    if "://" in named:
        from .store_remote import RemoteFolder

        return RemoteFolder(named)
    if named:
        return LocalFolder(Path(named).expanduser())
    return LocalFolder(home / "graphs") if home is not None else None


def secret(home: Path | None) -> Path:
    """The file with this installation's secret: beside the graphs, never where ACCEL_STORE has moved them to.

    A folder that others may write must not be able to bring its own secret.
    """
    return (home if home is not None else Path.home() / ".config" / "accel") / "secret"


def max_bytes() -> int:
    """What the folder may hold, from ACCEL_STORE_MB; a text that is no number counts as not given."""
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    return (int(given) if given.isdecimal() else DEFAULT_MEGABYTES) << 20

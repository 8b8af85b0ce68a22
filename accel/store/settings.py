"""What a person at the machine has set of the store: a small JSON file in its home, beside the secret."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from ..core.atomic_file import opened, write_whole

NAME = "settings.json"
_LARGEST = 1 << 16


class Settings(NamedTuple):
    """folder: of the graphs, absolute, or an fsspec address. max_mb: what it may hold. None: not set."""

    folder: str | None = None
    max_mb: int | None = None


def read(home: Path) -> Settings:
    """The settings of a home; all unset where there is no file.

    Raises:
        OSError: the file cannot be read or understood. A guess instead could fill a disk that was to be spared.
    """
    try:
        with opened(home / NAME, links=True) as (file, _):
            text = file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    try:
        fields = json.loads(text)
        settings = Settings(fields.get("folder"), fields.get("max_mb"))
        folder, limit = settings
        if folder is not None and not (isinstance(folder, str) and ("://" in folder or os.path.isabs(folder))):
            raise ValueError
        if limit is not None and not (type(limit) is int and limit >= 0):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise OSError(f"{home / NAME} is damaged: mend or delete it") from None
    return settings


def write(home: Path, settings: Settings) -> None:
    """Keep them, readable by their owner alone: an address may hold a password. OSError where it cannot be done."""
    fields = {name: value for name, value in settings._asdict().items() if value is not None}
    write_whole(home / NAME, json.dumps(fields, indent=1).encode(), mode=0o600)

"""What a person has set of the graph cache and of the log: a small JSON file beside the store's settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..cache.graph_cache import DEFAULT_MAX_BYTES, DEFAULT_MAX_ENTRIES
from ..report.log_level import NORMAL, VERBOSITIES
from .atomic_file import opened, write_whole

NAME = "preferences.json"
LARGEST_MB, MOST_ENTRIES = 1 << 20, 1 << 16
_LARGEST_FILE = 1 << 16


@dataclass(frozen=True)
class Preferences:
    """max_mb: what compiled graphs may keep in memory, MB. max_entries: how many kinds. verbosity: of our log.

    Raises ValueError, with the valid range, for anything else.
    """

    max_mb: int = DEFAULT_MAX_BYTES >> 20
    max_entries: int = DEFAULT_MAX_ENTRIES
    verbosity: str = NORMAL

    def __post_init__(self) -> None:
        check_number("max_mb", self.max_mb, LARGEST_MB)
        check_number("max_entries", self.max_entries, MOST_ENTRIES)
        if self.verbosity not in VERBOSITIES:
            raise ValueError(f"verbosity must be one of: {', '.join(VERBOSITIES)}.")


def check_number(name: str, value: object, largest: int) -> None:
    """Raises ValueError where the value is no whole number from 0 to `largest`."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{name} must be a whole number from 0 to {largest}.")


def read(home: Path) -> Preferences:
    """The preferences of a home; the defaults where there is no file, and for what it does not name.

    Raises:
        OSError: the file cannot be read or understood.
    """
    try:
        with opened(home / NAME, links=True) as (file, _):
            text = file.read(_LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return Preferences()
    try:
        found = json.loads(text)
        known = {field.name for field in fields(Preferences)}
        return Preferences(**{name: value for name, value in found.items() if name in known})
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise OSError(f"{home / NAME} is damaged: mend or delete it") from None


def write(home: Path, preferences: Preferences) -> None:
    """Keep them; OSError where it cannot be done."""
    write_whole(home / NAME, json.dumps(asdict(preferences), indent=1).encode())

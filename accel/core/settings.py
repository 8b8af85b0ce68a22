"""What a person has set, kept as one small JSON file in the home of an installation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .atomic_file import open_file, write_whole

NAME = "preferences.json"

DEFAULT_MAX_BYTES, DEFAULT_MAX_ENTRIES = 2 << 30, 512
"""Default limits of the graph cache."""

DEFAULT_STORE_MB = 2048
VERBOSITIES = QUIET, NORMAL, DEBUG = ("quiet", "normal", "debug")
CHOICES = ASK, ON, OFF = ("ask", "on", "off")
LARGEST_MB, MOST_ENTRIES = 1 << 20, 1 << 16
_LARGEST_FILE = 1 << 16


@dataclass(frozen=True)
class Settings:
    """Settings of one installation.

    max_mb: memory that compiled graphs may keep, MB. max_entries: kinds of blocks in the graph cache.
    store_mb: disk space for saved graphs, MB; 0 saves nothing more. verbosity: of our log.
    weights_in_place: models whose weights the host would stream are loaded once more, to stay on the device.
    cuda_graphs: whether torch is to allocate so that they can be captured, from the next start on; ask: nobody chose.

    Raises ValueError: a value is invalid; the message has the valid ones.
    """

    max_mb: int = DEFAULT_MAX_BYTES >> 20
    max_entries: int = DEFAULT_MAX_ENTRIES
    store_mb: int = DEFAULT_STORE_MB
    verbosity: str = NORMAL
    weights_in_place: bool = False
    cuda_graphs: str = ASK

    def __post_init__(self) -> None:
        for name, largest in (("max_mb", LARGEST_MB), ("max_entries", MOST_ENTRIES), ("store_mb", LARGEST_MB)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= largest:
                raise ValueError(f"{name} must be a whole number from 0 to {largest}.")
        for name, choices in (("verbosity", VERBOSITIES), ("cuda_graphs", CHOICES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of: {', '.join(choices)}.")
        if type(self.weights_in_place) is not bool:
            raise ValueError("weights_in_place must be true or false.")


def read(home: Path) -> Settings:
    """The settings of a home; the defaults where there is no file, and for what it does not name. Raises OSError: a
    file cannot be read or understood; a guess could fill a disk that was to be spared."""
    file, known = home / NAME, {field.name for field in fields(Settings)}
    try:
        with open_file(file) as settings:
            found = json.loads(settings.read(_LARGEST_FILE))
        return Settings(**{name: value for name, value in found.items() if name in known})
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise OSError(f"{file} is damaged: fix or delete it") from None


def write(home: Path, settings: Settings) -> None:
    """Keep the settings of a home; OSError where that is not possible."""
    write_whole(home / NAME, json.dumps(asdict(settings), indent=1).encode())

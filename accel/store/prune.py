"""Keeps a store's folder within its limit by deleting the least recently used graphs."""

from __future__ import annotations

import contextlib
import math
import re

from . import manifest
from .folder import File, Folder
from .manifest import DATA, MANIFEST

LEFTOVER = 3600.0
"""Seconds after which an unfinished file or half an entry counts as abandoned.

A date further ahead than this was written by a clock that has been set right since.
"""

_ENTRY = re.compile(f"([0-9a-f]+-[0-9a-f]+)({re.escape(MANIFEST)}|{re.escape(DATA)})")
"""Names of an entry's files. A folder named by mistake may hold other programs' JSON."""


def prune(folder: Folder, max_bytes: int) -> int:
    """Delete the least recently used entries until the rest fits; the number deleted.

    Also deletes what killed processes left behind. Other programs' files stay, and what cannot be deleted.

    Raises OSError: the folder cannot be read.
    """
    files = {file.name: file for file in folder.files() if _ENTRY.fullmatch(file.name)}
    halves = [file for name, file in files.items() if _other_half(name) not in files]
    leftovers = [*folder.unfinished(), *halves]
    entries: list[tuple[File, int]] = []
    for name, file in files.items():
        if name.endswith(MANIFEST) and (data := files.get(_other_half(name))):
            entries.append((file, file.size + data.size))
    left = sum(size for _, size in entries)
    try:
        now = folder.now() if leftovers or left > max_bytes else 0.0
    except OSError:  # where nothing can be written, such as on a full disk, all dates count as they are
        now, leftovers = math.inf, []
    for file in leftovers:
        if abs(now - file.used) > LEFTOVER:  # another process may be about to finish the others
            with contextlib.suppress(OSError):
                folder.remove(file.name)
    deleted = 0
    # An entry dated in the future goes first: were it used at all, loading it would have dated it anew.
    for file, size in sorted(entries, key=lambda entry: (entry[0].used <= now + LEFTOVER, entry[0].used)):
        if left <= max_bytes:
            break
        if manifest.remove(folder, file.name.removesuffix(MANIFEST)):
            left -= size
            deleted += 1
    return deleted


def _other_half(name: str) -> str:
    stem, end = _ENTRY.fullmatch(name).groups()
    return stem + (DATA if end == MANIFEST else MANIFEST)

"""Taking a store's graphs to another folder. Their seals stay good: the secret does not move."""

from __future__ import annotations

from collections.abc import Callable

from . import manifest as store_entry
from .folder import Folder
from .manifest import DATA, LARGEST_MANIFEST, MANIFEST, BadEntry


def move(old: Folder, new: Folder, settle: Callable[[], None]) -> int:
    """Copy every whole entry, then settle, then delete what was copied; the number of entries.

    Whatever stops it before it is settled, the old folder has all that it had.
    settle: makes the new folder the store's.

    Raises:
        OSError: a folder cannot be read or the new one not written.
    """
    moved = []
    for file in sorted(old.files(), key=lambda file: file.used):
        if not file.name.endswith(MANIFEST):
            continue
        try:
            text = old.read(file.name, LARGEST_MANIFEST)
            manifest, _ = store_entry.read_manifest(text)
            if manifest.stem + MANIFEST != file.name:
                continue
            data = old.read(manifest.stem + DATA, manifest.size)
            store_entry.check_bytes(manifest, data)
        except (BadEntry, FileNotFoundError):
            continue
        new.write(manifest.stem + DATA, data)
        new.write(manifest.stem + MANIFEST, text)
        moved.append(manifest.stem)
    settle()
    for stem in moved:
        store_entry.remove(old, stem)
    return len(moved)

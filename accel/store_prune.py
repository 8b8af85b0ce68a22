"""Keeping a store's folder within a number of bytes."""

from __future__ import annotations

import time

from .store_entry import DATA, MANIFEST
from .store_folder import LEFTOVER, File, Folder


def prune(folder: Folder, max_bytes: int) -> int:
    """Delete the entries used longest ago until the others fit, and bytes that have lost their manifest.

    Returns the number of entries deleted. Files that are no entry's are left alone.

    Raises:
        OSError: the folder cannot be read, or a file not deleted.
    """
    files = {file.name: file for file in folder.files()}
    entries: list[tuple[File, int]] = []
    for name, file in files.items():
        if name.endswith(MANIFEST):
            data = files.get(name.removesuffix(MANIFEST) + DATA)
            entries.append((file, file.size + (data.size if data else 0)))
        elif name.endswith(DATA) and name.removesuffix(DATA) + MANIFEST not in files:
            # Another process may be about to write the manifest.
            if time.time() - file.used > LEFTOVER:
                folder.remove(name)
    left = sum(size for _, size in entries)
    deleted = 0
    for file, size in sorted(entries, key=lambda entry: entry[0].used):
        if left <= max_bytes:
            break
        folder.remove(file.name)  # first the manifest, so that no reader finds one without bytes
        folder.remove(file.name.removesuffix(MANIFEST) + DATA)
        left -= size
        deleted += 1
    return deleted

"""Saved graphs in one file, to be carried to other machines: a zip of manifests and bytes, without seals.

Whoever imports a bundle seals its graphs with a secret of theirs, and so says that they trust it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from . import store_entry
from .store_entry import DATA, LARGEST_MANIFEST, MANIFEST, BadEntry, Manifest
from .store_folder import Folder
from .store_trust import Seals

LARGEST_DATA = 1 << 30


class Outcome(NamedTuple):
    """What became of one entry: its manifest, or the file's name where there is none to be read; and why it failed."""

    entry: Manifest | str
    reason: str | None = None


def verify(folder: Folder, seals: Seals) -> Iterator[Outcome]:
    """Check every entry of a folder, opening none.

    Raises:
        OSError: the folder cannot be read.
    """
    for entry, manifest, reason, _ in _entries(folder, seals):
        yield Outcome(manifest or entry, reason)


def export(folder: Folder, seals: Seals, file: Path, kinds: Container[str] | None = None) -> list[Outcome]:
    """Write all sound entries, or those of the kinds named, to a new file; the others are told, not exported.

    Raises:
        OSError: the folder cannot be read or the file not written; FileExistsError where there is one.
    """
    outcomes = []
    try:
        with zipfile.ZipFile(file, "x", zipfile.ZIP_STORED) as bundle:
            for entry, manifest, reason, data in _entries(folder, seals):
                if kinds is not None and (manifest is None or manifest.name not in kinds):
                    continue
                if reason is None:
                    bundle.writestr(manifest.stem + MANIFEST, manifest.canonical())
                    bundle.writestr(manifest.stem + DATA, data)
                outcomes.append(Outcome(manifest or entry, reason))
    except FileExistsError:
        raise
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return outcomes


def read(file: Path) -> Iterator[tuple[Manifest, bytes] | Outcome]:
    """The entries of a bundle, their bytes as its manifests say; an `Outcome` for each that is not sound.

    Raises:
        OSError, zipfile.BadZipFile: there is no such file, or it is no bundle.
    """
    with zipfile.ZipFile(file) as bundle:
        names = set(bundle.namelist())
        for name in sorted(names):
            if not name.endswith(MANIFEST):
                continue
            try:
                text = _member(bundle, name, LARGEST_MANIFEST)
                manifest, _ = store_entry.read_manifest(json.dumps({**_object(text), "seal": None}).encode())
                if name != manifest.stem + MANIFEST:
                    raise BadEntry("it is not what its name says")
                data = _member(bundle, manifest.stem + DATA, LARGEST_DATA)
                store_entry.check_bytes(manifest, data)
            except (BadEntry, KeyError, zipfile.BadZipFile) as bad:
                yield Outcome(name, str(bad) if isinstance(bad, BadEntry) else "a part of it is missing or damaged")
            else:
                yield manifest, data


def import_trusted(file: Path, folder: Folder, seals: Seals) -> list[Outcome]:
    """Seal a bundle's entries with our secret and keep them: from now on they are loaded, which runs them.

    Call it only where a person at this machine has said that they trust the bundle.

    Raises:
        OSError, zipfile.BadZipFile: it cannot be read, or the folder not written.
    """
    outcomes = []
    for item in read(file):
        if not isinstance(item, Outcome):
            manifest, data = item
            store_entry.write(folder, seals, manifest, data)
            item = Outcome(manifest)
        outcomes.append(item)
    return outcomes


def _entries(folder: Folder, seals: Seals) -> Iterator[tuple[str, Manifest | None, str | None, bytes]]:
    """(file, manifest, what is wrong, bytes) of each entry of a folder."""
    for name in sorted(file.name for file in folder.files() if file.name.endswith(MANIFEST)):
        manifest, data, reason = None, b"", None
        try:
            manifest, seal = store_entry.read_manifest(folder.read(name))
            if manifest.stem + MANIFEST != name:
                raise BadEntry("it is not what its name says")
            data = folder.read(manifest.stem + DATA)
            store_entry.check(seals, manifest, seal, data)
        except BadEntry as bad:
            reason = str(bad)
        except FileNotFoundError:
            reason = "a part of it is missing"
        yield name, manifest, reason, data


def _object(text: bytes) -> dict:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise BadEntry("its manifest is damaged")
    return fields


def _member(bundle: zipfile.ZipFile, name: str, largest: int) -> bytes:
    """A file of the bundle; its size is checked before it is unpacked, for a small zip may hold a huge file."""
    if bundle.getinfo(name).file_size > largest:
        raise BadEntry(f"it is larger than {largest} bytes")
    with bundle.open(name) as member:
        return member.read(largest + 1)

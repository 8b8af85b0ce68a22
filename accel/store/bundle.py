"""Saved graphs in one file for other machines: a zip of manifests and bytes, without seals.

Whoever imports a bundle seals its graphs with their own secret, and thereby says that they trust it.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..core.atomic_file import give_name, new_file, opened
from . import manifest as entries
from .folder import Folder
from .manifest import DATA, LARGEST_DATA, LARGEST_MANIFEST, MANIFEST, BadEntry, Manifest, printable
from .signing import Seals

MOST_ENTRIES = 10_000
"""Graphs of one bundle; a model has dozens."""

LARGEST_DIRECTORY = 8 << 20
"""Bytes of a bundle's table of contents; a graph takes 300 of them."""

_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError) + (
    *(KeyError, IndexError, ValueError),
)
"""What zipfile raises for a file that is no zip, or a damaged one. NotImplementedError is a RuntimeError."""


class BadBundle(Exception):
    """The file is no bundle, or must not be unpacked; the message says why."""


class Outcome(NamedTuple):
    """What became of one entry: its manifest, or the file's name where that cannot be read; and why it failed."""

    entry: Manifest | str
    reason: str | None = None


def verify(folder: Folder, seals: Seals) -> Iterator[Outcome]:
    """Check every entry of a folder without opening any. Raises OSError: the folder cannot be read."""
    for entry, manifest, reason, _ in _entries(folder, seals):
        yield Outcome(manifest or entry, reason)


def export(folder: Folder, seals: Seals, file: Path, wanted: Callable[[Manifest], bool] | None = None) -> list[Outcome]:
    """Write all sound entries, or those that are wanted, to a new file; the outcomes name the others too.

    The file gets its name only once it is complete.

    Raises OSError: the folder cannot be read, or the file not written; FileExistsError if it exists.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists, and is not replaced")
    outcomes = []
    with new_file(file.absolute().parent) as (unfinished, path):
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as bundle:
            for entry, manifest, reason, data in _entries(folder, seals):
                if wanted is not None and (manifest is None or not wanted(manifest)):
                    continue
                if reason is None:
                    bundle.writestr(manifest.stem + MANIFEST, manifest.canonical())
                    bundle.writestr(manifest.stem + DATA, data)
                outcomes.append(Outcome(manifest or entry, reason))
        unfinished.close()
        give_name(path, file)
    return outcomes


def read(file: Path, largest: int | None = None) -> Iterator[tuple[Manifest, bytes] | Outcome]:
    """The entries of a bundle, each checked against its manifest; an `Outcome` for each that is not sound.

    largest: size of all entries together, bytes; None for no limit.

    Raises OSError: the file cannot be read. BadBundle.
    """
    with opened(file, links=True) as (plain, status):
        size = status.st_size
        file = _Bounded(plain, LARGEST_DIRECTORY)
        try:
            bundle = zipfile.ZipFile(file)
        except _DAMAGE:
            raise BadBundle("it is not a bundle") from None
        file.most = LARGEST_DATA + 1
        with bundle:
            members = {member.filename: member for member in bundle.infolist()}
            _check_members(list(members.values()), size, largest)
            for name in sorted(members):
                try:
                    if name.endswith(MANIFEST):
                        yield _entry(bundle, members, name)
                    elif name.removesuffix(DATA) + MANIFEST not in members:
                        raise BadEntry("it belongs to no graph")
                except BadEntry as bad:
                    yield Outcome(printable(name), str(bad))


class _Bounded:
    """A file that gives `most` bytes at a time: what a damaged zip asks for may be any size."""

    def __init__(self, file: BinaryIO, most: int):
        self._file, self.most = file, most
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size if 0 <= size <= self.most else self.most + 1)
        if len(data) > self.most:
            raise zipfile.BadZipFile("a part of it is too large")
        return data


def import_trusted(file: Path, folder: Folder, seals: Seals, largest: int | None = None) -> list[Outcome]:
    """Seal a bundle's entries with our secret and save them: from now on they are loaded, which runs their code.

    Call it only when a person at this machine has said that they trust the bundle.

    Raises OSError: the bundle cannot be read, or the folder not written. BadBundle.
    """
    outcomes = []
    for item in read(file, largest):
        if not isinstance(item, Outcome):
            manifest, data = item
            entries.write(folder, seals, manifest, data)
            item = Outcome(manifest)
        outcomes.append(item)
    return outcomes


def _entries(folder: Folder, seals: Seals) -> Iterator[tuple[str, Manifest | None, str | None, bytes]]:
    """(file, manifest, what is wrong, bytes) of each entry of a folder. One that cannot be read stops no other."""
    for name in sorted(file.name for file in folder.files() if file.name.endswith(MANIFEST)):
        manifest, data, reason = None, b"", None
        try:
            manifest, seal = entries.read(folder, name.removesuffix(MANIFEST))
            entries.check_seal(seals, manifest, seal)
            data = entries.read_data(folder, manifest)
        except BadEntry as bad:
            reason = str(bad)
        except OSError as error:
            reason = printable(f"it cannot be read: {error}")
        yield printable(name), manifest, reason, data


def _check_members(members: list[zipfile.ZipInfo], size: int, largest: int | None) -> None:
    """Refuse what would unpack to more than the file, as a zip bomb does, or to more than may be kept."""
    if len(members) > 2 * MOST_ENTRIES:
        raise BadBundle(f"it has {len(members)} parts, a bundle has {2 * MOST_ENTRIES} at most")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise BadBundle("it is compressed, which no bundle is")
    total = sum(member.file_size for member in members)
    if total > size:
        raise BadBundle(f"its parts say that they have {total} bytes, and the file has {size}")
    if largest is not None and total > largest:
        raise BadBundle(f"it has {total >> 20} MB, and the store may have {largest >> 20}: raise its limit first")


def _entry(bundle: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str) -> tuple[Manifest, bytes]:
    manifest, _ = entries.parse(_member(bundle, members, name, LARGEST_MANIFEST))
    if name != manifest.stem + MANIFEST:
        raise BadEntry("it is not what its name says")
    data = _member(bundle, members, manifest.stem + DATA, LARGEST_DATA)
    entries.check_bytes(manifest, data)
    return manifest, data


def _member(bundle: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, largest: int) -> bytes:
    """A file of the bundle; its size is checked before the file is read."""
    try:
        if members[name].file_size > largest:
            raise BadEntry(f"it is larger than {largest} bytes")
        with bundle.open(members[name]) as member:
            return member.read(largest + 1)
    except _DAMAGE:
        raise BadEntry("a part of it is missing or damaged") from None

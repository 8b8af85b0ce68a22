"""Saved graphs in one file for other machines: each graph's manifest, then its bytes, without seals.

Whoever imports a bundle seals its graphs with their own secret, and thereby says that they trust it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..core.atomic_file import give_name, new_file, opened
from . import manifest as entries
from .folder import Folder
from .manifest import LARGEST_MANIFEST, MANIFEST, BadEntry, Manifest, printable
from .signing import Seals

HEAD, END = b"comfy-accel bundle 2\n", b"end\n"


class BadBundle(Exception):
    """The file is no bundle, or must not be unpacked; the message says why."""


class Outcome(NamedTuple):
    """What became of one entry: its manifest, or a name where that cannot be read; and why it failed."""

    entry: Manifest | str
    reason: str | None = None


def verify(folder: Folder, seals: Seals) -> Iterator[Outcome]:
    """The outcome of checking each entry of a folder; opens none. Raises OSError: the folder cannot be read."""
    for entry, manifest, reason, _ in _entries(folder, seals):
        yield Outcome(manifest or entry, reason)


def export(folder: Folder, seals: Seals, file: Path) -> list[Outcome]:
    """Pack a bundle into a new file, which gets its name only once it is complete.

    Raises OSError: the folder cannot be read, or the file not written; FileExistsError if it exists.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists, and is not replaced")
    with new_file(file.absolute().parent) as (unfinished, path):
        outcomes = pack(folder, seals, unfinished)
        unfinished.close()
        give_name(path, file)
    return outcomes


def pack(
    folder: Folder, seals: Seals, file: BinaryIO, wanted: Callable[[Manifest], bool] | None = None
) -> list[Outcome]:
    """Write the sound entries, or those wanted, as a bundle; outcomes of all, written or not.

    Raises OSError: the folder cannot be read.
    """
    outcomes = []
    file.write(HEAD)
    for entry, manifest, reason, data in _entries(folder, seals):
        if wanted is not None and (manifest is None or not wanted(manifest)):
            continue
        if reason is None:
            text = manifest.canonical()
            file.writelines((_checksum(text), text, b"\n", data))
        outcomes.append(Outcome(manifest or entry, reason))
    file.write(END)
    return outcomes


def read(file: Path, largest: int | None = None) -> Iterator[tuple[Manifest, bytes] | Outcome]:
    """The entries of a bundle file, as from `unpack`. largest: bytes of the file; None for no limit.

    Raises OSError: the file cannot be read. BadBundle.
    """
    with opened(file, links=True) as (plain, status):
        if largest is not None and status.st_size > largest:
            size, most = status.st_size >> 20, largest >> 20
            raise BadBundle(f"it has {size} MB, and the store may have {most}: raise its limit first")
        yield from unpack(plain)


def unpack(file: BinaryIO) -> Iterator[tuple[Manifest, bytes] | Outcome]:
    """The sound entries of a bundle, and an `Outcome` for each that is not.

    A damaged manifest is the last: where the next begins is unknown. Raises BadBundle: it is no bundle.
    """
    if file.read(len(HEAD)) != HEAD:
        raise BadBundle("it is not a bundle")
    count = 0
    while (line := file.readline(len(_checksum(b"")) + LARGEST_MANIFEST + 1)) != END:
        count += 1
        try:
            text = line.partition(b" ")[2].removesuffix(b"\n")
            if line != _checksum(text) + text + b"\n":
                raise BadEntry("it is damaged, and all that follows" if line else "the file ends too early")
            manifest, _ = entries.parse(text)
        except BadEntry as bad:
            yield Outcome(f"graph {count}", str(bad))
            return
        data = file.read(manifest.size)
        try:
            entries.check_bytes(manifest, data)
        except BadEntry as bad:
            yield Outcome(manifest, str(bad))
        else:
            yield manifest, data


def take(found: Iterable[tuple[Manifest, bytes] | Outcome], folder: Folder, seals: Seals) -> list[Outcome]:
    """Seal a bundle's entries with our secret and save them: from now on they are loaded, which runs their code.

    Call it only when a person at this machine has said that they trust the bundle.

    Raises OSError: the bundle cannot be read, or the folder not written. BadBundle.
    """
    outcomes = []
    for item in found:
        if not isinstance(item, Outcome):
            manifest, data = item
            entries.write(folder, seals, manifest, data)
            item = Outcome(manifest)
        outcomes.append(item)
    return outcomes


def _checksum(text: bytes) -> bytes:
    """What stands before a manifest, against damage: anybody can make it."""
    return hashlib.sha256(text).hexdigest().encode() + b" "


def _entries(folder: Folder, seals: Seals) -> Iterator[tuple[str, Manifest | None, str | None, bytes]]:
    """(file, manifest, what is wrong, bytes) of each entry of a folder, readable or not."""
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

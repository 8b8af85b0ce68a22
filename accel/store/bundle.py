"""Saved graphs in one file for other machines: their files one after another.

Checksums find damage. They say nothing of who made the bundle, whose graphs are code: a person has to trust it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..core.atomic_file import new_file, open_file
from . import manifest as entries
from .folder import Folder
from .manifest import GRAPH, LARGEST_MANIFEST, BadEntry, Manifest, printable

HEAD, END = b"comfy-accel bundle 3\n", b"end\n"


class BadBundle(Exception):
    """The file is no bundle, or must not be unpacked; the message says why."""


class Outcome(NamedTuple):
    """What became of one graph: its manifest, or a name where that cannot be read; and why it failed."""

    entry: Manifest | str
    reason: str | None = None


def export(folder: Folder, file: Path) -> list[Outcome]:
    """Pack the sound graphs into a new file, which gets its name only once it is complete; outcomes of all.

    Raises OSError: the folder cannot be read, or the file not written; FileExistsError if it exists.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists, and is not replaced")
    outcomes = []
    with new_file(file.absolute().parent) as (unfinished, path):
        unfinished.write(HEAD)
        for item in _graphs(folder):
            if not isinstance(item, Outcome):
                manifest, data = item
                unfinished.writelines((manifest.line(), data))
                item = Outcome(manifest)
            outcomes.append(item)
        unfinished.write(END)
        unfinished.close()
        path.rename(file)
    return outcomes


def read(file: Path, largest: int | None = None) -> Iterator[tuple[Manifest, bytes] | Outcome]:
    """The sound graphs of a bundle file, and an `Outcome` for each that is not. largest: bytes of the file, if limited.

    A damaged manifest is the last: where the next begins is unknown.

    Raises OSError: the file cannot be read. BadBundle: it is no bundle, or too large.
    """
    with open_file(file) as bundle:
        size, count = file.stat().st_size, 0
        if largest is not None and size > largest:
            raise BadBundle(f"it has {size >> 20} MB, and the store may have {largest >> 20}: raise its limit first")
        if bundle.read(len(HEAD)) != HEAD:
            raise BadBundle("it is not a bundle")
        while (line := bundle.readline(LARGEST_MANIFEST)) != END:
            count += 1
            try:
                manifest = entries.parse(line)
            except BadEntry as bad:
                yield Outcome(f"graph {count}", f"{bad}, and all that follows" if line else "the file ends too early")
                return
            try:
                yield manifest, entries.read_data(bundle, manifest)
            except BadEntry as bad:
                yield Outcome(manifest, str(bad))


def take(found: Iterable[tuple[Manifest, bytes] | Outcome], folder: Folder) -> list[Outcome]:
    """Save a bundle's graphs: from now on they are loaded, which runs their code.

    Call it only when a person at this machine has said that they trust the bundle.

    Raises OSError: the bundle cannot be read, or the folder not written. BadBundle.
    """
    outcomes = []
    for item in found:
        if not isinstance(item, Outcome):
            manifest, data = item
            entries.write(folder, manifest, data)
            item = Outcome(manifest)
        outcomes.append(item)
    return outcomes


def _graphs(folder: Folder) -> Iterator[tuple[Manifest, bytes] | Outcome]:
    """Each graph of a folder, and an `Outcome` for each that is not sound."""
    for name in sorted(file.name for file in folder.files() if file.name.endswith(GRAPH)):
        try:
            yield entries.read_graph(folder, name.removesuffix(GRAPH))
        except BadEntry as bad:
            yield Outcome(printable(name), str(bad))
        except OSError as error:
            yield Outcome(printable(name), printable(f"it cannot be read: {error}"))

"""A saved graph: a file of one line of JSON that describes it, its manifest, and then its bytes.

The line begins with a checksum of its own, and has that of the bytes in it, so that whatever was cut off or changed by
accident is noticed. Neither says who made the file, and its bytes are code, which runs once the graph is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from .folder import Folder

FORMAT = 5
GRAPH = ".graph"
"""End of the files' names."""

LARGEST_MANIFEST = 1 << 20


class BadEntry(Exception):
    """The graph must not be used; the message says why, in text that is safe for a terminal.

    level: of the log line. Most reasons are nobody's fault: another torch, another machine's graphs.
    """

    def __init__(self, reason: str, level: int = logging.DEBUG):
        super().__init__(reason)
        self.level = level


@dataclass(frozen=True)
class Manifest:
    """What is known of a saved graph without opening it.

    key: of its graph (`key.key_digest`). name: of its kind, for people. environment: where it is valid.
    facts: `compiled_graph.Facts`, as JSON. size: bytes. sha256: of the bytes, in hexadecimal.
    """

    key: str
    name: str
    environment: dict[str, str]
    facts: dict[str, Any]
    size: int
    sha256: str

    @property
    def stem(self) -> str:
        """The file's name without its end; different bytes have different names."""
        return f"{self.key}-{self.sha256[:12]}"

    def line(self) -> bytes:
        """The file's first line."""
        text = json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True).encode()
        return _checksum(text) + b" " + text + b"\n"


def describe(key: str, name: str, environment: dict[str, str], facts: dict[str, Any], data: bytes) -> Manifest:
    return Manifest(key, name, environment, facts, len(data), hashlib.sha256(data).hexdigest())


def write(folder: Folder, manifest: Manifest, data: bytes) -> None:
    """Save a graph. Raises OSError: the file cannot be written. BadEntry: its first line could not be read again."""
    _parse((line := manifest.line())[:LARGEST_MANIFEST])
    folder.write(manifest.stem + GRAPH, line + data)


def read(folder: Folder, stem: str) -> Manifest:
    """A graph's manifest. Raises OSError: it cannot be read. BadEntry: it is missing, damaged, or another graph's."""
    with _open(folder, stem) as (manifest, _):
        return manifest


def read_graph(folder: Folder, stem: str) -> tuple[Manifest, bytes]:
    """A graph's manifest and bytes. Raises what `read` does; BadEntry also where the bytes are missing or changed."""
    with _open(folder, stem) as (manifest, file):
        data = file.read(manifest.size)
    if len(data) != manifest.size:
        raise BadEntry(f"it has {len(data)} bytes of {manifest.size}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise BadEntry("its bytes have changed since they were saved")
    return manifest, data


def _parse(line: bytes) -> Manifest:
    """The manifest in a file's first line. Raises BadEntry: it is none, or of another format."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    try:
        if not line.endswith(b"\n") or checksum != _checksum(text):
            raise ValueError
        fields = json.loads(text)
        version = fields.pop("format")
        if version == FORMAT:
            return Manifest(**fields)  # as it was written, says the checksum
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadEntry("its manifest is damaged") from None
    raise BadEntry(printable(f"its format is {version}, this pack reads {FORMAT}"))


def printable(text: str) -> str:
    """Somebody else's text made safe for terminals and logs: one line, at most 300 characters."""
    text = " ".join(text[:1200].split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return "".join(character if character.isprintable() else "?" for character in text)


@contextlib.contextmanager
def _open(folder: Folder, stem: str) -> Iterator[tuple[Manifest, BinaryIO]]:
    """A graph's manifest, and its file, which is at the beginning of its bytes."""
    try:
        with folder.open(stem + GRAPH) as file:
            manifest = _parse(file.readline(LARGEST_MANIFEST))
            if manifest.stem != stem:
                raise BadEntry("it is not what its name says")
            yield manifest, file
    except FileNotFoundError:
        raise BadEntry("it is missing") from None


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()

"""One saved graph: its bytes, and beside them a manifest in JSON that says what they are, sealed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from .folder import Folder
from .signing import Seals

FORMAT = 3
MANIFEST, DATA = ".json", ".bin"
LARGEST_MANIFEST = 1 << 20
LARGEST_DATA = 1 << 30

_FIELDS = {"key": str, "name": str, "environment": dict, "facts": dict, "size": int, "sha256": str}
_KEY = re.compile("[0-9a-f]{1,64}")
_SHA256 = re.compile("[0-9a-f]{64}")


class BadEntry(Exception):
    """The entry must not be used; the message says why, in text that may go to a terminal.

    level: at which the log says so. Most reasons are nobody's fault: another torch, another machine's graphs.
    """

    def __init__(self, reason: str, level: int = logging.DEBUG):
        super().__init__(reason)
        self.level = level


@dataclass(frozen=True)
class Manifest:
    """What is known of an artifact without opening it.

    key: of its graph (`store_key.key_digest`). name: of its kind, for people. environment: where it is right.
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
        """The name of both files without its end; different bytes never share one."""
        return f"{self.key}-{self.sha256[:12]}"

    def canonical(self) -> bytes:
        """The same bytes for equal manifests: what a seal is made over."""
        return json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True, separators=(",", ":")).encode()


def describe(key: str, name: str, environment: dict[str, str], facts: dict[str, Any], data: bytes) -> Manifest:
    return Manifest(key, name, environment, facts, len(data), hashlib.sha256(data).hexdigest())


def write(folder: Folder, seals: Seals, manifest: Manifest, data: bytes) -> None:
    """The bytes first: a manifest without bytes is what a reader must never find.

    Raises:
        OSError: it cannot be done. BadEntry: nobody would read it again.
    """
    text = manifest.canonical()
    sealed = json.dumps({**json.loads(text), "seal": seals.make(text)}, indent=1).encode()
    read_manifest(sealed)
    folder.write(manifest.stem + DATA, data)
    folder.write(manifest.stem + MANIFEST, sealed)


def remove(folder: Folder, stem: str) -> bool:
    """Delete an entry, its manifest first; whether that was done. What cannot be deleted stays."""
    with contextlib.suppress(OSError):
        folder.remove(stem + MANIFEST)
        folder.remove(stem + DATA)
        return True
    return False


def read_manifest(text: bytes) -> tuple[Manifest, object]:
    """A manifest and its seal, neither checked: anybody may have written what it says.

    Raises:
        BadEntry: it is not one.
    """
    try:
        if len(text) > LARGEST_MANIFEST:
            raise ValueError
        fields = json.loads(text, parse_constant=_refuse)
        seal, version = fields.pop("seal"), fields.pop("format")
        if type(version) is not int:
            raise ValueError
        if version != FORMAT:
            raise BadEntry(printable(f"its format is {version}, this pack reads {FORMAT}"))
        manifest = Manifest(**fields)
        if not all(type(fields[name]) is kind for name, kind in _FIELDS.items()):
            raise ValueError
        if not (_KEY.fullmatch(manifest.key) and _SHA256.fullmatch(manifest.sha256)):
            raise ValueError
        if not all(type(value) is str for value in manifest.environment.values()) or not _plain(manifest.facts):
            raise ValueError
        if not 0 <= manifest.size <= LARGEST_DATA:
            raise BadEntry(printable(f"it has {manifest.size} bytes, and may have {LARGEST_DATA}"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadEntry("its manifest is damaged") from None
    return manifest, seal


def check_seal(seals: Seals, manifest: Manifest, seal: object) -> None:
    """Raises BadEntry unless what the manifest says was sealed with our secret; that holds its bytes' SHA-256."""
    if not seals.check(seal, manifest.canonical()):
        raise BadEntry("another installation made it, or somebody changed it: it is not opened")


def check_bytes(manifest: Manifest, data: bytes) -> None:
    """Raises BadEntry where these are not the manifest's bytes. Says nothing about who made them."""
    if len(data) != manifest.size:
        raise BadEntry(f"it has {len(data)} bytes of {manifest.size}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise BadEntry("its bytes have changed since they were saved")


def _refuse(constant: str) -> None:
    """Infinity and the like are in no JSON but Python's."""
    raise ValueError(constant)


def _plain(value: Any, depth: int = 4) -> bool:
    """Whether JSON is as shallow as facts are; deep enough, it could be read and yet not written again."""
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or bool(depth) and all(_plain(item, depth - 1) for item in value)


def printable(text: str, longest: int = 300) -> str:
    """Text of anybody's on one line that steers no terminal and fills no log. longest: characters."""
    text = " ".join(text[: 4 * longest].split())
    text = text if len(text) <= longest else text[: longest - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in text)

"""A saved graph: its bytes, and a sealed JSON manifest that describes them."""

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

FORMAT = 4
MANIFEST, DATA = ".json", ".bin"
LARGEST_MANIFEST = 1 << 20
LARGEST_DATA = 1 << 30

_FIELDS = {"key": str, "name": str, "environment": dict, "facts": dict, "size": int, "sha256": str}
_KEY = re.compile("[0-9a-f]{1,64}")
_SHA256 = re.compile("[0-9a-f]{64}")


class BadEntry(Exception):
    """The entry must not be used; the message says why, in text that is safe for a terminal.

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
        """Both files' name without the suffix; different bytes have different names."""
        return f"{self.key}-{self.sha256[:12]}"

    def canonical(self) -> bytes:
        """The bytes that the seal covers; equal manifests have the same."""
        return json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True, separators=(",", ":")).encode()


def describe(key: str, name: str, environment: dict[str, str], facts: dict[str, Any], data: bytes) -> Manifest:
    return Manifest(key, name, environment, facts, len(data), hashlib.sha256(data).hexdigest())


def write(folder: Folder, seals: Seals, manifest: Manifest, data: bytes | None = None) -> None:
    """Save an entry: its bytes first, so that no reader finds a manifest without them; or its manifest alone.

    Raises OSError: a file cannot be written. BadEntry: the manifest could not be read again.
    """
    text = manifest.canonical()
    sealed = json.dumps({**json.loads(text), "seal": seals.make(text)}, indent=1).encode()
    parse(sealed)
    if data is not None:
        folder.write(manifest.stem + DATA, data)
    folder.write(manifest.stem + MANIFEST, sealed)


def remove(folder: Folder, stem: str) -> bool:
    """Delete an entry, its manifest first; whether both files are gone."""
    with contextlib.suppress(OSError):
        folder.remove(stem + MANIFEST)
        folder.remove(stem + DATA)
        return True
    return False


def read(folder: Folder, stem: str) -> tuple[Manifest, object]:
    """An entry's manifest and seal. Anybody may have written them: see `check_seal`.

    Raises OSError: it cannot be read. BadEntry: it is missing, damaged, or another entry's.
    """
    manifest, seal = parse(_read(folder, stem + MANIFEST, LARGEST_MANIFEST))
    if manifest.stem != stem:
        raise BadEntry("it is not what its name says")
    return manifest, seal


def read_data(folder: Folder, manifest: Manifest) -> bytes:
    """An entry's bytes, checked against its manifest.

    Raises OSError: they cannot be read. BadEntry: they are missing or changed.
    """
    data = _read(folder, manifest.stem + DATA, manifest.size)
    check_bytes(manifest, data)
    return data


def parse(text: bytes) -> tuple[Manifest, object]:
    """The manifest in a JSON text, and its seal: None in a bundle. Raises BadEntry: it is no manifest."""
    try:
        if len(text) > LARGEST_MANIFEST:
            raise ValueError
        fields = json.loads(text, parse_constant=_refuse)
        seal, version = fields.pop("seal", None), fields.pop("format")
        if type(version) is not int:
            raise ValueError
        if version != FORMAT:
            raise BadEntry(printable(f"its format is {version}, this pack reads {FORMAT}"))
        manifest = Manifest(**fields)
        if not all(type(fields[name]) is kind for name, kind in _FIELDS.items()):
            raise ValueError
        if not (_KEY.fullmatch(manifest.key) and _SHA256.fullmatch(manifest.sha256)):
            raise ValueError
        if not all(type(value) is str for value in manifest.environment.values()) or not _is_shallow(manifest.facts):
            raise ValueError
        if not 0 <= manifest.size <= LARGEST_DATA:
            raise BadEntry(printable(f"it has {manifest.size} bytes, and may have {LARGEST_DATA}"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadEntry("its manifest is damaged") from None
    return manifest, seal


def check_seal(seals: Seals, manifest: Manifest, seal: object) -> None:
    """Raise BadEntry unless our secret sealed the manifest, and with it the bytes, by their SHA-256."""
    if not seals.check(seal, manifest.canonical()):
        raise BadEntry("another installation made it, or somebody changed it: it is not opened")


def check_bytes(manifest: Manifest, data: bytes) -> None:
    """Raise BadEntry unless these are the bytes that the manifest describes, whoever made both."""
    if len(data) != manifest.size:
        raise BadEntry(f"it has {len(data)} bytes of {manifest.size}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise BadEntry("its bytes have changed since they were saved")


def printable(text: str) -> str:
    """Untrusted text made safe for terminals and logs: one line, at most 300 characters."""
    text = " ".join(text[:1200].split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return "".join(character if character.isprintable() else "?" for character in text)


def _read(folder: Folder, name: str, largest: int) -> bytes:
    try:
        return folder.read(name, largest)
    except FileNotFoundError:
        raise BadEntry("a part of it is missing") from None


def _refuse(constant: str) -> None:
    """Refuse Infinity and NaN, which only Python takes for JSON."""
    raise ValueError(constant)


def _is_shallow(value: Any, depth: int = 5) -> bool:
    """Whether a value is nested no deeper than facts are. Python can read deeper JSON than it can write."""
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or bool(depth) and all(_is_shallow(item, depth - 1) for item in value)

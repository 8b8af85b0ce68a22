"""One saved graph: its bytes, and beside them a manifest in JSON that says what they are, sealed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from .store_folder import Folder
from .store_trust import Seals

FORMAT = 1
MANIFEST, DATA = ".json", ".bin"
LARGEST_MANIFEST = 1 << 20


class BadEntry(Exception):
    """The entry must not be used; the message says why."""


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
    """The bytes first: a manifest without bytes is what a reader must never find. OSError where it cannot be done."""
    sealed = {**json.loads(manifest.canonical()), "seal": seals.make(manifest.canonical(), data)}
    folder.write(manifest.stem + DATA, data)
    folder.write(manifest.stem + MANIFEST, json.dumps(sealed, indent=1).encode())


def read_manifest(text: bytes) -> tuple[Manifest, object]:
    """A manifest and its seal, neither checked against the bytes.

    Raises:
        BadEntry: it is not one.
    """
    try:
        if len(text) > LARGEST_MANIFEST:
            raise ValueError
        fields = json.loads(text)
        seal, version = fields.pop("seal"), fields.pop("format")
        manifest = Manifest(**fields)
        plain = {"key": str, "name": str, "environment": dict, "facts": dict, "size": int, "sha256": str}
        if not all(type(fields[name]) is kind for name, kind in plain.items()):
            raise ValueError
        if not all(set(text) <= set("0123456789abcdef") and text for text in (manifest.key, manifest.sha256)):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadEntry("its manifest is damaged") from None
    if version != FORMAT:
        raise BadEntry(f"its format is {version}, this pack reads {FORMAT}")
    return manifest, seal


def check_bytes(manifest: Manifest, data: bytes) -> None:
    """Raises BadEntry where these are not the manifest's bytes. Says nothing about who made them."""
    if len(data) != manifest.size:
        raise BadEntry(f"it has {len(data)} bytes of {manifest.size}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise BadEntry("its bytes have changed since they were saved")


def check(seals: Seals, manifest: Manifest, seal: object, data: bytes) -> None:
    """Raises BadEntry unless these bytes are the manifest's, and both were sealed with our secret."""
    check_bytes(manifest, data)
    if not seals.check(seal, manifest.canonical(), data):
        raise BadEntry("another installation made it, or somebody changed it: it is not opened")

"""Graphs for other people's machines: signed bundles in a folder or an object store.

Each bundle has a label, a JSON file with an Ed25519 signature. A bundle is opened only if somebody trusted has signed
its label, the label's environment is this machine's, its serial is not below one seen before, and the bundle has the
SHA-256 that it states. The package cryptography makes and checks the signatures.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.atomic_file import write_secret, write_whole
from . import bundle
from .bundle import BadBundle, Outcome
from .folder import Folder
from .manifest import BadEntry, printable
from .signing import Seals, own_file

PREFIX, LABEL, BUNDLE = "graphs-", ".json", ".bundle"
LARGEST_LABEL, LARGEST_LIST = 1 << 16, 1 << 20
LARGEST_BUNDLE = 1 << 30
MOST_LABELS = 1000

_SIGNED = b"comfy-accel graphs, format 2\n"
"""Prefix of all that is signed: a signature made with the same key for another purpose is never valid here."""

_HEX = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@ -]{1,64}")


class CannotPublish(Exception):
    """Publishing, pulling or trusting is refused; the message says why, as part of a sentence."""


class Label(NamedTuple):
    """What a publisher signs.

    environment: where the graphs are valid (`key.environment`). sha256, size: of the bundle. kinds: for people.
    serial: higher at each push for this environment.
    """

    environment: dict[str, str]
    sha256: str
    size: int
    kinds: list[str]
    serial: int

    @property
    def stem(self) -> str:
        """What the names of label and bundle begin with: each environment has one label."""
        text = json.dumps(self.environment, sort_keys=True)
        return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def bundle(self) -> str:
        return f"{self.stem}-{self.sha256[:12]}{BUNDLE}"

    def canonical(self) -> bytes:
        """The bytes that are signed; equal labels have the same."""
        return _SIGNED + json.dumps(self._asdict(), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Pulled:
    """What became of one bundle. graphs: number taken over. label: None if it cannot be believed."""

    file: str
    label: Label | None = None
    publisher: str | None = None
    graphs: int = 0
    reason: str | None = None


def new_key(file: Path) -> str:
    """A new public key, in hexadecimal. The private one is written to a file that only its owner can read.

    Raises FileExistsError, OSError, CannotPublish.
    """
    key = _ed25519().Ed25519PrivateKey.generate()
    write_secret(file, key.private_bytes_raw().hex().encode())
    return key.public_key().public_bytes_raw().hex()


def push(folder: Folder, seals: Seals, target: Folder, key: Path) -> list[Outcome]:
    """Publish a store's sound graphs, one bundle per environment; each replaces our previous one for it.

    Raises OSError, BadEntry; CannotPublish: the key cannot be used, or another publisher has a label for the
    environment there.
    """
    signer = _private(key)
    public = signer.public_key().public_bytes_raw().hex()
    outcomes = list(bundle.verify(folder, seals))
    sound = [item.entry for item in outcomes if item.reason is None]
    environments = {json.dumps(entry.environment, sort_keys=True): entry.environment for entry in sound}
    for environment in environments.values():
        packed = io.BytesIO()
        bundle.pack(folder, seals, packed, lambda entry, here=environment: entry.environment == here)
        data = packed.getvalue()
        if len(data) > LARGEST_BUNDLE:
            raise CannotPublish(f"the bundle has more than {LARGEST_BUNDLE >> 20} MB: see the command prune")
        digest = hashlib.sha256(data).hexdigest()
        kinds = sorted({entry.name for entry in sound if entry.environment == environment})
        label = Label(environment, digest, len(data), kinds, serial=int(time.time()))
        earlier = [item.name for item in target.files(label.stem)]
        if label.stem + LABEL in earlier:
            before = _own_label(target, label.stem + LABEL, public)
            # A clock that was set back must not make the label an older one.
            label = label._replace(serial=max(label.serial, before.serial + 1))
        signed = {"label": label._asdict(), "key": public, "signature": signer.sign(label.canonical()).hex()}
        target.write(label.bundle, data)
        target.write(label.stem + LABEL, json.dumps(signed, indent=1).encode())
        for name in earlier:
            if name.endswith(BUNDLE) and name != label.bundle:
                target.remove(name)
    return outcomes


def pull(
    source: Folder,
    trusted: dict[str, str],
    serials: Path,
    misfit: Callable[[dict[str, str]], str | None],
    folder: Folder,
    seals: Seals,
    largest: int | None = None,
) -> Iterator[Pulled]:
    """Save the graphs of all bundles that somebody trusted has signed and that fit, sealed with our own secret.

    trusted: public keys in hexadecimal, by name. serials: file with the highest serial seen of each label.
    misfit: why graphs for an environment are useless here; None if they are not. largest: bytes of one bundle.

    Raises OSError: the source cannot be listed, or `serials` or the folder not read or written;
    CannotPublish: there is no cryptography.
    """
    for name in sorted(file.name for file in source.files(PREFIX) if file.name.endswith(LABEL))[:MOST_LABELS]:
        label = publisher = None
        try:
            label, publisher = _believed(_read(source, name, LARGEST_LABEL), trusted)
            if name != label.stem + LABEL:
                raise BadEntry("it is not what its name says")
            if (reason := misfit(label.environment)) is not None:
                raise BadEntry(reason)
            _check_serial(serials, trusted[publisher], label)
            data = _read(source, label.bundle, min(label.size, largest or LARGEST_BUNDLE, LARGEST_BUNDLE))
            if hashlib.sha256(data).hexdigest() != label.sha256:
                raise BadEntry("its bundle is not the one that was signed")
            yield Pulled(name, label, publisher, _take(data, label, folder, seals))
        except (BadEntry, BadBundle) as bad:
            yield Pulled(name, label, publisher, reason=str(bad))


def read_trusted(file: Path) -> dict[str, str]:
    """Public keys of the trusted publishers, in hexadecimal, by name.

    Raises OSError: the file cannot be read, others may have written it, or it is no such list.
    """
    return _own_list(file, lambda key: isinstance(key, str) and _HEX.fullmatch(key) is not None)


def trust(file: Path, name: str, key: str) -> None:
    """Trust a publisher's public key from now on, under a name.

    Raises CannotPublish: the name or the key is invalid, or the name already has another key. OSError.
    """
    key = key.strip().lower()
    if not _NAME.fullmatch(name) or name != name.strip():
        raise CannotPublish(f"{printable(repr(name))} is no name: take 1 to 64 letters, digits, . @ - _ or spaces")
    if not _HEX.fullmatch(key):
        raise CannotPublish("a publisher's public key has 64 hexadecimal digits")
    known = read_trusted(file)
    if known.get(name, key) != key:
        raise CannotPublish(f"{name} is trusted here with another key, {known[name]}: take that out of {file} first")
    _write_list(file, {**known, name: key})


def _own_label(target: Folder, name: str, public: str) -> Label:
    """Our label at an address, to be replaced. Raises CannotPublish for another publisher's, whose graphs would go."""
    try:
        return _believed(_read(target, name, LARGEST_LABEL), {"": public})[0]
    except BadEntry:
        raise CannotPublish(
            f"{name} in {target} is damaged or another publisher's: push elsewhere, or delete it first"
        ) from None


def _check_serial(file: Path, key: str, label: Label) -> None:
    """Remember the highest serial that a key has signed for an environment.

    Raises BadEntry: a higher one was seen before; OSError: the file cannot be believed, or not written.
    """
    known, name = _own_list(file, lambda serial: type(serial) is int), f"{key} {label.stem}"
    last = known.get(name, 0)
    if label.serial < last:
        raise BadEntry(
            f"it is older (number {label.serial}) than what was published here before ({last}): "
            f"if its publisher says that it is the latest, take {label.stem} out of {file}"
        )
    if label.serial > last:
        _write_list(file, {**known, name: label.serial})


def _own_list(file: Path, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
    """A JSON object that nobody but this user or root can have written; empty where there is no file."""
    try:
        with own_file(file) as plain:
            found = json.loads(plain.read(LARGEST_LIST))
        if isinstance(found, dict) and all(map(is_sound, found.values())):
            return found
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        pass
    raise OSError(f"{file} is damaged: fix or delete it")


def _write_list(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, json.dumps(content, indent=1).encode(), mode=0o644)


def _believed(text: bytes, trusted: dict[str, str]) -> tuple[Label, str]:
    """A label and its publisher's name. Raises BadEntry: it is damaged, or nobody trusted has signed it."""
    try:
        signed = json.loads(text)
        label = Label(**signed["label"])
        if not _is_label(label):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadEntry("its label is damaged, or made by another version of this pack") from None
    key, signature = signed.get("key"), signed.get("signature")
    if not isinstance(key, str) or not isinstance(signature, str) or not _HEX.fullmatch(key):
        raise BadEntry("nobody signed it")
    publisher = next((name for name, known in trusted.items() if known == key), None)
    if publisher is None:
        raise BadEntry(f"it is signed with the key {key}, which nobody here trusts: see the command trust")
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
            bytes.fromhex(signature), label.canonical()
        )
    except (InvalidSignature, ValueError):
        raise BadEntry(f"its signature is not {publisher}'s: somebody changed it") from None
    return label, publisher


def _is_label(label: Label) -> bool:
    if not isinstance(label.environment, dict) or not isinstance(label.kinds, list):
        return False
    texts = (*label.environment.values(), label.sha256, *label.kinds)
    numbers = (label.size, label.serial)
    return (
        all(isinstance(text, str) for text in texts)
        and _HEX.fullmatch(label.sha256) is not None
        and all(type(number) is int and number >= 0 for number in numbers)
    )


def _read(source: Folder, name: str, largest: int) -> bytes:
    """A file of the source. Raises BadEntry, so that one unreadable file does not end the pull."""
    try:
        return source.read(name, largest)
    except OSError as error:
        raise BadEntry(f"{name} cannot be read: {error}") from error


def _take(data: bytes, label: Label, folder: Folder, seals: Seals) -> int:
    """Import all of a bundle whose SHA-256 was checked, or nothing; the number of graphs."""
    for item in bundle.unpack(io.BytesIO(data)):
        if isinstance(item, Outcome):
            raise BadEntry(f"{item.entry if isinstance(item.entry, str) else item.entry.stem}: {item.reason}")
        if item[0].environment != label.environment:
            raise BadEntry(f"{printable(item[0].name)} was made elsewhere than its label says")
    return len(bundle.take(bundle.unpack(io.BytesIO(data)), folder, seals))


def _private(file: Path) -> Any:
    with own_file(file, private=True) as plain:
        text = plain.read(1024).strip()
    try:
        return _ed25519().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text.decode("ascii")))
    except ValueError:
        raise CannotPublish(f"{file} holds no private key of ours: see the command key") from None


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise CannotPublish("signatures need a package: pip install cryptography") from None
    return ed25519

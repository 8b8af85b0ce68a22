"""Seals of saved graphs, and the secret that makes them.

A saved graph is code, and reading it runs it. So each has a seal, an HMAC-SHA256 over its manifest, which contains the
SHA-256 of its bytes. Only the holder of the secret can make one, and nothing without one is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..core.atomic_file import opened, write_secret

KEY_VARIABLE = "ACCEL_STORE_KEY"
SHORTEST_KEY = 16
"""Characters of a chosen key; a shorter one could be guessed."""

_WAIT = 1.0
"""Seconds for another process to finish writing the secret."""


class NoSecret(Exception):
    """Nothing can be sealed or checked without a usable secret; the message says why and what helps."""


class Seals:
    """Makes and checks seals. secret: 32 bytes. source: where it comes from, for people."""

    def __init__(self, secret: bytes, source: str = ""):
        self._secret = secret
        self.source = source

    def make(self, manifest: bytes) -> str:
        return hmac.new(self._secret, manifest, hashlib.sha256).hexdigest()

    def check(self, seal: object, manifest: bytes) -> bool:
        return isinstance(seal, str) and hmac.compare_digest(
            seal.encode(errors="replace"), self.make(manifest).encode()
        )


def seals(file: Path | None, make: bool = True) -> Seals:
    """Seals with the key in ACCEL_STORE_KEY, which a fleet shares, else with this installation's secret.

    file: of the secret; None if no installation is known. make: write a new secret if there is none.

    Raises NoSecret: the key is too short; the file can be neither read nor written, or is not ours alone.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is not None:
        return Seals(_derived(key.strip()), f"the key in {KEY_VARIABLE}")
    if file is None:
        raise NoSecret(f"no installation is known whose secret could be used: set {KEY_VARIABLE}, or name its folder")
    return Seals(_own_secret(file, make), str(file))


@contextlib.contextmanager
def own_file(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """A file, open for reading, that only this user or root can write, nor others read if `private`.

    On Windows only links are refused: Python cannot tell there who may write a file.

    Raises OSError: others may have written it, it is a link, or it cannot be read.
    """
    # Opened once: what the status says must be true of the file that is read.
    with opened(path) as (file, status):
        forbidden = 0o077 if private else 0o022
        if os.name == "posix" and (status.st_mode & forbidden or status.st_uid not in (0, os.geteuid())):
            done, mode = ("read", 600) if private else ("changed", 644)
            raise PermissionError(f"{path} can be {done} by others: chmod {mode} it and own it")
        yield file


def _derived(key: str) -> bytes:
    """32 bytes from a chosen key; slow, because anybody who has a sealed manifest can try keys on it."""
    if len(key) < SHORTEST_KEY:
        raise NoSecret(f"{KEY_VARIABLE} has {len(key)} characters: give it {SHORTEST_KEY} at least")
    text = key.encode(errors="surrogateescape")
    try:
        return hashlib.scrypt(text, salt=b"accel store key", n=2**14, r=8, p=1, dklen=32)
    except (AttributeError, ValueError) as error:
        raise NoSecret(f"{KEY_VARIABLE} cannot be used, this Python has no scrypt ({error})") from error


def _own_secret(file: Path, make: bool) -> bytes:
    try:
        if make and not file.exists():
            with contextlib.suppress(FileExistsError):  # another process was first
                write_secret(file, secrets.token_hex(32).encode())
        secret = _read(file)
    except FileNotFoundError:
        raise NoSecret(f"there is no secret in {file}: the first graph that is saved makes one") from None
    except OSError as error:
        raise NoSecret(
            f"the secret in {file} cannot be read or made ({error.strerror or error}): "
            f"mend that, or set {KEY_VARIABLE}, which is the way on a file system without modes"
        ) from error
    with contextlib.suppress(ValueError):
        if len(decoded := bytes.fromhex(secret.decode("ascii"))) == 32:
            return decoded
    raise NoSecret(f"{file} holds no secret: delete it, and a new one is made")


def _read(file: Path) -> bytes:
    """The content of a file that nobody else can read; waits for it while the file is empty."""
    deadline = time.monotonic() + _WAIT
    while True:
        with own_file(file, private=True) as secret:
            text = secret.read(1024).strip()
        # On a file system without hard links a new secret has its name a moment before its bytes.
        if text or time.monotonic() > deadline:
            return text
        time.sleep(0.02)

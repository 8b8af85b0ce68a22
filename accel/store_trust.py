"""Which artifacts are ours: a secret of this installation, and seals made with it.

An artifact is code, and reading it runs it. So each carries a seal, an HMAC-SHA256 over its manifest and its bytes
that only the holder of the secret can make, and nothing without one is opened.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

KEY_VARIABLE = "ACCEL_STORE_KEY"
SHORTEST_KEY = 16
"""Characters of a key given by a person; fewer could be guessed."""


class NoSecret(Exception):
    """There is no secret to be had, so nothing can be saved or trusted; the message says why and what helps."""


class Seals:
    """Makes and checks seals. secret: 32 bytes."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def make(self, manifest: bytes, data: bytes) -> str:
        # The length keeps one pair from being read as another.
        content = len(manifest).to_bytes(8, "big") + manifest + data
        return hmac.new(self._secret, content, hashlib.sha256).hexdigest()

    def check(self, seal: object, manifest: bytes, data: bytes) -> bool:
        return isinstance(seal, str) and hmac.compare_digest(
            seal.encode(errors="replace"), self.make(manifest, data).encode()
        )


def seals(file: Path) -> Seals:
    """Seals with the key in ACCEL_STORE_KEY, which a fleet shares, or else with this installation's own secret.

    file: holds the secret; made at the first call, readable by its owner alone.

    Raises:
        NoSecret: the key is too short; the file can be neither read nor made, or others can read it.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return Seals(_own_secret(file))
    if len(key) < SHORTEST_KEY:
        raise NoSecret(f"{KEY_VARIABLE} has {len(key)} characters: give it {SHORTEST_KEY} at least")
    return Seals(hashlib.sha256(b"accel store key\0" + key.encode()).digest())


def _own_secret(file: Path) -> bytes:
    try:
        if not file.exists():
            _make(file)
        status = file.stat()
        if os.name == "posix" and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
            raise NoSecret(f"{file} can be read by others: chmod 600 it and own it, or set {KEY_VARIABLE}")
        secret = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except OSError as error:
        raise NoSecret(f"the secret in {file} cannot be read or made ({error.strerror or error})") from error
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise NoSecret(f"{file} holds no secret: delete it, and a new one is made")
    return secret


def _make(file: Path) -> None:
    """Write a new secret, unless another process is first: then its secret stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{secrets.token_hex(8)}.tmp")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as new:
            new.write(secrets.token_hex(32))
            new.flush()
            os.fsync(new.fileno())
        try:
            os.link(unfinished, file)  # unlike a rename it never replaces one that is there
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not file.exists():
                os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)

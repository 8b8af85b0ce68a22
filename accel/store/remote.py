"""A folder in an object store, or wherever else the package fsspec reaches."""

from __future__ import annotations

import contextlib
import inspect
import re
import secrets
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote

from ..core.atomic_file import UNFINISHED, UNFINISHED_NAME
from .folder import File

_USER = re.compile(r"(?<=://)[^\s'\"]*:[^\s'\"]*@|(?<=://)[^\s'\"/]*@")
"""User name and password in an address; both may have any characters."""


class RemoteFolder:
    """A folder at an address such as s3://bucket/graphs; fsspec and its backend find the credentials.

    Relies on one thing: an object is visible only once it is complete. Object stores record no reads, so the oldest
    written is evicted first.
    """

    def __init__(self, address: str):
        self._address = address.rstrip("/")
        self._files: Any = None
        self._root = ""

    def __str__(self) -> str:
        return _USER.sub("", self._address).partition("?")[0]

    def files(self, prefix: str = "") -> Iterator[File]:
        for file in self._list(prefix):
            if file.name.startswith(prefix) and not file.name.endswith(UNFINISHED):
                yield file

    def unfinished(self) -> Iterator[File]:
        return (file for file in self._list() if UNFINISHED_NAME.fullmatch(file.name))

    def read(self, name: str, largest: int) -> bytes:
        root = self._root_path()
        with self._connected() as files:
            data = files.cat_file(f"{root}/{name}", start=0, end=largest + 1)
        if len(data) > largest:
            raise OSError(f"{name} has more than {largest} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        root = self._root_path()
        with self._connected() as files:
            try:
                files.pipe_file(f"{root}/{name}", data)
            except FileNotFoundError:
                # A file server, unlike an object store, needs the folder first. No bucket is ever created.
                if "/" not in root:
                    raise
                files.mkdir(root, create_parents=False)
                files.pipe_file(f"{root}/{name}", data)

    def remove(self, name: str) -> None:
        path = f"{self._root_path()}/{name}"
        with self._connected() as files, contextlib.suppress(FileNotFoundError):
            files.rm_file(path)

    def touch(self, name: str) -> None:
        pass

    def now(self) -> float:
        name = f"{secrets.token_hex(8)}{UNFINISHED}"
        self.write(name, b"now")
        try:
            path = f"{self._root_path()}/{name}"
            with self._connected() as files:
                return _seconds(files.info(path))
        finally:
            self.remove(name)

    def _list(self, prefix: str = "") -> list[File]:
        root = self._root_path()
        with self._connected() as files:
            files.invalidate_cache(root)
            try:
                # Only some backends can filter by prefix; the others list everything.
                if prefix and "prefix" in inspect.signature(files.find).parameters:
                    found = files.find(root, detail=True, prefix=prefix).values()
                else:
                    found = files.ls(root, detail=True)
            except FileNotFoundError:
                return []
            return [
                File(item["name"].rpartition("/")[2], item.get("size") or 0, _seconds(item))
                for item in found
                if item.get("type") == "file" and item["name"].rpartition("/")[0].endswith(root.rstrip("/"))
            ]

    def _root_path(self) -> str:
        with self._connected():
            return self._root

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """The file system. Whatever a backend raises becomes an OSError without the address's password."""
        try:
            if self._files is None:
                import fsspec

                self._files, self._root = fsspec.core.url_to_fs(self._address)
            yield self._files
        except FileNotFoundError as error:
            raise FileNotFoundError(self._redacted(error)) from error
        except ImportError as error:
            raise OSError(f"{self} needs a package: {self._redacted(error)}") from error
        except Exception as error:
            raise OSError(f"{self}: {type(error).__name__}: {self._redacted(error)}") from error

    def _redacted(self, error: Exception) -> str:
        """The error's text without the address's user names, passwords and tokens."""
        text = str(error)
        private = [self._address.partition("?")[2]]
        for user in _USER.findall(self._address):
            private += [user, user.removesuffix("@").partition(":")[2]]
        for secret in private:
            for form in (secret, unquote(secret), quote(secret), quote(secret, safe="")):
                text = text.replace(form, "***") if form else text
        return _USER.sub("", text)


def _seconds(item: dict[str, Any]) -> float:
    """When it was written, in seconds since 1970; each backend names and types it differently."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        moment = item.get(name)
        if isinstance(moment, str):
            with contextlib.suppress(ValueError):
                moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
        if hasattr(moment, "timestamp"):
            return moment.timestamp()
        if isinstance(moment, (int, float)):
            return float(moment)
    return time.time()

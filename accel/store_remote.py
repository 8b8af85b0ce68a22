"""The store's files in an object store, or whatever else the package fsspec reaches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from .store_folder import File


class RemoteFolder:
    """A folder by its address, such as s3://bucket/graphs; credentials are fsspec's and its backend's matter.

    Object stores show an object only when it is whole, and that is all that is relied on. They do not
    note when one was read: what was written longest ago is deleted first there.
    """

    def __init__(self, address: str):
        self._address = address.rstrip("/")
        self._files: Any = None
        self._root = ""

    def __str__(self) -> str:
        return self._address.rpartition("@")[2] if "@" in self._address else self._address

    def files(self) -> Iterator[File]:
        with self._connected() as (files, root):
            files.invalidate_cache(root)
            try:
                found = files.ls(root, detail=True)
            except FileNotFoundError:
                return
        for item in found:
            if item.get("type") == "file":
                yield File(item["name"].rpartition("/")[2], item.get("size") or 0, _seconds(item))

    def read(self, name: str) -> bytes:
        with self._connected() as (files, root):
            return files.cat_file(f"{root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        with self._connected() as (files, root):
            files.makedirs(root, exist_ok=True)
            files.pipe_file(f"{root}/{name}", data)

    def remove(self, name: str) -> None:
        with self._connected() as (files, root), contextlib.suppress(FileNotFoundError):
            files.rm_file(f"{root}/{name}")

    def touch(self, name: str) -> None:
        pass

    @contextlib.contextmanager
    def _connected(self):
        """(file system, path of the folder in it); whatever goes wrong there is an OSError here.

        Backends raise exceptions of their own packages, which this one does not know.
        """
        try:
            if self._files is None:
                import fsspec

                self._files, self._root = fsspec.core.url_to_fs(self._address)
            yield self._files, self._root
        except OSError:
            raise
        except ImportError as error:
            raise OSError(f"{self} needs a package: {error}") from error
        except Exception as error:
            raise OSError(f"{self}: {type(error).__name__}: {error}") from error


def _seconds(item: dict[str, Any]) -> float:
    """When it was written, in seconds since 1970; backends name and type it differently."""
    for name in ("mtime", "LastModified", "last_modified", "created", "updated"):
        moment = item.get(name)
        if hasattr(moment, "timestamp"):
            return moment.timestamp()
        if isinstance(moment, (int, float)):
            return float(moment)
    return time.time()

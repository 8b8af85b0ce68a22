"""Of several processes that want a graph at once, one compiles it; the others wait and load what it saved.

A lease is a file beside the graphs. Its holder renews it; one that is renewed no more is somebody's who was killed, and
is taken over. Nobody waits longer than a limit, and whatever fails here ends in compiling.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.events import log
from .folder import File, Folder
from .manifest import MANIFEST

VARIABLE = "ACCEL_STORE_LEASE"
"""Seconds that a process waits at most for a graph that another compiles; off where unset."""

LEASE_NAME = re.compile(r"[0-9a-f]+-[0-9a-f]{12}\.lease\d+")

_BEAT = 5.0
_MISSED = 4
"""Renewals that must be missing before a lease counts as left behind."""

_SHARE = 0.25
"""Of the limit, that must have passed too: a holder that lives renews late where its machine is short of processors."""

Graph = TypeVar("Graph")


def limit() -> float:
    """Seconds to wait at most, by ACCEL_STORE_LEASE; 0 where it is unset, or is no number."""
    given = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(given or 0.0)
        if not math.isfinite(seconds):
            raise ValueError(given)
        return max(seconds, 0.0)
    except ValueError:
        log.warning("%s is %r, which is no number of seconds, and counts as unset.", VARIABLE, given)
        return 0.0


class Leases:
    """Leases in the folder of a store. limit: seconds to wait for a graph at most. beat: seconds between renewals.

    Times are never compared with the folder's clock: a lease is alive while its date changes.
    """

    def __init__(self, folder: Folder, limit: float, beat: float = _BEAT):
        self._folder, self._limit, self._beat = folder, limit, beat
        self._left_behind = max(_MISSED * beat, _SHARE * limit)
        self._failed = False
        self._lock = threading.Lock()
        self._counts = {"taken": 0, "taken_over": 0, "waited": 0, "gave_up": 0, "seconds": 0.0}

    def wait_or_take(
        self, digest: str, environment: dict[str, str], load: Callable[[], Graph | None], ending: contextlib.ExitStack
    ) -> Graph | None:
        """The graph that another process made meanwhile; None where this one has to compile it.

        digest, environment: which graph (`key`). load: gives the saved graph that serves, if there is one.
        ending: closed when the graph is compiled and saved, or has failed: then the lease ends.

        Raises what `load` does.
        """
        if self._failed:
            return None
        try:
            return self._wait_or_take(f"{digest}-{_short(environment)}", digest, load, ending)
        except OSError as error:
            self._failed = True  # such as a folder that may only be read: waiting there makes nothing better
            log.warning("saved graphs: no leases in %s: %s", self._folder, error)
            return None

    def statistics(self) -> dict[str, Any]:
        """Leases taken, and taken over; graphs waited for until they were loaded, or given up; seconds of waiting."""
        with self._lock:
            return {**self._counts, "seconds": round(self._counts["seconds"], 1)}

    def _wait_or_take(self, name: str, digest: str, load, ending: contextlib.ExitStack):
        begun = changed = time.monotonic()
        lease, saved = self._look(digest, name)
        if lease is not None:
            log.info("saved graphs: waiting for a process that compiles the same")
        while True:
            if lease is None or time.monotonic() - changed > self._left_behind:
                number = 0 if lease is None else _number(lease) + 1
                if self._folder.create(f"{name}.lease{number}", _content()):
                    self._count(taken=1, taken_over=int(number > 0), seconds=time.monotonic() - begun)
                    ending.callback(self._held(name, number))
                    return load() if self._look(digest, name)[1] else None  # saved since it was looked for
            elif time.monotonic() - begun > self._limit:
                self._count(gave_up=1, seconds=time.monotonic() - begun)
                log.warning("saved graphs: another process compiles for over %.0f s, so this one does too", self._limit)
                return None
            time.sleep(min(self._beat / 2, 1.0))
            before, (lease, now_saved) = lease, self._look(digest, name)
            if before is not None and lease is None:
                now_saved = self._look(digest, name)[1]  # what was saved while the folder was listed
            if now_saved != saved:
                saved, graph = now_saved, load()
                if graph is not None:
                    self._count(waited=1, seconds=time.monotonic() - begun)
                    return graph
            if before is not None and lease is None:
                # Its holder could not save the graph, or not compile it: each for itself, and nobody waits again.
                self._count(seconds=time.monotonic() - begun)
                return None
            if lease != before:
                changed = time.monotonic()

    def _look(self, digest: str, name: str) -> tuple[File | None, frozenset[str]]:
        """The latest lease of this name, and the graphs that are saved of the key."""
        files = list(self._folder.files(digest))
        leases = [file for file in files if file.name.startswith(f"{name}.lease") and LEASE_NAME.fullmatch(file.name)]
        return max(leases, key=_number, default=None), frozenset(
            file.name for file in files if file.name.endswith(MANIFEST)
        )

    def _held(self, name: str, number: int) -> Callable[[], None]:
        """Renew the lease from now on; what ends it."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._beat):
                with contextlib.suppress(OSError):
                    self._folder.write(f"{name}.lease{number}", _content())

        def end() -> None:
            done.set()
            thread.join()
            for earlier in range(number, -1, -1):
                with contextlib.suppress(OSError):
                    self._folder.remove(f"{name}.lease{earlier}")

        thread = threading.Thread(target=renew, name="accel-lease", daemon=True)
        thread.start()
        return end

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number


def _short(environment: dict[str, str]) -> str:
    """Graphs of one key for other environments are other graphs."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]


def _number(lease: File) -> int:
    return int(lease.name.rpartition(".lease")[2])


def _content() -> bytes:
    return secrets.token_hex(4).encode()

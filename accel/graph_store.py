"""What survives a restart: compiled graphs on disk, loaded in place of compiling.

The disk is a hint. Whatever is wrong with it, or with what lies there, costs the time to compile and
nothing else; the reason is counted, and said in the log where somebody could mend it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import store_entry, store_key
from .ahead_of_time import NotSavable
from .causes import pass_on
from .compiled_graph import CompiledGraph, Facts
from .events import emit
from .store_entry import DATA, MANIFEST, BadEntry
from .store_folder import Folder
from .store_prune import prune
from .store_trust import NoSecret, Seals, seals

if TYPE_CHECKING:
    from .graph_key import GraphKey

log = logging.getLogger("accel")

NOTHING_SAVED = "nothing was saved of it yet"
DEFAULT_MAX_BYTES = 2 << 30

_PRUNE_EVERY = 16
"""Saves between two looks at the folder's size."""

_MOST_REASONS = 256
"""Kept for the report; a message may hold a name that is another each time."""

_MOST_FAILED_SAVES = 3
"""In a row, after which a process saves no more: each may be a network's timeout long."""


class GraphStore:
    """Saved graphs of one folder. Nothing is read or written before the first `load` or `save`.

    folder: of the files. secret: the file with this installation's secret.
    max_bytes: what the folder may hold; the least recently used go first. 0 saves nothing.
    """

    def __init__(self, folder: Folder, secret: Path, max_bytes: int = DEFAULT_MAX_BYTES):
        self._folder = folder
        self._secret = secret
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._seals: Seals | None = None
        self._loaded = 0
        self._saved = 0
        self._failed_saves = 0
        self._misses: dict[tuple[str, str], int] = {}

    def load(
        self,
        key: GraphKey,
        name: str,
        devices: Iterable[torch.device],
        build: Callable[[bytes, Facts], CompiledGraph],
        fits: Callable[[CompiledGraph], bool],
        values: tuple[str, ...] = (),
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> CompiledGraph | None:
        """A saved graph of this key that fits the call; None where there is none.

        name: of the kind, for the report. devices: of the call's tensors.
        build: makes the graph; called only with bytes that this installation sealed.
        values: those of the call (`call_spec.without_values`).
        interrupts: exceptions that mean "stop the run": no other is ever raised.
        """
        try:
            digest = store_key.key_digest(key, values)
            if digest is None:
                return None
            here = store_key.environment(devices)
            reason = NOTHING_SAVED
            for stem in self._stems(digest):
                try:
                    graph = self._open(stem, here, build, interrupts)
                    if fits(graph):
                        with self._lock:
                            self._loaded += 1
                        return graph
                    reason = "what was saved of it does not fit this call"
                except BadEntry as bad:
                    reason = str(bad)
            self._note(name, reason)
        except (OSError, NoSecret) as error:
            pass_on(error, interrupts)
            self._note(name, f"the store cannot be read: {error}")
        except Exception as error:
            pass_on(error, interrupts)
            # Reading the environment asks torch much, of which any version may have changed something.
            self._note(name, f"looking in the store failed: {type(error).__name__}: {error}")
        return None

    def save(
        self,
        key: GraphKey,
        name: str,
        devices: Iterable[torch.device],
        graph: CompiledGraph,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> bool:
        """Keep a graph that was just compiled; whether that was done. Nothing but `interrupts` is ever raised.

        On the caller's thread: writing takes milliseconds after a compilation of seconds, and a process
        that ends right after its first image has lost nothing.
        """
        if graph.save is None or not self._max_bytes or self._failed_saves >= _MOST_FAILED_SAVES:
            return False
        try:
            digest = store_key.key_digest(key, graph.facts.values)
            if digest is None:
                return False
            data = graph.save()
            manifest = store_entry.describe(digest, name, store_key.environment(devices), asdict(graph.facts), data)
            store_entry.write(self._folder, self._make_seals(), manifest, data)
            with self._lock:
                self._saved += 1
                self._failed_saves = 0
                look = self._saved % _PRUNE_EVERY == 1
            if look:
                prune(self._folder, self._max_bytes)
            return True
        except NotSavable as reason:
            pass_on(reason, interrupts)
            self._note(name, f"not saved: {reason}")
        except (OSError, NoSecret) as error:
            pass_on(error, interrupts)
            with self._lock:
                self._failed_saves += 1
            self._note(name, f"not saved: {error}")
        except Exception as error:
            pass_on(error, interrupts)
            self._note(name, f"not saved: {type(error).__name__}: {error}")
        return False

    def statistics(self) -> dict[str, Any]:
        """The folder, graphs loaded and saved by this process, and why others were not: JSON."""
        with self._lock:
            misses = [{"block": block, "reason": reason, "count": n} for (block, reason), n in self._misses.items()]
            return {"folder": str(self._folder), "loaded": self._loaded, "saved": self._saved, "misses": misses}

    def _stems(self, digest: str) -> Iterator[str]:
        """The entries of a key, the one used last first."""
        found = [file for file in self._folder.files() if file.name.startswith(digest) and file.name.endswith(MANIFEST)]
        for file in sorted(found, key=lambda file: file.used, reverse=True):
            yield file.name.removesuffix(MANIFEST)

    def _open(self, stem, here, build, interrupts) -> CompiledGraph:
        try:
            manifest, seal = store_entry.read_manifest(self._folder.read(stem + MANIFEST))
            if manifest.stem != stem:
                raise BadEntry("it is not what its name says")
            other = store_key.difference(here, manifest.environment)
            if other is not None:
                raise BadEntry(other)
            data = self._folder.read(stem + DATA)
        except FileNotFoundError:
            raise BadEntry("a part of it is missing") from None
        store_entry.check(self._make_seals(), manifest, seal, data)
        try:
            graph = build(data, _facts(manifest.facts))
        except Exception as error:
            pass_on(error, interrupts)
            # Torch's own reading of its bytes, and the kernels' libraries: any exception, and all mean the same.
            raise BadEntry(f"it cannot be loaded: {type(error).__name__}: {error}") from error
        try:
            self._folder.touch(stem + MANIFEST)
        except OSError:
            pass  # a folder that is read-only: it may be used all the same
        return graph

    def _make_seals(self) -> Seals:
        if self._seals is None:
            self._seals = seals(self._secret)
        return self._seals

    def _note(self, name: str, reason: str) -> None:
        reason = " ".join(reason.split())[:300]
        with self._lock:
            if (name, reason) not in self._misses and len(self._misses) >= _MOST_REASONS:
                return
            count = self._misses[name, reason] = self._misses.get((name, reason), 0) + 1
            first_of_reason = count == 1 and sum(known == reason for _, known in self._misses) == 1
        if first_of_reason:
            log.log(logging.DEBUG if reason == NOTHING_SAVED else logging.WARNING, "saved graphs, %s: %s", name, reason)
        emit("store", block=name, reason=reason)


def _facts(stored: dict[str, Any]) -> Facts:
    return Facts(
        static_ones=tuple((int(index), int(dimension)) for index, dimension in stored["static_ones"]),
        weights=int(stored["weights"]),
        changed=tuple(int(index) for index in stored["changed"]),
        dynamic=bool(stored["dynamic"]),
        values=tuple(str(value) for value in stored["values"]),
    )

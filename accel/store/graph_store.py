"""Compiled graphs saved on disk and loaded in place of compiling, so that they survive a restart.

The disk is a hint: whatever is wrong with it costs the time to compile and nothing else; the reason is counted, and
logged where somebody could fix it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..cache.graph_cache import GraphCache, shared
from ..compile.backend import NotSavable
from ..compile.compiled_graph import CompiledGraph, Facts
from ..compile.registry import backend_named
from ..core.errors import is_shortage, pass_on, strip_frames
from ..core.events import emit, log
from ..core.settings import DEFAULT_STORE_MB
from . import key as store_key
from . import location, manifest
from .folder import Folder
from .key import NotPortable
from .manifest import GRAPH, BadEntry, Manifest

if TYPE_CHECKING:
    from ..fingerprint.kinds import GraphKey

NOTHING_SAVED = "nothing was saved of it yet"

_PRUNE_EVERY = 16
"""Saves between two checks of the folder's size."""

_MOST_REASONS = 256
"""Reasons kept for the report: a message may contain a name that is different each time."""

_MOST_OPENED = 4
"""Graphs opened for one call: each may take a second."""

_MOST_FAILURES, _PAUSE = 3, 300.0
"""Failures in a row after which the disk is left alone, and for how many seconds."""


def attach(cache: GraphCache, find_home: Callable[[], Path | None]) -> None:
    """Give the process' shared cache its store, once, without touching the disk; other caches keep theirs.

    find_home: gives the folder for settings and graphs, which may not exist yet; None where there is none.
    """
    if cache is not shared or cache.store is not None:
        return
    home = find_home()
    try:
        folder = location.folder(home)
    except OSError as error:
        log.warning("Compiled graphs are not saved: %s", error)
        return
    if folder is not None:
        cache.store = GraphStore(folder, lambda: location.max_bytes(home))


class CircuitBreaker:
    """Opens after some failures in a row, for some minutes in which nothing should be tried.

    A network's timeout may be a minute long, and a model has dozens of kinds of blocks.
    """

    def __init__(self) -> None:
        self._failures, self._until = 0, 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= _MOST_FAILURES and time.monotonic() < self._until

    def record_failure(self) -> None:
        self._failures += 1
        self._until = time.monotonic() + _PAUSE

    def record_success(self) -> None:
        self._failures = 0


class GraphStore:
    """Saved graphs of one folder. Nothing is read or written before the first call of `candidates` or `save`.

    folder: of the files. Loading one runs its code, so whoever can write to the folder is trusted.
    max_bytes: gives the bound on the folder's size; the least recently used graphs are evicted. 0 saves nothing.
    """

    def __init__(self, folder: Folder, max_bytes: Callable[[], int] = lambda: DEFAULT_STORE_MB << 20):
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._lookups = self._loaded = self._saved = 0
        self._loading, self._saving = CircuitBreaker(), CircuitBreaker()  # a full or read-only disk still loads
        self._distrusted: set[str] = set()
        self._saved_here: set[str] = set()
        self._misses: dict[tuple[str, str], int] = {}

    def candidates(
        self,
        key: GraphKey,
        name: str,
        devices: Iterable[torch.device],
        values: tuple[str, ...] = (),
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> Iterator[Saved]:
        """The saved graphs of this key, the most recently used first; the caller opens them until one serves its call.

        Where none was used, the reason is counted. name: of the kind, for the report. devices: of the call's tensors.
        values: the call's (`tree_spec.remove_values`). interrupts: exceptions that mean "stop the run", the only
        ones raised.
        """
        if backend_named(key.backend).load is None or self._loading.is_open:
            return
        with self._lock:
            self._lookups += 1
        location.warn_of_others(self._folder)
        with self._fail_open(name, "the store cannot be read", self._loading, interrupts):
            digest, here = store_key.key_digest(key, values), store_key.environment(devices)
            yield from self._candidates(digest, here, name, interrupts)

    def _candidates(self, digest: str, here: dict[str, str], name: str, interrupts) -> Iterator[Saved]:
        opened, has_failed, reason = 0, False, BadEntry(NOTHING_SAVED)
        files = [file for file in self._folder.files(digest) if file.name.endswith(GRAPH)]
        for file in sorted(files, key=lambda file: -file.used):
            stem = file.name.removesuffix(GRAPH)
            if opened >= _MOST_OPENED or self._loading.is_open:
                break
            if stem in self._distrusted:
                reason = BadEntry("what was saved of it failed in this process")
                continue
            try:
                found = manifest.read(self._folder, stem)
                other = store_key.difference(here, found.environment)
                if other is not None:
                    raise BadEntry(other)
                facts = {name: _to_tuples(value) for name, value in found.facts.items()}
                saved = Saved(self, found, Facts(**facts), interrupts)
            except BadEntry as error:
                reason = strip_frames(error)
            except (AttributeError, TypeError):  # under a right checksum, fields of another engine
                reason = BadEntry("its manifest is damaged")
            except OSError as error:
                pass_on(error, interrupts)
                has_failed, reason = True, self._record_read_failure(error)
            else:
                yield saved
                opened += saved.is_read
                has_failed, reason = has_failed or saved.has_failed_disk, saved.why
        if not has_failed:
            self._loading.record_success()
        self._note(name, str(reason), reason.level)

    def _record_read_failure(self, error: OSError) -> BadEntry:
        self._loading.record_failure()
        return BadEntry(f"it cannot be read: {error}", logging.WARNING)

    def identify(self, key: GraphKey, name: str, devices: Iterable[torch.device], graph: CompiledGraph) -> None:
        """Note on a graph what it is valid for, as torch is set now, for a later `save`."""
        with self._fail_open(name, "not saved", self._saving, ()):
            graph.identity = store_key.key_digest(key, graph.facts.values), store_key.environment(devices)

    def save(
        self,
        key: GraphKey,
        name: str,
        devices: Iterable[torch.device],
        graph: CompiledGraph,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> bool:
        """Save a graph that was just compiled, on the caller's thread; whether it was. Raises nothing but `interrupts`.

        Writing takes milliseconds after seconds of compiling, and a process that ends right afterwards loses nothing.
        """
        save, graph.save = graph.save, None  # it references all that was needed for compiling
        if save is None or self._saving.is_open:
            return False
        if graph.identity is None:
            self.identify(key, name, devices, graph)
        with self._fail_open(name, "not saved", self._saving, interrupts):
            if graph.identity is None or not self._max_bytes():
                return False
            digest, here = graph.identity
            data = save()
            description = manifest.describe(digest, name, here, asdict(graph.facts), data)
            manifest.write(self._folder, description, data)
            graph.saved_as = description.stem
            with self._lock:
                self._saved += 1
                self._saved_here.add(description.stem)
                is_prune_due = self._saved % _PRUNE_EVERY == 1
            self._saving.record_success()
            if is_prune_due:
                try:
                    self._folder.prune(self._max_bytes())
                except OSError as error:
                    log.warning("saved graphs: the folder cannot be looked through: %s", error)
            return True
        return False

    def save_facts(self, graph: CompiledGraph, name: str, interrupts: tuple[type[BaseException], ...] = ()) -> None:
        """Save what was found out about a saved graph since it was compiled."""
        if graph.saved_as is None or graph.saved_as in self._distrusted or self._saving.is_open:
            return
        with self._fail_open(name, "not saved", self._saving, interrupts):
            found, data = manifest.read_graph(self._folder, graph.saved_as)
            manifest.write(self._folder, replace(found, facts=asdict(graph.facts)), data)

    def distrust(self, stem: str) -> bool:
        """Stop loading a graph that failed; whether compiling anew may do better: not if this process made the graph.

        Its own graph is deleted. Another process' stays: it may be right there, and a newer graph is found first.
        """
        self.stop_loading(stem)
        if stem not in self._saved_here:
            return True
        self._folder.remove(stem + GRAPH)
        return False

    def stop_loading(self, stem: str) -> None:
        """Leave this graph alone in this process."""
        with self._lock:
            self._distrusted.add(stem)

    def statistics(self) -> dict[str, Any]:
        """The folder and what this process did there, as JSON: lookups, graphs loaded and saved, reasons for misses."""
        with self._lock:
            misses = [{"block": block, "reason": reason, "count": n} for (block, reason), n in self._misses.items()]
            counts = {"lookups": self._lookups, "loaded": self._loaded, "saved": self._saved}
            return {"folder": str(self._folder), **counts, "misses": misses}

    @contextlib.contextmanager
    def _fail_open(
        self, name: str, failed: str, breaker: CircuitBreaker, interrupts: tuple[type[BaseException], ...]
    ) -> Iterator[None]:
        """Count the error of the work inside, in place of raising it. failed: the words before the error."""
        try:
            yield
        except Exception as error:
            pass_on(error, interrupts)
            if isinstance(error, (NotPortable, NotSavable)):
                self._note(name, f"not kept: {error}")
            elif isinstance(error, (OSError, BadEntry)):
                breaker.record_failure()
                self._note(name, f"{failed}: {error}", logging.WARNING)
            else:  # any version of torch may have changed something of what the environment asks it
                self._note(name, f"{failed}: {type(error).__name__}: {error}", logging.WARNING)

    def _note_loaded(self, stem: str) -> None:
        with self._lock:
            self._loaded += 1
        self._loading.record_success()
        with contextlib.suppress(OSError):  # a read-only folder serves all the same
            self._folder.touch(stem + GRAPH)

    def _note(self, name: str, reason: str, level: int = logging.DEBUG) -> None:
        """Count a miss, and log the first of each reason."""
        reason = manifest.printable(reason)
        with self._lock:
            if (name, reason) not in self._misses and len(self._misses) >= _MOST_REASONS:
                return
            count = self._misses[name, reason] = self._misses.get((name, reason), 0) + 1
            is_first = count == 1 and sum(known == reason for _, known in self._misses) == 1
        if is_first:
            log.log(level, "saved graphs, %s: %s", name, reason)
        emit("store", block=name, reason=reason)


class Saved:
    """One saved graph of a key. `with saved:` tries it; an error inside is kept as the reason for a miss (`why`).

    facts: what it is good for, known without opening it.
    """

    def __init__(self, store: GraphStore, found: Manifest, facts: Facts, interrupts: tuple[type[BaseException], ...]):
        self.facts = facts
        self.why = BadEntry("what was saved of it does not fit this call")
        self.is_read = self.has_failed_disk = False
        self._store, self._found, self._interrupts = store, found, interrupts

    def read(self) -> bytes:
        """The bytes of its code."""
        _, data = manifest.read_graph(self._store._folder, self._found.stem)
        self.is_read = True
        return data

    def use(self, graph: CompiledGraph) -> CompiledGraph:
        """The graph made of the bytes, which counts as loaded and as used now."""
        graph.saved_as = self._found.stem
        self._store._note_loaded(self._found.stem)
        return graph

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        pass_on(error, self._interrupts)
        if isinstance(error, BadEntry):
            self.why = strip_frames(error)
        elif isinstance(error, OSError) and (error.errno is not None or not self.is_read):  # as where a disk is full
            self.has_failed_disk, self.why = True, self._store._record_read_failure(error)
        elif is_shortage(error):
            self.why = BadEntry(f"there was too little memory for it: {error}")
        else:  # torch reading its own bytes, and the kernels' libraries, raise anything; it all means the same
            self._store.stop_loading(self._found.stem)
            self.why = BadEntry(f"it cannot be loaded: {type(error).__name__}: {error}", logging.WARNING)
        return True


def _to_tuples(value: Any) -> Any:  # of which JSON makes lists
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value

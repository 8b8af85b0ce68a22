"""Compiled graphs saved on disk and loaded in place of compiling, so that they survive a restart.

The disk is a hint. Whatever is wrong with it, or with what is on it, costs the time to compile and nothing else; the
reason is counted, and logged where somebody could fix it.
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
"""Kept for the report; a message may contain a name that is different each time."""

_MOST_OPENED = 4
"""Graphs opened for one call: each may take a second."""

_MOST_FAILURES, _PAUSE = 3, 300.0


def attach(cache: GraphCache, find_home: Callable[[], Path | None]) -> None:
    """Give the process' shared cache its store, once; any other cache keeps what it has. Touches no disk.

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
    """Opens after 3 failures in a row, and stays open for 5 minutes: meanwhile nothing should be tried.

    A network's timeout may be a minute long, and a model has dozens of kinds of blocks.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= _MOST_FAILURES and time.monotonic() < self._until

    def record_failure(self) -> None:
        self._failures += 1
        self._until = time.monotonic() + _PAUSE

    def record_success(self) -> None:
        self._failures = 0


class GraphStore:
    """Saved graphs of one folder. Nothing is read or written before the first look at `candidates` or `save`.

    folder: of the files. Loading one runs its code, so whoever can write to the folder is trusted.
    max_bytes: gives what the folder may hold; the least recently used graphs are evicted. 0 saves nothing.
    """

    def __init__(self, folder: Folder, max_bytes: Callable[[], int] = lambda: DEFAULT_STORE_MB << 20):
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._lookups = 0
        self._loaded = 0
        self._saved = 0
        self._loading = CircuitBreaker()
        self._saving = CircuitBreaker()  # of its own: what is on a full disk, or one that is read-only, is still loaded
        self._distrusted: set[str] = set()
        self._own: set[str] = set()
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

        Where none was used, the reason is counted.

        name: of the kind, for the report. devices: of the call's tensors. values: those of the call
        (`tree_spec.remove_values`). interrupts: exceptions that mean "stop the run": no other is ever raised.
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
        opened, failed = 0, False
        why = BadEntry(NOTHING_SAVED)
        files = [file for file in self._folder.files(digest) if file.name.endswith(GRAPH)]
        for file in sorted(files, key=lambda file: -file.used):
            stem = file.name.removesuffix(GRAPH)
            if opened >= _MOST_OPENED or self._loading.is_open:
                break
            if stem in self._distrusted:
                why = BadEntry("what was saved of it failed in this process")
                continue
            try:
                found = manifest.read(self._folder, stem)
                other = store_key.difference(here, found.environment)
                if other is not None:
                    raise BadEntry(other)
                saved = Saved(self, found, _facts(found.facts), interrupts)
            except BadEntry as bad:
                why = strip_frames(bad)
            except OSError as error:
                pass_on(error, interrupts)
                failed, why = True, self._unreadable(error)
            else:
                yield saved
                opened += saved.is_read
                failed, why = failed or saved.has_failed_disk, saved.why
        if not failed:
            self._loading.record_success()
        self._note(name, str(why), why.level)

    def _unreadable(self, error: OSError) -> BadEntry:
        self._loading.record_failure()
        return BadEntry(f"it cannot be read: {error}", logging.WARNING)

    def identify(self, key: GraphKey, name: str, devices: Iterable[torch.device], graph: CompiledGraph) -> None:
        """Note on a graph what it is valid for, as torch is set now; `save` asks for that, where it comes later."""
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
        """Save a graph that was just compiled; whether that was done. Raises nothing but `interrupts`.

        Runs on the caller's thread: writing takes milliseconds after a compilation of seconds, and a process that
        ends right after its first image has lost nothing.
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
            made = manifest.describe(digest, name, here, asdict(graph.facts), data)
            manifest.write(self._folder, made, data)
            graph.saved_as = made.stem
            self._note_saved(made.stem)
            return True
        return False

    def save_facts(self, graph: CompiledGraph, name: str, interrupts: tuple[type[BaseException], ...] = ()) -> None:
        """Save what is known of a saved graph by now, which was found out after it was compiled."""
        if graph.saved_as is None or graph.saved_as in self._distrusted or self._saving.is_open:
            return
        with self._fail_open(name, "not saved", self._saving, interrupts):
            found, data = manifest.read_graph(self._folder, graph.saved_as)
            manifest.write(self._folder, replace(found, facts=asdict(graph.facts)), data)

    def distrust(self, stem: str) -> bool:
        """Stop loading this graph in this process, since it failed; whether compiling anew may do better.

        It may, unless this process made the graph, which is then deleted. A graph of another process stays: it may be
        right where it was made, and where it is not, the graph compiled in its place is newer and so found first.
        """
        self.stop_loading(stem)
        is_own = stem in self._own
        if is_own:
            self._folder.remove(stem + GRAPH)
        return not is_own

    def stop_loading(self, stem: str) -> None:
        """Leave this graph alone in this process."""
        with self._lock:
            self._distrusted.add(stem)

    def statistics(self) -> dict[str, Any]:
        """The folder and what this process did there, as JSON.

        lookups: calls of `candidates`; loaded: those that found a graph. misses: why others did not, or were not saved.
        """
        with self._lock:
            misses = [{"block": block, "reason": reason, "count": n} for (block, reason), n in self._misses.items()]
            counts = {"lookups": self._lookups, "loaded": self._loaded, "saved": self._saved}
            return {"folder": str(self._folder), **counts, "misses": misses}

    @contextlib.contextmanager
    def _fail_open(
        self, name: str, failed: str, breaker: CircuitBreaker, interrupts: tuple[type[BaseException], ...]
    ) -> Iterator[None]:
        """Note why the work inside failed, in place of raising it. failed: what to say before the error."""
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

    def _note_saved(self, stem: str) -> None:
        with self._lock:
            self._saved += 1
            self._own.add(stem)
            is_due = self._saved % _PRUNE_EVERY == 1
        self._saving.record_success()
        if is_due:
            try:
                self._folder.prune(self._max_bytes())
            except OSError as error:
                log.warning("saved graphs: the folder cannot be looked through: %s", error)

    def _note(self, name: str, reason: str, level: int = logging.DEBUG) -> None:
        """Count a miss, and log the first of each reason."""
        reason = manifest.printable(reason)
        with self._lock:
            if (name, reason) not in self._misses and len(self._misses) >= _MOST_REASONS:
                return
            count = self._misses[name, reason] = self._misses.get((name, reason), 0) + 1
            first_of_reason = count == 1 and sum(known == reason for _, known in self._misses) == 1
        if first_of_reason:
            log.log(level, "saved graphs, %s: %s", name, reason)
        emit("store", block=name, reason=reason)


class Saved:
    """One saved graph of a key. `with saved:` tries it: what fails inside ends there, and is the reason for a miss.

    facts: what it is good for, known without opening it. why: it was not used.
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
        """The graph, made of the bytes, which counts as loaded and as used now."""
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
            self.has_failed_disk, self.why = True, self._store._unreadable(error)
        elif is_shortage(error):
            self.why = BadEntry(f"there was too little memory for it: {error}")
        else:  # torch reading its own bytes, and the kernels' libraries, raise anything; it all means the same
            self._store.stop_loading(self._found.stem)
            self.why = BadEntry(f"it cannot be loaded: {type(error).__name__}: {error}", logging.WARNING)
        return True


def _facts(stored: dict[str, Any]) -> Facts:
    try:
        return Facts(
            static_ones=tuple((int(index), int(dimension)) for index, dimension in stored["static_ones"]),
            weights=int(stored["weights"]),
            changed=tuple(int(index) for index in stored["changed"]),
            dynamic=bool(stored["dynamic"]),
            values=tuple(str(value) for value in stored["values"]),
            fixed=_sizes(stored["fixed"]),
            grown=_sizes(stored["grown"]),
            ones=tuple((_sizes(sizes), str(asked)) for sizes, asked in stored["ones"]),
            asked=str(stored["asked"]),
        )
    except (KeyError, TypeError, ValueError):
        raise BadEntry("its manifest is damaged") from None


def _sizes(stored: Any) -> tuple[tuple[int, int, int], ...]:
    return tuple((int(index), int(dimension), int(size)) for index, dimension, size in stored)

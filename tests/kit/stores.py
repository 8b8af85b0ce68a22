"""A store over cheap stand-ins for compiled graphs: what is saved is a few bytes, what is loaded is counted."""

from __future__ import annotations

import errno
import sys
from types import SimpleNamespace

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.compiled_graph import CompiledGraph, Facts
from comfy_accel.accel.fingerprint.kinds import GraphKey, Kind
from comfy_accel.accel.store.folder import Folder
from comfy_accel.accel.store.graph_store import GraphStore

CPU = [torch.device("cpu")]


def key(name="a"):
    return GraphKey(Kind("Block", name * 8, ("weight",)), ("tuple", ("tensor",)), (), "inductor")


def store(path, **options):
    return GraphStore(Folder(path / "graphs"), **options)


def saving(path):
    """A cache that saves its graphs in the folder."""
    cache = GraphCache()
    cache.store = store(path)
    return cache


def graph(data=b"code"):
    facts = Facts(static_ones=((1, 0),), weights=1, changed=(2,))
    return CompiledGraph(run=lambda tensors: data, guards=lambda tensors: True, facts=facts, save=lambda: data)


def save(store, name="a", data=b"code"):
    return store.save(key(name), "Block", CPU, graph(data))


def built(store, build, fits=lambda graph: True, of=None, values=(), interrupts=(), may_serve=lambda facts: True):
    """The first saved graph that fits, made by `build(data, facts)`; None for a miss."""
    for saved in store.candidates(of or key(), "Block", CPU, values, interrupts):
        if may_serve(saved.facts):
            with saved:
                made = build(saved.read(), saved.facts)
                if fits(made):
                    return saved.use(made)
    return None


def load(store, name="a", fits=lambda graph: True):
    """What was built from the saved bytes: (bytes, facts); None for a miss."""
    found = built(store, lambda data, facts: CompiledGraph(lambda t: data, lambda t: True, facts), fits, key(name))
    return None if found is None else (found.run(()), found.facts)


def reasons(store):
    return [row["reason"] for row in store.statistics()["misses"]]


def as_on_windows(monkeypatch, module):
    """This module alone believes that it runs on Windows."""
    monkeypatch.setattr(module, "sys", SimpleNamespace(**{**vars(sys), "platform": "win32"}))


def held_open():
    """What Windows answers to whoever replaces or deletes a file that somebody has open."""
    return PermissionError(errno.EACCES, "The process cannot access the file because it is being used by another one")

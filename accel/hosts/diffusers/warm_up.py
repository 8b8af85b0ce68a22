"""Warm-up: one short call of a diffusers pipeline, so that compiling is done before the first real image."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from ...core.events import log, subscribe
from ...core.sentences import counted


@dataclass
class WarmUp:
    """What a warm-up did; `str` gives a one-line summary.

    seconds: of the call. compiled, loaded: names of kinds of blocks whose graph was compiled, or read from the graph
    store. failed: of those that run eagerly.
    """

    seconds: float = 0.0
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        uncompiled = f", {len(self.failed)} not possible" if self.failed else ""
        graphs = counted(len(self.compiled), "graph")
        return f"Warm-up: {graphs} compiled, {len(self.loaded)} loaded{uncompiled}, in {self.seconds:.1f} s."


def warm_up(pipe: Any, **call_arguments: Any) -> WarmUp:
    """Call an accelerated pipeline once and discard the image; its graphs serve every other size and batch.

    call_arguments: as for the pipeline itself, at any size. `num_inference_steps` is the fewest by default; pass 2 for
        pipelines with two transformers. torch's random state is left as it was; a `generator` passed here is used.
    """
    done, thread = WarmUp(), get_ident()
    lists = {"compile_end": done.compiled, "graph_loaded": done.loaded, "compile_failed": done.failed}

    def note(event: str, data: dict[str, Any]) -> None:
        if event in lists and get_ident() == thread:
            lists[event].append(data["name"])

    unsubscribe, started = subscribe(note), time.perf_counter()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            pipe(**{"num_inference_steps": _fewest_steps(pipe, call_arguments), **call_arguments})
    finally:
        unsubscribe()
    done.seconds = time.perf_counter() - started
    log.info("%s", done)
    return done


def _fewest_steps(pipe: Any, given: dict[str, Any]) -> int:
    """1, or as many as leave one: image-to-image leaves out the first 1 - strength of them."""
    strength = inspect.signature(pipe.__call__).parameters.get("strength")
    return 1 if strength is None else math.ceil(1 / (given.get("strength") or strength.default or 1))

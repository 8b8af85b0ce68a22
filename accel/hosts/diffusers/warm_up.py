"""Warm-up: one short call of a diffusers pipeline, so that compiling is done before the first real image."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from ...cache.graph_cache import shared
from ...core.events import log
from ...core.sentences import count_nouns


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did, in seconds, and graphs compiled or read from the store; `str` gives a one-line summary."""

    seconds: float
    compiled: int
    loaded: int

    def __str__(self) -> str:
        graphs = count_nouns(self.compiled, "graph")
        return f"Warm-up: {graphs} compiled, {self.loaded} loaded, in {self.seconds:.1f} s."


def warm_up(pipe: Any, **call_arguments: Any) -> WarmUp:
    """Call an accelerated pipeline once and discard the image; its graphs serve every other size and batch.

    call_arguments: as for the pipeline itself, at any size. `num_inference_steps` is the fewest by default; pass 2 for
        pipelines with two transformers. torch's random state is left as it was; a `generator` passed here is used.
    """
    strength = inspect.signature(pipe.__call__).parameters.get("strength")
    # Image-to-image leaves out the first 1 - strength of the steps.
    share = 1 if strength is None else call_arguments.get("strength") or strength.default or 1
    before, started = shared.statistics(), time.perf_counter()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        pipe(**{"num_inference_steps": math.ceil(1 / share), **call_arguments})
    now = shared.statistics()
    compiled, loaded = (now[name] - before[name] for name in ("compilations", "loaded"))
    done = WarmUp(time.perf_counter() - started, compiled, loaded)
    log.info("%s", done)
    return done

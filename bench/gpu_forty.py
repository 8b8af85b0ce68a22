"""The part "sizes40" of `bench gpu`: forty sizes in a row with CUDA graphs, under a budget that does not hold them all.

Import it after `inprocess.boot` and `pack.load`.
"""

from __future__ import annotations

from collections.abc import Iterator

from comfy_accel.accel.core.errors import one_line

from . import gpu_device
from .gpu_cases import CAPTURED, Case, TimeBudget, forty_sizes, skipped
from .gpu_contenders import CACHE_BYTES, Lineup, ran_as
from .gpu_runs import Runs
from .report import Row

BUDGET_BYTES = 6 << 30

STEPS = 6
"""Of each image: enough for its model call to be recorded, and replayed."""


def rows(name: str, runs: Runs, lineup: Lineup, budget: TimeBudget) -> Iterator[Row]:
    """A row for each size, in their order, with the memory that is held after its image."""
    cache = lineup.cache
    cache.set_budget(max_bytes=BUDGET_BYTES)
    device = runs.model.load_device
    evictions = cache.statistics()["evictions"]
    try:
        for number, (width, height) in enumerate(forty_sizes()):
            case = Case(width, height, 1)
            if not budget.fits():
                yield skipped("sizes40", name, f"sizes {number + 1} to 40", CAPTURED)
                return
            row = {"part": "sizes40", "model": name, "number": number + 1, "size": case.size, "contender": CAPTURED}
            try:
                with lineup.running(CAPTURED) as spent:
                    seconds = runs.run(lineup.patcher(CAPTURED), case, STEPS).seconds
            except Exception as error:
                yield {**row, "failed": one_line(error)}
                return
            known = cache.statistics()
            yield {
                **row,
                "image_s": round(seconds, 3),
                "cache_mb": round(known["bytes"] / 2**20, 1),
                "budget_mb": BUDGET_BYTES >> 20,
                "graphs_mb": round((lineup.graph_bytes(CAPTURED) or 0) / 2**20, 1),
                "held_mb": gpu_device.held_mb(device),
                "evictions": known["evictions"] - evictions,
                # Replays begin with the fifth call of a sort, and a run of a size that is known has all of them.
                "ran_as": ran_as(CAPTURED, spent["replays"], 1),
                **spent,
            }
    finally:
        cache.set_budget(max_bytes=CACHE_BYTES)

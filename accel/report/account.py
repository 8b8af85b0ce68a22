"""What a run gained and paid, and how that is known: nodes' lines, panel, report and API read this account."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compile.benchmark import SLOWER, Calls
from ..core.reasons import Reason
from ..step_cache.run import FULL, SKIPPED

LEAST_SAVED = 0.05  # seconds: less than this is within what two equal runs differ by


class Saving(NamedTuple):
    """seconds: None where unknown; negative where the run was slower. how: how this is known; None where nothing was
    to be saved. took: seconds of the run that it is estimated from; 0 where the run itself was timed."""

    seconds: float | None = None
    how: Reason | None = None
    took: float = 0.0

    def add(self, other: Saving) -> Saving:
        """The sum of what is known of two samplings of one prompt."""
        if self.seconds is not None and other.seconds is not None:
            return Saving(self.seconds + other.seconds, self.how, self.took + other.took)
        if self.seconds is not None or other.seconds is None and other.how is None:
            return self
        return other

    def limit_to(self, seconds: float) -> float | None:
        """The seconds saved in a run that worked for so many: no more than all of it can have been faster."""
        if self.seconds is None or self.took <= seconds:
            return self.seconds
        return self.seconds * max(seconds, 0.0) / self.took


@dataclass(frozen=True)
class Account:
    """What one image gained and paid, in seconds. worked: by sampling, without loading the model and `paid`, for making
    and comparing graphs. owed: paid for the model since the start, and not yet saved again. images: in the batch."""

    worked: float
    savings: Sequence[Saving] = ()
    paid: float = 0.0
    owed: float = 0.0
    images: int = 1

    @property
    def saved(self) -> float | None:
        """By what ran, against the same work without Accel; None where nothing was measured."""
        known = [seconds for saving in self.savings if (seconds := saving.limit_to(self.worked)) is not None]
        return sum(known) if known and self.worked > 0 else None

    @property
    def gained(self) -> float | None:
        """By the image, all in all; negative where it took longer than without Accel."""
        return None if self.saved is None else self.saved - self.paid

    @property
    def times(self) -> float | None:
        """How many times as long the image would have taken without Accel."""
        return None if self.saved is None else (self.worked + self.saved) / (self.worked + self.paid)

    @property
    def pays_back_after(self) -> int | None:
        """How many more images like this one it takes until all that was paid is saved; None where they save none."""
        saved = self.saved or 0.0
        return max(0, math.ceil(self.owed / saved * self.images)) if saved >= LEAST_SAVED else None

    @property
    def how(self) -> list[Reason]:
        """How the saving is known, or why it is not."""
        return [saving.how for saving in self.savings if saving.how is not None] or [Reason("saved_unmeasured")]

    def gain(self) -> list[Reason]:
        """What the image gained, in parts for people; empty where that is unknown."""
        if self.gained is None:
            return []
        if not self.matters(self.gained):
            return [Reason("line_equal")]
        if self.gained < 0:
            return [Reason("line_slower", seconds=format_seconds(-self.gained))]
        return [
            Reason("line_times", times=f"{self.times:.1f}"),
            Reason("line_saved", seconds=format_seconds(self.gained)),
        ]

    def describe_later_images(self) -> list[Reason]:
        """What later images gain, which pay nothing, where this one has paid; empty where that is unknown."""
        if self.paid < LEAST_SAVED or self.saved is None or self.saved < 0 or not self.matters(self.saved):
            return []
        return [Reason("line_later", times=f"{1 + self.saved / self.worked:.1f}", seconds=format_seconds(self.saved))]

    def matters(self, seconds: float) -> bool:
        """Whether so many seconds are more than two equal runs differ by."""
        return abs(seconds) >= max(LEAST_SAVED, (SLOWER - 1) * self.worked)

    def to_json(self) -> dict[str, Any]:
        named = ("worked", "paid", "saved", "gained", "times", "owed", "pays_back_after")
        said = {"gain": [*self.gain(), *self.describe_later_images()], "how": self.how}
        return {
            **{name: getattr(self, name) for name in named},
            **{name: [part.to_json() for part in parts] for name, parts in said.items()},
        }


def format_seconds(seconds: float) -> str:
    """Seconds as people say them, such as "0.02", "2.1" and "14"."""
    return f"{seconds:.{0 if seconds >= 10 else 1 if seconds >= 0.1 else 2}f}"


def compute_compile_saving(
    calls: int, measured: Mapping[Calls, int], is_measured: bool = True, is_traced: bool = False
) -> Saving:
    """The time saved by compiled calls of blocks, against running them eagerly. measured: those of all `calls` whose
    graph was timed against its block. is_measured: whether any are. is_traced: the backend compiles nothing."""
    timed = [(calls.seconds, count) for calls, count in measured.items() if calls.seconds is not None]
    if not calls:
        return Saving(None, Reason("compiling_unused"))
    if is_traced:
        return Saving(None, Reason("compiling_traced"))
    if not timed:
        return Saving(None, Reason("compiling_unsure") if is_measured else Reason("compiling_unmeasured"))
    compiled, eager = (sum(seconds[way] * count for seconds, count in timed) for way in (0, 1))
    return Saving(eager - compiled, Reason("compiling_saved"), compiled)


def compute_skip_saving(steps: str, began: Sequence[float], disturbed: Sequence[float] = ()) -> Saving:
    """The time saved by skipped steps, against full ones. began: of all steps, by one clock; the first, and the last
    without an end, are left out, as are those with a time in `disturbed`, when something was compiled, loaded or
    compared."""
    if SKIPPED not in steps:
        return Saving(None, Reason("skipping_unused"))
    lengths: dict[str, list[float]] = {FULL: [], SKIPPED: []}
    for index in range(1, min(len(steps), len(began)) - 1):
        start, end = began[index], began[index + 1]
        if not any(start <= moment <= end for moment in disturbed):
            lengths[steps[index]].append(end - start)
    if not all(lengths.values()):
        return Saving(None, Reason("skipping_unsure"))
    full, skipped = (statistics.median(lengths[kind]) for kind in (FULL, SKIPPED))
    return Saving(steps.count(SKIPPED) * (full - skipped), Reason("skipping_saved"))

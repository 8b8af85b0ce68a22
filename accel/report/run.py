"""One sampling run, and what it saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.reasons import Reason

LEAST_SAVED = 0.05
"""Seconds: less than this is within what two equal runs differ by."""


class Saving(NamedTuple):
    """seconds: None where unknown; negative where the run was slower. how: how this is known;
    None where nothing was to be saved."""

    seconds: float | None = None
    how: Reason | None = None

    def as_json(self) -> dict[str, Any]:
        """{"seconds", "how"}, the latter as text."""
        return {"seconds": self.seconds, "how": "" if self.how is None else str(self.how)}


@dataclass
class Run:
    """One sampling run.

    latent: shape of the noise, such as [B, C, H, W]. contexts: prompt lengths, tokens.
    compiling, caching: settings of the compiler and of DeepCache; None where the run did without.
    eager_calls: calls of blocks that could have run compiled. left_eager: by reason, how many blocks nobody tried to
        compile. fallbacks: `Fallbacks.rows` of this run.
    steps_taken: DeepCache's steps, such as "FSSF"; why_full: what of the model or the sampler made all of them full.
    model_calls: calls of the whole model, where capturing is on; replays: those of them that replayed a CUDA graph.
    captures: calls captured in this run, in capture_seconds.
    pixels: width and height of the image; None where the latent is none of an image. working_seconds: without what was
        compiled, loaded and captured in it. compiled_total: seconds that compiling this model took since the start.
    times: how many times as long the same image would have taken; None where unknown. pays_back_after: images until
        compiling has saved what it took; None where unknown, or where nothing was compiled.
    lines: by node id, what it gained, in parts (`headline.headlines`).
    loaded_share: fraction of the weights that were on the device at the end. finished: unix seconds.
    """

    model: str = ""
    latent: tuple[int, ...] = ()
    steps: int | None = None
    sampler: str | None = None
    compiling: dict[str, Any] | None = None
    caching: dict[str, Any] | None = None
    contexts: tuple[int, ...] = ()
    seconds: float = 0.0
    finished: float = 0.0
    failed: bool = False
    loaded_share: float | None = None
    compiled_calls: int = 0
    eager_calls: int = 0
    blocks: int = 0
    kinds: int = 0
    left_eager: dict[Reason, int] = field(default_factory=dict)
    compilations: int = 0
    compile_seconds: float = 0.0
    loaded: int = 0
    load_seconds: float = 0.0
    model_calls: int = 0
    replays: int = 0
    captures: int = 0
    capture_seconds: float = 0.0
    evicted: int = 0
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    steps_taken: str = ""
    why_full: str | None = None
    by_compiling: Saving = Saving()
    by_skipping: Saving = Saving()
    pixels: tuple[int, int] | None = None
    compiled_total: float = 0.0
    lines: dict[str, list[Reason]] = field(default_factory=dict)

    @property
    def working_seconds(self) -> float:
        return self.seconds - self.compile_seconds - self.load_seconds - self.capture_seconds

    @property
    def times(self) -> float | None:
        return self.times_by(self.by_compiling, self.by_skipping)

    @property
    def pays_back_after(self) -> int | None:
        saved = self.by_compiling.seconds
        if not self.compiled_total or saved is None or saved < LEAST_SAVED:
            return None
        return math.ceil(self.compiled_total / saved * (self.latent[0] if self.latent else 1))

    def times_by(self, *savings: Saving) -> float | None:
        """`times` by these savings alone."""
        known = [saving.seconds for saving in savings if saving.seconds is not None]
        working = self.working_seconds
        return (working + sum(known)) / working if known and working > 0 and not self.failed else None

    def as_json(self) -> dict[str, Any]:
        """For the panel and the report."""
        values = {**vars(self), "latent": list(self.latent), "contexts": list(self.contexts)}
        return {
            **values,
            "left_eager": {str(reason): blocks for reason, blocks in self.left_eager.items()},
            "left_eager_reasons": [{**why.as_json(), "blocks": blocks} for why, blocks in self.left_eager.items()],
            "lines": self.lines_as_json(),
            "working_seconds": self.working_seconds,
            "times": self.times,
            "pays_back_after": self.pays_back_after,
            "by_compiling": self.by_compiling.as_json(),
            "by_skipping": self.by_skipping.as_json(),
            **together((self.by_compiling, self.by_skipping)),
        }

    def lines_as_json(self) -> dict[str, list[dict[str, Any]]]:
        """`lines` with reasons as JSON."""
        return {node: [part.as_json() for part in line] for node, line in self.lines.items()}


def together(parts: Sequence[Saving]) -> dict[str, Any]:
    """The sum of what is known, for pages: {"saved_seconds", "saved_how", "saved_reasons"}; None, text, JSON."""
    known = [part.seconds for part in parts if part.seconds is not None]
    reasons = [part.how for part in parts if part.how is not None] or [Reason("saved_unmeasured")]
    return {
        "saved_seconds": sum(known) if known else None,
        "saved_how": " ".join(map(str, reasons)),
        "saved_reasons": [reason.as_json() for reason in reasons],
    }

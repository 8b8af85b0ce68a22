"""One sampling run, and what it saved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..core.fallbacks import rows_of
from ..core.reasons import Reason
from ..core.sentences import OF_CUDA_GRAPHS

LEAST_SAVED = 0.05
"""Seconds: less than this is within what two equal runs differ by."""


_EACH = {"compiling": Reason("compiling_saved_each"), "skipping": Reason("skipping_saved_each")}
"""How the sum over samplers is known; one sentence, however many they are (an upscaler's tiles)."""


class Saving(NamedTuple):
    """seconds: None where unknown; negative where the run was slower. how: how this is known;
    None where nothing was to be saved."""

    seconds: float | None = None
    how: Reason | None = None

    def as_json(self) -> dict[str, Any]:
        """{"seconds", "how"}, the latter as text."""
        return {"seconds": self.seconds, "how": "" if self.how is None else str(self.how)}

    def with_next(self, other: Saving) -> Saving:
        """The sum of what is known of two samplings of one prompt."""
        known = [saving for saving in (self, other) if saving.seconds is not None]
        if len(known) < 2:
            return known[0] if known else self if other.how is None else other
        how = self.how if self.how == other.how else _EACH[self.how.code.partition("_")[0]]
        return Saving(self.seconds + other.seconds, how)


@dataclass
class Run:
    """One sampling run, or all `samplings` of one prompt together.

    prompt: the id of the prompt; None for a run of none.
    latent: shape of the noise, such as [B, C, H, W]; of the last sampling. contexts: prompt lengths, tokens.
    compiling, caching: settings of the compiler and of DeepCache; None where the run did without.
    eager_calls: calls of blocks that could have run compiled. left_eager: by reason, how many blocks nobody tried to
        compile. fallbacks: calls that ran uncompiled or were not captured, by (block, reason).
    target_db: the quality that DeepCache was asked for. estimated_db: what it takes to be reached, None where it
        skipped nothing. skipped_work: the share of the work that it saved.
    plan: the steps of the last sampler with a quality, as `DeepCacheRun.plan` has them.
    steps_taken: DeepCache's steps, such as "FSSF", as `DeepCacheRun.letters` has them; why_full: what of the model or
        the sampler made all of them full.
    model_calls: calls of the whole model, where capturing is on; replays: those of them that replayed a CUDA graph.
    captures: calls captured in this run, in capture_seconds.
    pixels: width and height of the image; None where the latent is none of an image. prepare_seconds: before the
        sampler's first call, most of it for loading the model. working_seconds: without these, and without what was
        compiled, loaded and captured. compiled_seconds: by model, what compiling it took since the start.
    times: how many times as long the same image would have taken; None where unknown. pays_back_after: images until
        compiling has saved what it took; None where unknown, or where nothing was compiled.
    lines: by node id, what it gained, in parts (`headline.headline`).
    loaded_share: fraction of the weights that were on the device at the end. finished: unix seconds.
    """

    model: str = ""
    prompt: str | None = None
    samplings: int = 1
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
    fallbacks: dict[tuple[str, Reason], int] = field(default_factory=dict)
    steps_taken: str = ""
    why_full: str | None = None
    target_db: float | None = None
    estimated_db: float | None = None
    skipped_work: float | None = None
    plan: list[tuple[str, float, float | None]] = field(default_factory=list)
    by_compiling: Saving = Saving()
    by_skipping: Saving = Saving()
    pixels: tuple[int, int] | None = None
    prepare_seconds: float = 0.0
    compiled_seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[Reason]] = field(default_factory=dict)

    @property
    def working_seconds(self) -> float:
        return self.seconds - self.prepare_seconds - self.compile_seconds - self.load_seconds - self.capture_seconds

    @property
    def compiled_total(self) -> float:
        return sum(self.compiled_seconds.values())

    @property
    def is_traced(self) -> bool:
        """Whether what stands for compiled blocks ran uncompiled: the backend traces them and no more."""
        return (self.compiling or {}).get("backend") == "eager"

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

    def gain_by(self, *savings: Saving) -> list[Reason]:
        """What these savings come to, in parts for people; empty where it is unknown."""
        times = self.times_by(*savings)
        if times is None:
            return []
        saved = (times - 1) * self.working_seconds
        if abs(saved) < LEAST_SAVED:
            return [Reason("line_equal")]
        if saved < 0:
            return [Reason("line_slower", seconds=rounded(-saved))]
        return [Reason("line_times", times=f"{times:.2f}"), Reason("line_saved", seconds=rounded(saved))]

    def uncompiled(self) -> list[Reason]:
        """Why blocks ran uncompiled, the most frequent reason first."""
        reasons = [key for key in self.fallbacks if key[1].code not in OF_CUDA_GRAPHS]
        return [why for _, why in sorted(reasons, key=self.fallbacks.__getitem__, reverse=True)]

    def with_next(self, other: Run) -> Run:
        """This and the next sampling of the same prompt, as one: a hires fix, say, or a base model and a refiner."""
        both = (self, other)
        steps = [run.steps for run in both if run.steps is not None]
        shares = [run.loaded_share for run in both if run.loaded_share is not None]
        return replace(
            other,
            model=_listed(self.model, other.model),
            steps=sum(steps) if steps else None,
            sampler=_listed(self.sampler or "", other.sampler or "") or None,
            compiling=other.compiling or self.compiling,
            caching=other.caching or self.caching,
            contexts=tuple(sorted({*self.contexts, *other.contexts})),
            failed=self.failed or other.failed,
            loaded_share=min(shares, default=None),
            blocks=max(self.blocks, other.blocks),
            kinds=max(self.kinds, other.kinds),
            left_eager=dict(Counter(self.left_eager) | Counter(other.left_eager)),
            fallbacks=dict(Counter(self.fallbacks) + Counter(other.fallbacks)),
            steps_taken=self.steps_taken + other.steps_taken,
            why_full=self.why_full or other.why_full,
            target_db=min((run.target_db for run in both if run.target_db is not None), default=None),
            estimated_db=min((run.estimated_db for run in both if run.estimated_db is not None), default=None),
            skipped_work=_mean_share(both),
            plan=other.plan or self.plan,
            by_compiling=self.by_compiling.with_next(other.by_compiling),
            by_skipping=self.by_skipping.with_next(other.by_skipping),
            compiled_seconds={**self.compiled_seconds, **other.compiled_seconds},
            lines={**self.lines, **other.lines},
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
        )

    def as_json(self) -> dict[str, Any]:
        """For the panel and the report."""
        values = {name: value for name, value in vars(self).items() if name != "left_eager"}
        return {
            **values,
            "latent": list(self.latent),
            "contexts": list(self.contexts),
            "fallbacks": rows_of(self.fallbacks),
            "compiled_total": self.compiled_total,
            "left_eager_reasons": [{**why.as_json(), "blocks": blocks} for why, blocks in self.left_eager.items()],
            "lines": self.lines_as_json(),
            "working_seconds": self.working_seconds,
            "times": self.times,
            "gain": [part.as_json() for part in self.gain_by(self.by_compiling, self.by_skipping)],
            "pays_back_after": self.pays_back_after,
            "by_compiling": self.by_compiling.as_json(),
            "by_skipping": self.by_skipping.as_json(),
            **together((self.by_compiling, self.by_skipping)),
        }

    def lines_as_json(self) -> dict[str, list[dict[str, Any]]]:
        """`lines` with reasons as JSON."""
        return {node: [part.as_json() for part in line] for node, line in self.lines.items()}


_ADDED = ("samplings", "seconds", "prepare_seconds", "compiled_calls", "eager_calls", "compilations", "compile_seconds")
_ADDED += ("loaded", "load_seconds", "model_calls", "replays", "captures", "capture_seconds", "evicted")
"""What two samplings have together."""


def _listed(names: str, name: str) -> str:
    """The names, "SDXL + Flux", with another one unless it is among them."""
    return " + ".join(dict.fromkeys(filter(None, (*names.split(" + "), name))))


def rounded(seconds: float) -> str:
    """Seconds as people say them, such as "2.1" and "14"."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def together(parts: Sequence[Saving]) -> dict[str, Any]:
    """The sum of what is known, for pages: {"saved_seconds", "saved_how", "saved_reasons"}; None, text, JSON."""
    known = [part.seconds for part in parts if part.seconds is not None]
    reasons = [part.how for part in parts if part.how is not None] or [Reason("saved_unmeasured")]
    return {
        "saved_seconds": sum(known) if known else None,
        "saved_how": " ".join(map(str, reasons)),
        "saved_reasons": [reason.as_json() for reason in reasons],
    }


def _mean_share(runs: Sequence[Run]) -> float | None:
    """The share of the work that runs saved together, by their steps."""
    known = [(run.skipped_work, len(run.steps_taken)) for run in runs if run.skipped_work is not None]
    steps = sum(count for _, count in known)
    return sum(share * count for share, count in known) / steps if steps else None

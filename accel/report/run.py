"""One sampling run: its facts, and the account of each of its nodes.

A fact is a field of one record. The field defines how two samplings of one prompt are merged, and its name is the
fact's name in events, in the report and in the panel's JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import add, or_
from typing import Any

from ..cache.entry import Lease
from ..core.fallbacks import rows_of
from ..core.reasons import Reason
from ..core.sentences import OF_CUDA_GRAPHS
from ..step_cache.run import FULL, SKIPPED, DeepCacheRun
from .account import Account, Saving, compute_compile_saving


def fact(default: Any, joined: Callable[[Any, Any], Any]) -> Any:
    """A field of a `Record`. default: a value, or the type of an empty one. joined: merges two samplings' values."""
    initial = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**initial, metadata={"joined": joined})


class Record:
    """Base of the dataclasses that hold facts."""

    def merge(self, other: Any) -> Any:
        """This and the next sampling of one prompt, merged (a base model and a refiner, say)."""
        rules = {one.name: one.metadata["joined"] for one in fields(self) if one.metadata}  # type: ignore[arg-type]  # of a subclass
        return replace(other, **{name: rule(getattr(self, name), getattr(other, name)) for name, rule in rules.items()})


def _sum(one: float | None, other: float | None) -> float | None:
    return one + other if one is not None and other is not None else _least(one, other)


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


def _add_name(names: str | None, name: str | None) -> str | None:
    """The names, "SDXL + Flux", with another one unless it is among them."""
    every = (*(names or "").split(" + "), *(name or "").split(" + "))
    return " + ".join(dict.fromkeys(filter(None, every))) or name


@dataclass(frozen=True)
class Totals(Record):
    """Counts of a run's calls, made by the host: of blocks' graphs, of blocks that could have run compiled, of whole
    models where capturing is on, with those that replayed a CUDA graph. contexts: prompt lengths, tokens."""

    compiled_calls: int = fact(0, add)
    eager_calls: int = fact(0, add)
    compare_seconds: float = fact(0.0, add)
    model_calls: int = fact(0, add)
    replays: int = fact(0, add)
    contexts: tuple[int, ...] = fact((), lambda one, other: tuple(sorted({*one, *other})))
    by_compiling: Saving = fact(Saving(), Saving.add)

    @classmethod
    def from_lease(cls, lease: Lease, backend: str, is_measured: bool, **others: Any) -> Totals:
        """The totals of a run whose lease is over. is_measured: graphs were benchmarked against their blocks."""
        saved = compute_compile_saving(lease.calls, lease.measured, is_measured, backend == "eager")
        calls, took = lease.calls, lease.compare_seconds
        return cls(compiled_calls=calls, replays=lease.replays, compare_seconds=took, by_compiling=saved, **others)


@dataclass(frozen=True)
class Skipping(Record):
    """What DeepCache did in a run. steps_taken: FULL or SKIPPED for each step, such as "FSSF". why_full: why all had to
    be full. target_db: the quality planned for. skipped_work: fraction of the work saved."""

    steps_taken: str = fact("", add)
    why_full: str | None = fact(None, lambda one, other: one or other)
    target_db: float | None = fact(None, _least)
    skipped_work: float | None = None
    by_skipping: Saving = fact(Saving(), Saving.add)

    @classmethod
    def from_lease(cls, run: DeepCacheRun) -> Skipping:
        """What a run has come to."""
        return cls(run.letters, run.why_full, run.settings.quality, run.skipped_work)

    @property
    def full_steps(self) -> int:
        return self.steps_taken.count(FULL)

    @property
    def skipped_steps(self) -> int:
        return self.steps_taken.count(SKIPPED)

    def merge(self, other: Skipping) -> Skipping:
        both = super().merge(other)
        shares = [(one.skipped_work, len(one.steps_taken)) for one in (self, other) if one.skipped_work is not None]
        steps = sum(count for _, count in shares)
        return replace(both, skipped_work=sum(share * count for share, count in shares) / steps if steps else None)


@dataclass(eq=False)
class Run(Record):
    """One sampling run, or all `samplings` of one prompt together. prompt: its id; None for a run of none.

    latent: shape of the noise, such as [B, C, H, W]. pixels: width and height of the image; None where there is none.
    compiling, caching: settings of the compiler and of DeepCache; None where the run did without.
    steps_done: fewer than `steps` where the run was interrupted; None where another error ended it.
    prepare_seconds: until the sampler's first call, mostly for loading the model. finished: unix seconds.
    loaded_share: fraction of the weights on the device at the end. survey_seconds: for finding the model's blocks.
    is_beside: graphs were traced alone, and their code made beside the image.
    fallbacks: calls that ran uncompiled or were not captured, by (block, reason). lines: by node id (`facts.line_of`).
    owed: by model, seconds that were paid since the start and are not yet saved again.
    graphs_would_give: how many times as fast a step would be with CUDA graphs, where torch's allocator alone prevents
        them and they would pay.
    """

    model: str = fact("", _add_name)
    prompt: str | None = None
    samplings: int = fact(1, add)
    latent: tuple[int, ...] = ()
    pixels: tuple[int, int] | None = None
    steps: int | None = fact(None, _sum)
    steps_done: int | None = fact(None, _sum)
    sampler: str | None = fact(None, _add_name)
    compiling: dict[str, Any] | None = fact(None, lambda one, other: other or one)
    caching: dict[str, Any] | None = fact(None, lambda one, other: other or one)
    seconds: float = fact(0.0, add)
    prepare_seconds: float = fact(0.0, add)
    finished: float = 0.0
    failed: bool = fact(False, or_)
    loaded_share: float | None = fact(None, _least)
    totals: Totals = fact(Totals(), Totals.merge)
    skipping: Skipping = fact(Skipping(), Skipping.merge)
    blocks: int = fact(0, max)
    kinds: int = fact(0, max)
    fallbacks: Mapping[tuple[str, Reason], int] = fact(dict, lambda one, other: Counter(one) + Counter(other))
    compilations: int = fact(0, add)
    compile_seconds: float = fact(0.0, add)
    is_beside: bool = fact(False, or_)
    loaded: int = fact(0, add)
    load_seconds: float = fact(0.0, add)
    captures: int = fact(0, add)
    capture_seconds: float = fact(0.0, add)
    survey_seconds: float = fact(0.0, add)
    owed: dict[str, float] = fact(dict, or_)
    lines: dict[str, list[Reason]] = fact(dict, or_)
    graphs_would_give: float | None = fact(None, lambda one, other: other or one)

    @property
    def nodes(self) -> list[str]:
        """The ids of the nodes that took part."""
        ids = [settings.get("node") for settings in (self.compiling, self.caching) if settings]
        return list(dict.fromkeys(node for node in ids if node is not None))

    @property
    def paid(self) -> dict[str, float]:
        """Seconds, of `seconds`, for making graphs and comparing them, each by the code of what to say of it."""
        made = {"line_traced_once" if self.is_beside else "line_compiled": self.compile_seconds}
        made |= {"line_loaded": self.load_seconds, "line_captured": self.capture_seconds}
        return {**made, "line_surveyed": self.survey_seconds, "line_compared": self.totals.compare_seconds}

    @property
    def is_traced(self) -> bool:
        """Whether what stands for compiled blocks ran uncompiled: the backend traces them and no more."""
        return (self.compiling or {}).get("backend") == "eager"

    def account(self, node: str | None = None) -> Account:
        """What the run gained and paid. node: by what this node did in it alone."""
        own = [bool(settings) and node in (None, settings.get("node")) for settings in (self.compiling, self.caching)]
        savings = (self.totals.by_compiling, self.skipping.by_skipping)
        return Account(
            worked=self.seconds - self.prepare_seconds - sum(self.paid.values()),
            savings=() if self.failed else [saving for saving, is_own in zip(savings, own, strict=True) if is_own],
            paid=sum(self.paid.values()) if own[0] else 0.0,
            owed=sum(self.owed.values()) if own[0] else 0.0,
            images=self.latent[0] if self.latent else 1,
        )

    def reasons(self) -> dict[Reason, Counter[str]]:
        """Why calls ran uncompiled or were not captured, the most frequent first, with the number of calls by block."""
        reasons: dict[Reason, Counter[str]] = {}
        for (block, why), calls in self.fallbacks.items():
            reasons.setdefault(why, Counter())[block] += calls
        return dict(sorted(reasons.items(), key=lambda row: -row[1].total()))

    def why_uncompiled(self) -> list[Reason]:
        """Why blocks ran uncompiled, the most frequent reason first."""
        return [why for why in self.reasons() if why.code not in OF_CUDA_GRAPHS]

    def to_json(self) -> dict[str, Any]:
        """JSON for the panel: all facts of the run and its records, and what follows from them."""
        facts = {**vars(self.skipping), **vars(self.totals), **vars(self)}
        return {
            **{name: value for name, value in facts.items() if not isinstance(value, (Record, Saving))},
            **{name: getattr(self.skipping, name) for name in ("full_steps", "skipped_steps")},
            "fallbacks": rows_of(self.fallbacks),
            "lines": self.lines_as_json(),
            "account": self.account().to_json(),
        }

    def lines_as_json(self) -> dict[str, list[dict[str, Any]]]:
        return {node: [part.to_json() for part in line] for node, line in self.lines.items()}

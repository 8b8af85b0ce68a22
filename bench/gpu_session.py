"""The part "session" of `bench gpu`: how long each contender makes a person wait beyond the steps themselves.

Each prompt is sampled twice; its stall is by how much the first time takes longer. Import it after `inprocess.boot`
and `pack.load`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from comfy_accel.accel.core.errors import one_line

from .compilations import RecompileLimit
from .gpu_cases import EAGER, Case, TimeBudget, in_session, skipped
from .gpu_contenders import Lineup
from .gpu_models import Subject
from .gpu_runs import FirstAnswer, difference, tolerance
from .report import Row
from .session import Session
from .session_plan import Step

STEPS, QUICK_STEPS = 6, 2
"""Of each image: a new size is compiled and recorded within the first one, so that the second has nothing of it."""


def rows(
    name: str,
    subject: Subject,
    contenders: Sequence[str],
    steps: Sequence[Step],
    quick: bool,
    folder: Path,
    budget: TimeBudget,
    limit: RecompileLimit,
) -> Iterator[Row]:
    """A row for each contender and prompt, eager first; each contender starts with nothing compiled.

    A contender whose time is over, or that fails, leaves the rest of its prompts out, with a row that says so.
    """
    eager: dict[str, Any] = {}
    given = in_session(subject.has_control_net, steps)
    for contender in contenders:
        if not budget.fits():
            yield skipped("session", name, "all prompts", contender)
            continue
        backend = "eager" if quick else "inductor"
        session, lineup = None, Lineup(None, backend, folder / contender, limit)
        for number, step in enumerate(given):
            if contender != EAGER and not budget.fits():
                yield skipped("session", name, f"prompts {number + 1} to {len(given)}", contender)
                break
            if contender != EAGER and step.name not in eager:
                why = "eager has no image of them"
                yield skipped("session", name, f"prompts {number + 1} to {len(given)}", contender, why)
                break
            try:
                if session is None:
                    session = TimedSession(subject, contender, quick, limit, lineup)
                yield {"part": "session", "model": name, **session.twice(step, eager)}
            except Exception as error:
                what = {"step": step.name, "contender": contender, "failed": one_line(error)}
                yield {"part": "session", "model": name, **what}
                break
        session = lineup = None
        gc.collect()
        torch.cuda.empty_cache()


class TimedSession(Session):
    """One contender's run through the prompts."""

    def __init__(self, subject: Subject, contender: str, quick: bool, limit: RecompileLimit, lineup: Lineup):
        self._lineup = lineup
        self._first = FirstAnswer()

        def apply(model: Any) -> Any:
            seen = model.clone()
            self._first.watch(seen)
            return lineup.applied(contender, seen)

        self._subject = subject
        super().__init__(subject.family, contender, subject.dtype, quick, limit, apply, device=subject.device)
        self._sampler_steps = QUICK_STEPS if quick else STEPS

    def _latent(self, step: Step) -> torch.Tensor:
        return self._subject.latent(Case(step.width, step.height, step.batch))

    def twice(self, step: Step, eager: dict[str, Any]) -> Row:
        """The prompt's row; `eager`: images by step and answers by (step, "answer"), filled by the contender eager."""
        self._first.answer = None
        with self._lineup.running(self._contender) as spent:
            row = self.row(step, eager)
            started = time.perf_counter()
            self.image(step)
            steady = time.perf_counter() - started
        answer = self._first.answer
        return {
            **{key: row[key] for key in ("step", "contender", "first_image_s", "dtype")},
            "answer_diff": difference(answer, eager.setdefault((step.name, "answer"), answer)),
            "image_diff": row["relative_diff"],
            "tolerance": tolerance(row["dtype"]),
            "steady_s": round(steady, 3),
            "stall_s": round(max(row["first_image_s"] - steady, 0), 3),
            **spent,
        }

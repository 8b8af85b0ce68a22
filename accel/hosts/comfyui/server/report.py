"""The report of the Accel Report node and of the page's command: the facts of the last run, with advice first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....cache.graph_cache import shared
from ....core.sentences import OF_THE_MACHINE
from ....report.facts import Fact, cache_fact, facts_of
from ....report.run import Run
from ....report.run_record import records
from ... import doctor
from .. import preferences
from ..hints import find_hints
from ..running_prompt import get_prompt_id
from ..words import add_advice, advice
from . import panel

ALIKE_DB = 40.0
"""PSNR above which a difference between two images is hard to see; at 30 dB it is visible side by side."""

_SPEEDS_UP = {"AccelSpeedUp", "AccelModel", "AccelDeepCache"}


def write_report(image: torch.Tensor | None = None, reference: torch.Tensor | None = None, prompt: Any = None) -> str:
    """The report as it stands now. image, reference: [B, H, W, C], to compare. prompt: the report's workflow."""
    preferences.current()  # puts the cache's limits into force
    run, cache = records.last(), cache_fact(shared.statistics(), shared.store and shared.store.statistics())
    of_run = [Fact("No image was made with an accelerated model yet.")] if run is None else facts_of(run)
    head, facts = [*of_run[:2], *_compare_images(image, reference)], [*of_run[2:], cache]
    (first, *then), others = _choose_changes(run, facts, prompt)
    paragraphs = [
        ["Accel Report"],
        [fact.sentence for fact in head],
        ["Change first:", f"  {first}", *(["Then:"] if then else []), *(f"  {sentence}" for sentence in then)],
        [fact.sentence for fact in others],
        ["This machine:", *(f"  {part['name']}: {part['reason']}" for part in panel.describe(doctor.parts))],
    ]
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _choose_changes(run: Run | None, facts: Sequence[Fact], prompt: Any) -> tuple[list[str], list[Fact]]:
    """What to change, what stops everything first and hints last, never empty; and the facts without advice."""
    elsewhere = _why_not_of_this_workflow(run, prompt)
    if elsewhere is not None:
        return [elsewhere], list(facts)
    changes = [fact for fact in facts if advice(fact.why) is not None]
    changes.sort(key=lambda fact: getattr(fact.why, "code", None) not in OF_THE_MACHINE)
    sampler = None if run is None else run.sampler
    hints = [f"{hint['reason']}." for hint in panel.describe(find_hints)]
    first = [add_advice(fact, sampler) for fact in changes] or ["Nothing."]
    return [*first, *hints], [fact for fact in facts if fact not in changes]


def _why_not_of_this_workflow(run: Run | None, prompt: Any) -> str | None:
    """What to do where this workflow, in API format, made no image with our nodes; None otherwise."""
    nodes = prompt.values() if isinstance(prompt, Mapping) else ()
    classes = {node.get("class_type") for node in nodes if isinstance(node, Mapping)}
    if run is None and classes & _SPEEDS_UP:
        return "Connect the image to `anything` of this node, so that it reports after the image."
    if run is None:
        return "Put Speed Up between the loaders and the sampler."
    if not classes or classes & _SPEEDS_UP or run.prompt is not None and run.prompt == get_prompt_id():
        return None
    return (
        "Nothing in this workflow speeds the model up: put Speed Up between the loaders and the sampler. The figures "
        "are of an earlier workflow."
    )


def _compare_images(image: torch.Tensor | None, reference: torch.Tensor | None) -> list[Fact]:
    """How close two IMAGEs [B, H, W, C] are; nothing without them. A report is no reason to fail a prompt."""
    if image is None and reference is None:
        return []
    if image is None or reference is None:
        return [Fact(f"Not compared: connect `{'image' if image is None else 'reference'}` too.")]
    if image.shape != reference.shape:
        one, two = (f"{shape[2]}x{shape[1]} ({shape[0]})" for shape in (image.shape, reference.shape))
        what = f"the image is {one} and the reference {two}; size and number must be the same"
        return [Fact(f"Not compared: {what}.")]
    decibels = psnr(image, reference)
    if decibels >= 100:
        return [Fact("Compared with the reference: equal.")]
    seen = "hard to see" if decibels >= ALIKE_DB else "visible side by side"
    return [Fact(f"Compared with the reference: {decibels:.1f} dB PSNR ({seen}).")]


def psnr(image: torch.Tensor, reference: torch.Tensor) -> float:
    """PSNR of two IMAGEs of values in 0..1, in dB, averaged over the batch; 100 where they are equal."""
    error = (image.double() - reference.double().to(image.device)).square().flatten(1).mean(1)
    return float((-10 * error.log10()).clamp(max=100.0).mean())

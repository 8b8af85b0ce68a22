"""A run from its facts, whichever record holds each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_accel.accel.report.run import Run, Skipping, Totals


def run_of(**facts: Any) -> Run:
    """A run with these facts."""
    taken = [{field.name: facts.pop(field.name) for field in fields(kind) if field.name in facts} for kind in PARTS]
    return Run(**facts, **{name: kind(**given) for (kind, name), given in zip(PARTS.items(), taken, strict=True)})


PARTS = {Totals: "totals", Skipping: "skipping"}

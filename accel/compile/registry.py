"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable

from .ahead_of_time import AheadOfTime
from .backend import Backend
from .inductor import Inductor

DEFAULT = "inductor"

BACKENDS: dict[str, Backend] = {"inductor": Inductor("inductor"), "eager": AheadOfTime("eager")}
"""Offered to people, the default first: inductor generates fused kernels; eager captures the graph and runs it."""


def backend_named(name: str | Callable) -> Backend:
    """The backend with this name; else torch's own of this name, or a function as `torch.compile` takes it."""
    return BACKENDS[name] if isinstance(name, str) and name in BACKENDS else AheadOfTime(name)

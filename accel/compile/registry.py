"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..core.reasons import Reason
from .ahead_of_time import AheadOfTime
from .backend import Artifact, Backend
from .inductor import Inductor
from .jit import CallOnce, InductorOnce

DEFAULT = "inductor"


class ByTorch:
    """The first of these backends, which differ in what they ask of torch, that this torch can serve."""

    def __init__(self, *backends: Backend):
        self._backends = backends
        self.name, self.is_faster = backends[0].name, backends[0].is_faster

    @property
    def _chosen(self) -> Backend | None:
        return next((backend for backend in self._backends if backend.missing() is None), None)

    @property
    def load(self) -> Callable[[bytes, torch.nn.Module], Artifact] | None:
        return getattr(self._chosen, "load", None)

    def missing(self, device: str | None = None) -> Reason | None:
        return (self._chosen or self._backends[-1]).missing(device)

    def compile(self, function: Callable, tensors: Sequence[torch.Tensor], savable: bool) -> Artifact:
        return self._chosen.compile(function, tensors, savable)


def _by_torch(name: str | Callable) -> Backend:
    return ByTorch(AheadOfTime(name), CallOnce(name))


BACKENDS: dict[str, Backend] = {
    "inductor": ByTorch(Inductor("inductor"), InductorOnce("inductor")),
    "eager": _by_torch("eager"),
}
"""Offered to people, the default first: inductor generates fused kernels; eager captures the graph and runs it."""


def backend_named(name: str | Callable) -> Backend:
    """The backend with this name; else torch's own of this name, or a function as `torch.compile` takes it."""
    return BACKENDS.get(name) or _by_torch(name)

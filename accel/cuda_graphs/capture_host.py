"""What the program around a model knows of it that recorded calls depend on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CaptureHost:
    """What the program around the model knows of it.

    facts: for the key, beside what the call says. simplify: what a dict among the arguments is replaced by; it
        raises `RunEagerly` where something in it must run in each call. token: changes whenever the host has moved
        or patched weights; cheap. why_not: what is against a recording just now, cheap. of_module: what is against
        one in a module. interrupts: exceptions that mean "stop the run".
    """

    facts: Hashable = None
    simplify: Callable[[dict], dict] | None = None
    token: Callable[[], Hashable] = lambda: None
    why_not: Callable[[], str | None] = lambda: None
    of_module: Callable[[torch.nn.Module], str | None] = lambda module: None
    interrupts: tuple[type[BaseException], ...] = ()

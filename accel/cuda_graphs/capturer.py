"""Capturing the device's work of one call and replaying it: the protocol that every way to do so implements.

A captured graph reads and writes fixed addresses. Whoever replays it copies the inputs to where they were during the
capture, takes the outputs away before anything else is replayed, and answers for the addresses of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..compile.compiled_graph import CompileFailed
from ..core.reasons import Reason


class CaptureFailed(CompileFailed):
    """A call cannot be captured, or its captured graph is not right; the message says why."""


class CapturedGraph(Protocol):
    """The work of one call. Its memory is free once nobody holds the graph nor what the call returned.

    nbytes: by how much the capture has grown the capturer's memory.
    """

    nbytes: int

    def replay(self) -> None:
        """Do the work again, on the same addresses, after everything queued on the current stream."""


class Capturer(Protocol):
    """A way to capture. Graphs share memory: the outputs of one are valid until the next is captured or replayed.

    lock: held during a warm-up, a capture or a replay, until the outputs are taken away.
    """

    lock: threading.RLock

    def why_not(self, device: torch.device) -> Reason | None:
        """Why no call on the device can be captured or replayed here and now; None where it can. Quick."""

    def timed(self, device: torch.device, call: Callable[[], Any]) -> tuple[Any, Callable[[], bool]]:
        """The result of the call, and a question that waits for it: whether the device waited for Python in it, which
        a replay would spare. True where that is unknown."""

    def has_room(self, device: torch.device) -> bool:
        """Whether the call that was just made could be made aside without taking memory from anybody."""

    def warm_up(self, device: torch.device, call: Callable[[], Any]) -> Any:
        """The result of the call, made where captures are, so that what it needs only once is there."""

    def capture(self, device: torch.device, call: Callable[[], Any]) -> tuple[CapturedGraph, Any]:
        """The captured graph, and what the call returned, whose values need not be computed yet.

        Whatever it raises, the device is as before, and nothing is kept.
        """

    def give_back(self) -> None:
        """Free memory that nothing but warm-ups has used, and nothing will."""

    def reset(self) -> None:
        """Share no memory with the graphs captured until now."""

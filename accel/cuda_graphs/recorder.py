"""Recording the device's work of one call and doing it again: what every way to record must offer.

A recording reads and writes fixed addresses. Whoever replays it puts the inputs where they were when it was
made, takes the outputs away before anything else is replayed, and answers for the addresses of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..compile.compiled_graph import CompileFailed


class CaptureFailed(CompileFailed):
    """A call cannot be recorded, or its recording is not right; the message says why."""


class Recording(Protocol):
    """The work of one call; its memory is free once nobody holds the recording nor what the call returned.

    nbytes: by how much making it has made the recorder's memory grow.
    """

    nbytes: int

    def replay(self) -> None:
        """Do the work again, on the same addresses, after all that the present stream was asked for before."""


class Recorder(Protocol):
    """A way to record. Recordings share memory: what one returned is good until the next is made or replayed.

    lock: to be held by whoever rehearses, records or replays, until the outputs are taken away.
    """

    lock: threading.RLock

    def why_not(self, device: torch.device) -> str | None:
        """Why calls on the device cannot be recorded or replayed here and now; None where they can. Quick."""

    def rehearse(self, device: torch.device, call: Callable[[], Any]) -> Any:
        """Make the call once where recordings are made, so that what it needs only once is there; its result."""

    def record(self, device: torch.device, call: Callable[[], Any]) -> tuple[Recording, Any]:
        """Record the call, which need not be computed by it: the recording, and what the call returned.

        Whatever it raises, the device is as before, and nothing is kept.
        """

    def begin_anew(self) -> None:
        """Share memory with no recording made until now."""

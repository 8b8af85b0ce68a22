"""Times of whole calls on a CUDA device: whether compiled blocks make them faster, and what CUDA graphs would give."""

from __future__ import annotations

import sys
import time

import torch

from ..compile.benchmark import CYCLES
from ..core.reasons import Reason
from ..core.torch_internals import SLEEP

LONGEST_PAUSE = 0.1
"""Seconds: where the host needs longer for a call, the device is not what it waits for."""

PACE = 1.03
"""A device that takes so many times as long for a call as Python does, or longer, was never idle in it."""

CALLS = 3
"""Calls that are timed with stand-ins, and as many without; of each the least time counts."""

FASTER = 0.98
"""Calls are made without stand-ins unless they take less than so many times as long with them."""

_thread_time = time.perf_counter if sys.platform == "win32" else time.thread_time
"""Windows counts a thread's time in steps of 15.6 ms, more than a call takes."""


class CallTime:
    """Times one call on a CUDA device, from its creation to `stop`. pause: seconds that the device waits first, to work
    without gaps then. thread, wall: seconds that Python took, of the processor and by the clock."""

    def __init__(self, device: torch.device, pause: float = 0.0):
        if pause and (sleep := SLEEP.get(None)) is not None:
            with torch.cuda.device(device):
                sleep(int(min(pause, LONGEST_PAUSE) * CYCLES))
        self._stream = torch.cuda.current_stream(device)
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Python's time has the device's in it, where that waits for it.
        self.wall, self.thread = time.perf_counter(), _thread_time()
        self._began.record(self._stream)

    def stop(self) -> None:
        self._ended.record(self._stream)
        self.wall, self.thread = time.perf_counter() - self.wall, _thread_time() - self.thread

    @property
    def device(self) -> float:
        """Seconds that the device took, once it is done: this waits for it."""
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3

    @property
    def device_waited(self) -> bool:
        """Whether the device was idle in the call; this waits for it."""
        return self.device < PACE * self.wall


class CallTimes:
    """Times of a model's calls of one size, in all runs, and what follows from them.

    is_due: calls are to be timed. verdict: why they are then made without any stand-in; None where with them, as where
    the device is what compiled ones wait for, so that the verdicts of their blocks stand.
    wall: seconds that a call takes; 0 where that is not known.
    spared: how many times as long as the device works in it; None until that is known.
    """

    def __init__(self) -> None:
        self.is_due = True
        self.verdict: Reason | None = None
        self.wall = 0.0
        self.spared: float | None = None
        self._seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}

    @property
    def next_is_bare(self) -> bool:
        """Whether the next timed call is made without stand-ins; not by turns, as every other call of a kind would."""
        return sum(map(len, self._seconds.values())) % 4 in (1, 2)

    def add(self, call: CallTime, is_bare: bool) -> None:
        """Take a timed call into account. is_bare: it had no stand-ins."""
        if not is_bare and not call.device_waited:
            self.is_due, self.spared, self.wall = False, 1.0, call.device
            return
        least = 0.0 if call.device_waited else call.device
        self._seconds[is_bare].append((max(call.thread, least), max(call.wall, least)))
        if min(map(len, self._seconds.values())) < CALLS:
            return
        compiled, normal = (list(map(min, zip(*self._seconds[way], strict=True))) for way in (False, True))
        # A clock may stand still in a call.
        ratio = max(one / other for one, other in zip(compiled, normal, strict=True) if other)
        slow = Reason("host_bound", compiled=f"{compiled[-1] * 1e3:.1f}", normal=f"{normal[-1] * 1e3:.1f}")
        self.verdict, self.wall = (None, compiled[-1]) if ratio < FASTER else (slow, normal[-1])
        self.is_due = False

    def add_unspared(self, call: CallTime) -> None:
        """Take a call into account that CUDA graphs would make faster: timed as it is, then behind a pause."""
        if self.wall:
            self.spared = self.wall / max(call.device, 1e-6)
        elif call.device_waited:
            self.wall = call.wall
        else:
            self.spared, self.wall = 1.0, call.device

"""Comfy Compiler, from core 0.34 on: around the blocks of some models, core records what is allocated and freed in one
call, and hands out the same addresses in the next.

What outlives its scope leaks, and a recorded tensor that is freed in another scope, or while recording is paused, ends
the process. Core's part is `comfy.model_prefetch`; the rules are comfy-aimdo's.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...core.reasons import Reason, RunEagerly


def make_unrecorded_context() -> Callable[[], AbstractContextManager] | None:
    """A factory of contexts in which core does not record this thread's memory; None for a core that never does. They
    do not nest. Making one raises `RunEagerly` while core captures a CUDA graph around the call."""
    prefetch = sys.modules.get("comfy.model_prefetch")
    return _stop_recording if hasattr(prefetch, "pause_malloc_graph") or _recordings(prefetch) is not None else None


def records_memory() -> bool:
    """Whether core has recorded any memory since it last dropped its records, as it does at the end of a run."""
    return bool(getattr(sys.modules.get("comfy.model_prefetch"), "MALLOC_GRAPH_USED", False))


def _recordings(prefetch: Any) -> dict[int, Any] | None:
    """Core's recording of each thread, by thread; None where this core makes none."""
    found = getattr(prefetch, "MALLOC_GRAPHS", None)
    return getattr(prefetch, "ACTIVE_MALLOC_GRAPHS", None) if found is None else found


def _stop_recording() -> AbstractContextManager:
    prefetch = sys.modules["comfy.model_prefetch"]
    recordings = _recordings(prefetch)
    recording = None if recordings is None else recordings.get(threading.get_ident())
    if recordings is not None and (recording is None or not getattr(recording, "_comfy_active", True)):
        return _NOTHING
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RunEagerly(Reason("captured_around"))
    if _is_paused_by_core():  # pauses do not nest: the end of ours would be the end of core's
        return _Paused(_NOTHING)
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return _Paused(_pause(recording) if pause is None else pause())


_NOTHING = nullcontext()


def _is_paused_by_core() -> bool:
    """Whether a caller stands in a `with pause_malloc_graph()`; the recorder itself does not tell."""
    frame, name = sys._getframe().f_back, "pause_malloc_graph"
    while frame is not None and not (name in frame.f_code.co_names and frame.f_lasti in _find_pauses(frame.f_code)):
        frame = frame.f_back
    return frame is not None


@functools.lru_cache
def _find_pauses(code: Any) -> set[int]:
    """The instructions in such a `with`: after its line, until that line is reached again to leave it."""
    names = [step.offset for step in dis.get_instructions(code) if step.argval == "pause_malloc_graph"]
    lines, pauses = list(dis.findlinestarts(code)), set()
    for (start, line), (begin, _) in zip(lines, lines[1:], strict=False):
        if any(start <= name < begin for name in names):
            pauses.update(range(begin, min((end for end, of in lines if end > begin and of == line), default=begin)))
    return pauses


class _Paused:
    """Core's pause, in which no garbage is collected either, as it may hold recorded tensors."""

    __slots__ = ("_collects", "_pause")

    def __init__(self, pause: AbstractContextManager):
        self._pause = pause

    def __enter__(self) -> None:
        self._pause.__enter__()
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: Any) -> None:
        try:
            self._pause.__exit__(*error)
        finally:
            if self._collects:
                gc.enable()


@contextmanager
def _pause(recording: Any) -> Iterator[None]:
    """Core's `pause_malloc_graph`, for cores that do not have it yet."""
    recording.pause()
    try:
        yield
    finally:
        recording.resume()

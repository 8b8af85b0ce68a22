"""What our wrappers add to a call of the model, and what a replayed call costs before the device works and after."""

import threading
import time
from collections.abc import Callable
from typing import Any

STEPS, IMAGES = 16, 3
STABLE_AFTER = 6
"""Calls until nothing is compiled or captured any more; those after them are timed."""


class IdleCapturer:
    """Captures graphs that do nothing but note when they are replayed."""

    def __init__(self):
        self.lock = threading.RLock()
        self.replayed: list[tuple[float, float]] = []

    def why_not(self, device):
        return None

    def timed(self, device, call):
        return call(), lambda: True

    def has_room(self, device):
        return True

    def warm_up(self, device, call):
        return call()

    def capture(self, device, call):
        return _IdleGraph(self), call()

    def give_back(self):
        pass

    def reset(self):
        pass


class _IdleGraph:
    nbytes = 0

    def __init__(self, capturer: IdleCapturer):
        self._capturer = capturer

    def replay(self) -> None:
        began = time.perf_counter()
        self._capturer.replayed.append((began, time.perf_counter()))


def of_calls(model: Any, image: Callable[[Any, int], Any], cache: Any) -> dict[str, float]:
    """Microseconds of each of our wrappers around one call of a ModelPatcher's model or one run: the least of many.

    cache: gets the graphs of the model's blocks. image: samples with a model and a number of steps.
    """
    from comfy.patcher_extension import WrappersMP
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.cuda_graphs.pool import CapturePool
    from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
    from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
    from kit.step_cache import every

    capturer = IdleCapturer()
    cache.captures = CapturePool(capturer)
    settings = CompileSettings(backend="eager")
    apply, sample, forward = WrappersMP.APPLY_MODEL, WrappersMP.OUTER_SAMPLE, WrappersMP.DIFFUSION_MODEL
    ours = _Around(model, (apply, sample, forward), lambda model: accelerate(model, settings, cache, graphs=True))
    for _ in range(IMAGES):
        image(ours.model, STEPS)
    # Of the calls alone that were replayed: before them, some were compiled, and two were made on buffers.
    replays = [
        (began - span[0], span[1] - ended)
        for began, ended in capturer.replayed
        for span in ours.outer[forward]
        if span[0] < began and ended < span[1]
    ][STABLE_AFTER:]
    alone = _Around(model, (apply,), lambda model: accelerate(model, settings, cache))
    for _ in range(IMAGES):
        image(alone.model, STEPS)
    parts = {
        "APPLY_MODEL, ours": min(alone.own(apply)[STABLE_AFTER:]),
        "APPLY_MODEL, captured": min(ours.own(apply)[STABLE_AFTER:]),
        "OUTER_SAMPLE, ours": min(ours.own(sample)[1:]),
        "replay, before the launch": min(before for before, _ in replays),
        "replay, after the launch": min(after for _, after in replays),
    }
    kinds = (apply, forward, WrappersMP.PREDICT_NOISE)
    cached = _Around(model, kinds, lambda model: apply_deep_cache(model, every(2)))
    image(cached.model, STEPS)
    where = forward if any(cached.own(forward)) else apply
    # Full and skipped calls take turns.
    parts["DeepCache's, a full call"] = min(cached.own(where)[STABLE_AFTER::2])
    parts["DeepCache's, a skipped call"] = min(cached.own(where)[STABLE_AFTER + 1 :: 2])
    parts["PREDICT_NOISE, DeepCache's"] = min(cached.own(kinds[2])[STABLE_AFTER:])
    return {part: 1e6 * seconds for part, seconds in parts.items()}


class _Around:
    """A model patcher with our node's wrappers, and a wrapper of its own before and after each of them.

    outer, inner: when these began and ended, by kind of wrapper. The difference is our node's share.
    """

    def __init__(self, model: Any, kinds: tuple[str, ...], apply: Callable[[Any], Any]):
        self.outer = {kind: [] for kind in kinds}
        self.inner = {kind: [] for kind in kinds}
        self.model = model.clone()
        for kind in kinds:
            self.model.add_wrapper_with_key(kind, "bench.outer", _timing(self.outer[kind]))
        self.model = apply(self.model)
        for kind in kinds:
            self.model.add_wrapper_with_key(kind, "bench.inner", _timing(self.inner[kind]))

    def own(self, kind: str) -> list[float]:
        """Seconds of each call in which both were reached."""
        outer, inner = self.outer[kind], self.inner[kind]
        return [end - start - (e - s) for (start, end), (s, e) in zip(outer, inner, strict=True)]


def _timing(spans: list[tuple[float, float]]) -> Callable:
    def wrapper(executor, *args, **kwargs):
        began = time.perf_counter()
        try:
            return executor(*args, **kwargs)
        finally:
            spans.append((began, time.perf_counter()))

    return wrapper

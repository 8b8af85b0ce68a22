"""What a warm call of a block costs beside its graph, what our wrappers add to a call of the model, and what a replayed
call costs before the device works and after. Import it after `pack.load`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate, block_layers
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.captures import CpuCapturer

REPETITIONS = 300

STEPS, IMAGES = 16, 3
STABLE_AFTER = 6
"""Calls until nothing is compiled or captured any more; those after them are timed."""


def time_blocks(model: Any, image: Callable[[Any], Any], cache: Any) -> tuple[list[float], float]:
    """Microseconds of each block's warm call, and of comparing the code that was read, once a call of the model."""
    layers = block_layers(model.model.diffusion_model, CompileSettings(backend="eager"), cache)
    runners = {block: layer for block, layer in layers.items() if isinstance(layer, BlockRunner)}
    calls = _record_calls(runners, lambda: image(model))
    with substitute(layers, Order.COMPILED), _idling(cache, calls):
        each = [
            time_least(put_within_a_pass(runners[block], block.forward), args, kwargs)
            for block, (args, kwargs) in calls.items()
        ]
        block = next(iter(calls))
        return each, time_least(runners[block].code.compare, (block, True))


def put_within_a_pass(runner: Any, forward: Callable) -> Callable:
    """The block's forward, called as one of many in a call of the model: code was compared before the first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        runner._passing = None
        return forward(*args, **kwargs)

    return call


def time_least(function: Callable, args: tuple = (), kwargs: dict | None = None) -> float:
    """Of a call: the least of 300, which other work on the machine can only add to."""
    kwargs = kwargs or {}
    clock = time.perf_counter
    function(*args, **kwargs)
    seconds, empty = [], []
    for _ in range(REPETITIONS):
        started = clock()
        function(*args, **kwargs)
        seconds.append(clock() - started)
        started = clock()
        empty.append(clock() - started)
    return 1e6 * (min(seconds) - min(empty))


def _record_calls(blocks: Any, image: Callable[[], Any]) -> dict[Any, tuple[tuple, dict]]:
    """The arguments with which each block is called, with the per-call dict as it is then."""
    calls = {}

    def spy(block):
        def layer(inner, *args, **kwargs):
            calls[block] = args, {key: dict(value) if type(value) is dict else value for key, value in kwargs.items()}
            return inner(*args, **kwargs)

        return layer

    with substitute({block: spy(block) for block in blocks}, Order.CACHED):
        image()
    return calls


@contextmanager
def _idling(cache: Any, calls: dict) -> Iterator[None]:
    """While it lasts, compiled graphs do nothing; those of these calls are there."""
    for block, (args, kwargs) in calls.items():
        block.forward(*args, **kwargs)
    graphs = [graph for key in cache.keys() for graph in cache.get(key).graphs if hasattr(graph, "guards")]
    runs = [graph.run for graph in graphs]
    try:
        for graph in graphs:
            graph.run = lambda tensors: None
        yield
    finally:
        for graph, run in zip(graphs, runs, strict=True):
            graph.run = run


class IdleCapturer(CpuCapturer):
    """Captures graphs that do nothing but note when they are replayed."""

    def __init__(self):
        super().__init__()
        self.replayed: list[tuple[float, float]] = []

    def capture(self, device, call):
        return _IdleGraph(self.replayed), call()


class _IdleGraph:
    nbytes = 0

    def __init__(self, replayed: list[tuple[float, float]]):
        self._replayed = replayed

    def replay(self) -> None:
        began = time.perf_counter()
        self._replayed.append((began, time.perf_counter()))


def time_calls(model: Any, image: Callable[[Any, int], Any], cache: Any) -> dict[str, float]:
    """Microseconds of each of our wrappers around one call of a ModelPatcher's model or one run: the least of many.

    cache: gets the graphs of the model's blocks. image: samples with a model and a number of steps.
    """

    capturer = IdleCapturer()
    cache.captures = CapturePool(capturer)
    settings = CompileSettings(backend="eager")
    apply, forward = WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL
    ours = _Around(model, (apply, forward), lambda model: accelerate(model, settings, cache, graphs=True))
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
        "replay, before the launch": min(before for before, _ in replays),
        "replay, after the launch": min(after for _, after in replays),
    }
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

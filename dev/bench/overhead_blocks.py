"""What our stand-in for a block adds to a warm call of it, beside the compiled graph's own run."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REPETITIONS = 300


def of_blocks(model: Any, image: Callable[[Any], Any], cache: Any) -> tuple[dict[str, float], list[float]]:
    """Microseconds of each part, the median over the model's blocks; and of each block's call."""
    from comfy_accel.accel.modules.substitution import Order, substituted
    from comfy_accel.accel.signature import tree_spec
    from comfy_accel.accel.signature.argument_guard import CallGuard

    layers, runners = _stand_ins(model, cache)
    calls = _calls(runners, lambda: image(model))
    parts: dict[str, list[float]] = {}

    def note(part: str, function: Callable, *args: Any, **kwargs: Any) -> None:
        parts.setdefault(part, []).append(least_us(function, args, kwargs))

    with substituted(layers, Order.COMPILED):
        with _idle(cache, calls):
            for block, (args, kwargs) in calls.items():
                note("block", within_a_pass(runners[block], block.forward), *args, **kwargs)
            block = next(iter(calls))
            note("code, each call", runners[block].code.compare, block, True)
            for block, (args, kwargs) in calls.items():
                note("  block, anew", runners[block]._call_unmatched, block.forward.own, args, kwargs)
    nothing = {block: lambda inner, *args, **kwargs: None for block in runners}
    with substituted(nothing, Order.COMPILED):
        for block, (args, kwargs) in calls.items():
            note("  stand-in", block.forward, *args, **kwargs)
    for block, (args, kwargs) in calls.items():
        runner, inputs = runners[block], []
        spec = tree_spec.flatten((args, kwargs), inputs, runner._simplify)
        weights = runner._weights.take(())
        guard = CallGuard(args, kwargs, spec, inputs, runner._simplify, weights)
        note("  arguments", guard.arguments, args, kwargs)
        options = kwargs.get("transformer_options")
        if options is not None:
            note("    options", runner._simplify, options)
        note("  weights", runner._weights.take, inputs)
        note("  check", guard.check, *weights, *guard.arguments(args, kwargs))
        note("  arguments, anew", tree_spec.flatten, (args, kwargs), [], runner._simplify)
    order = ("block", "  stand-in", "  arguments", "    options", "  weights", "  check")
    anew = ("  block, anew", "  arguments, anew", "code, each call")
    return {part: statistics.median(parts[part]) for part in (*order, *anew) if part in parts}, parts["block"]


def within_a_pass(runner: Any, forward: Callable) -> Callable:
    """The block's forward, called as one of many in a call of the model: code was compared before the first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        runner._passing = None
        return forward(*args, **kwargs)

    return call


def least_us(function: Callable, args: tuple = (), kwargs: dict | None = None) -> float:
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


def _stand_ins(model: Any, cache: Any) -> tuple[dict, dict]:
    """The layers of a ModelPatcher's model, and those of them that are its blocks'."""
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.dispatch.block_runner import BlockRunner
    from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers

    layers = block_layers(model.model.diffusion_model, CompileSettings(backend="eager"), cache)
    return layers, {block: layer for block, layer in layers.items() if isinstance(layer, BlockRunner)}


def _calls(blocks: Any, image: Callable[[], Any]) -> dict[Any, tuple[tuple, dict]]:
    """The arguments with which each block is called, with the per-call dict as it is then."""
    from comfy_accel.accel.modules.substitution import Order, substituted

    calls = {}

    def spy(block):
        def layer(inner, *args, **kwargs):
            calls[block] = args, {key: dict(value) if type(value) is dict else value for key, value in kwargs.items()}
            return inner(*args, **kwargs)

        return layer

    with substituted({block: spy(block) for block in blocks}, Order.CACHED):
        image()
    return calls


@contextmanager
def _idle(cache: Any, calls: dict) -> Iterator[None]:
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

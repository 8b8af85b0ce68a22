"""What our stand-in for a block adds to a warm call of it, beside the compiled graph's own run."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

REPETITIONS = 300


def of_a_warm_call(model: Any, image: Callable[[], Any]) -> dict[str, float]:
    """Measure every block of a ModelPatcher's model with the arguments that `image()` calls it with.

    Returns overhead_us: microseconds a call, the median over the blocks of each one's median; overhead_worst_us: the
    largest of these; survey_ms: what a sampling run pays once, to find the blocks and set the stand-ins up.
    """
    from comfy_accel.accel import compilers
    from comfy_accel.accel.block_runner import BlockRunner, CompileSettings
    from comfy_accel.accel.graph_cache import GraphCache
    from comfy_accel.accel.hosts.comfyui.accelerate import block_layers
    from comfy_accel.accel.substitution import Order, substituted

    network = model.model.diffusion_model
    settings, cache = CompileSettings(backend="eager"), GraphCache()
    started = time.perf_counter()
    layers = block_layers(network, settings, cache)
    survey_ms = 1e3 * (time.perf_counter() - started)
    blocks = [module for module, layer in layers.items() if isinstance(layer, BlockRunner)]

    calls = {}

    def spy(block):
        def layer(inner, *args, **kwargs):
            calls[block] = args, kwargs
            return inner(*args, **kwargs)

        return layer

    with substituted({block: spy(block) for block in blocks}, Order.CACHED):
        image()

    # A graph that does nothing, behind everything that finds it.
    compile_block = compilers.compile_block
    compilers.compile_block = lambda *args, **kwargs: dataclasses.replace(
        compile_block(*args, **kwargs), run=lambda tensors: None
    )
    try:
        with substituted(layers, Order.COMPILED):
            medians = [_median_us(block.forward, *call) for block, call in calls.items()]
    finally:
        compilers.compile_block = compile_block
    return {
        "overhead_us": round(statistics.median(medians), 1),
        "overhead_worst_us": round(max(medians), 1),
        "survey_ms": round(survey_ms, 1),
    }


def _median_us(function: Callable, args: tuple, kwargs: dict) -> float:
    function(*args, **kwargs)
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        function(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(seconds)

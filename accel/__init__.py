"""The engine: torch modules, shapes and numbers. Only `accel.hosts` knows ComfyUI or diffusers.

For a script with a diffusers pipeline:

    from accel import accelerate_pipeline, warm_up
    pipe = accelerate_pipeline(pipe)
    warm_up(pipe, sizes=[(1024, 1024), (512, 2048)])

Importing it imports nothing else, torch neither.
"""

from typing import Any

__version__ = "0.1.0"

_FROM = {
    "DeepCacheSettings": "step_cache.deep_cache",
    "accelerate_pipeline": "hosts.diffusers.pipelines",
    "accelerated": "hosts.diffusers.pipelines",
    "restore": "hosts.diffusers.pipelines",
    "warm_up": "hosts.diffusers.warm_up",
}
"""What scripts use → the module that has it."""

__all__ = sorted(_FROM)


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .one_engine import shared_by_all

    value = globals()[name] = shared_by_all(__name__, _FROM[name], name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})

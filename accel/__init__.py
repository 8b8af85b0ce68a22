"""The engine: torch modules, shapes and numbers. Only `accel.hosts` knows ComfyUI or diffusers.

Installed as `comfy_accel`, for scripts with a diffusers pipeline:

    from comfy_accel import accelerate_pipeline, warm_up
    pipe = accelerate_pipeline(pipe)
    warm_up(pipe, prompt="a photograph")

Importing it imports neither torch nor anything else of the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hosts.diffusers.pipeline import accelerate_module as accelerate_module
    from .hosts.diffusers.pipeline import accelerate_pipeline as accelerate_pipeline
    from .hosts.diffusers.pipeline import accelerated as accelerated
    from .hosts.diffusers.pipeline import one_run as one_run
    from .hosts.diffusers.pipeline import restore as restore
    from .hosts.diffusers.pipeline import restore_module as restore_module
    from .hosts.diffusers.warm_up import warm_up as warm_up
    from .step_cache.config import DeepCacheSettings as DeepCacheSettings
else:  # so that a type checker finds a name that there is not

    def __getattr__(name: str) -> Any:
        if name not in _FROM:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_FROM[name]}", __name__), name)
        return value


__version__ = "0.2.0"

_FROM = {
    "DeepCacheSettings": "step_cache.config",
    "accelerate_module": "hosts.diffusers.pipeline",
    "accelerate_pipeline": "hosts.diffusers.pipeline",
    "accelerated": "hosts.diffusers.pipeline",
    "one_run": "hosts.diffusers.pipeline",
    "restore": "hosts.diffusers.pipeline",
    "restore_module": "hosts.diffusers.pipeline",
    "warm_up": "hosts.diffusers.warm_up",
}
"""Public name → the module that defines it."""

__all__ = sorted(_FROM)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})

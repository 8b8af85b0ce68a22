"""Diffusers pipelines over the one engine: their models' repeated blocks run compiled, in place, until restored."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ...cache.graph_cache import shared
from ...compile.registry import BACKENDS, DEFAULT
from ...core.compile_settings import CompileSettings
from ...step_cache.config import DeepCacheSettings
from ...store.graph_store import attach
from ...store.location import personal_home
from . import component_call
from .accelerated_pipeline import AcceleratedPipeline, of
from .components import chosen, components
from .offload import without_weights

SHAPES = ANY, EXACT = ("any", "exact")


def accelerate_pipeline(
    pipe: Any,
    ignores: str | Collection[str] = (),
    deep_cache: DeepCacheSettings | None = None,
    backend: str = DEFAULT,
    shapes: str = ANY,
    *,
    min_repetitions: int = 1,
    stop_on_trouble: bool = False,
    measured: bool | None = None,
) -> Any:
    """The pipeline itself, whose models run compiled from now on until `restore(pipe)`.

    ignores: components that stay as they are: "unet", "transformer", "controlnet", "vae" (or "vae.decoder",
        "vae.encoder" alone), "text_encoder", ...
    deep_cache: how often deep layers are skipped; None skips none.
    backend: "inductor" generates fused kernels; "eager" captures the blocks without compiling them.
    shapes: "any" compiles once for all sizes and batches; "exact" anew for each.
    min_repetitions: kinds with fewer blocks in a model stay as they are.
    stop_on_trouble: raise where a block cannot run compiled; False runs it as it is, and the log says why.
    measured: give up what is not faster compiled. None: with "inductor" alone.

    The models are the accelerated ones: another pipeline that is made of them has them so, too. Accelerated again,
    a pipeline is as the last call says. A model put in another's place (`pipe.unet = other`) is accelerated from
    the next denoising loop on.

    Raises:
        TypeError: it is no pipeline, or deep_cache no DeepCacheSettings.
        ValueError: with what is valid: a name, a number; or a model's weights are not loaded.
    """
    wanted = settings_for(backend, shapes, min_repetitions, stop_on_trouble, measured)
    if deep_cache is not None and not isinstance(deep_cache, DeepCacheSettings):
        raise TypeError(f"deep_cache is a {type(deep_cache).__name__}; it must be DeepCacheSettings(...) or None.")
    ignores = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    models = chosen(pipe, ignores)
    for name, model in models.items():
        weight = without_weights(model)
        if weight is not None:
            raise ValueError(
                f"{name} is not loaded: its {weight} is on the meta device. Load it, or put it in ignores."
            )
    restore(pipe)
    attach(shared, personal_home)
    AcceleratedPipeline(pipe, ignores, wanted, deep_cache, shared).begin()
    return pipe


def restore(pipe: Any) -> Any:
    """The pipeline as it was before it was accelerated, however often; one that was not is left as it is."""
    models = components(pipe)
    found = of(pipe)
    if found is not None:
        found.end()
    for model in models.values():  # those that another pipeline of these models has accelerated
        component_call.take_away(model)
    return pipe


@contextmanager
def accelerated(pipe: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """While it lasts, the pipeline is accelerated; takes what `accelerate_pipeline` takes.

    Afterwards it is as before: accelerated as before, where it was.
    """
    before = of(pipe)
    accelerate_pipeline(pipe, *args, **kwargs)
    try:
        yield pipe
    finally:
        restore(pipe)
        if before is not None:
            before.begin()


def settings_for(
    backend: str, shapes: str, min_repetitions: int = 1, stop_on_trouble: bool = False, measured: bool | None = None
) -> CompileSettings:
    """Raises ValueError, with what is valid, for anything that is not."""
    for name, value, options in (("backend", backend, BACKENDS), ("shapes", shapes, SHAPES)):
        if value not in options:
            raise ValueError(f"{name} is {value!r}; it must be one of: {', '.join(options)}.")
    if measured is None:
        measured = BACKENDS[backend].is_faster  # what is not compiled can gain nothing
    return CompileSettings(backend, shapes == ANY, stop_on_trouble, min_repetitions, measured)

"""`accelerate_pipeline`, `accelerate_module` and their undoing: the repeated blocks of a pipeline's models, or of any
model for packs and scripts with samplers of their own, run compiled, in place."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeVar

import torch

from ...cache.graph_cache import shared
from ...compile.registry import BACKENDS, DEFAULT
from ...core.compile_settings import CompileSettings
from ...core.fallbacks import fallbacks
from ...core.reasons import Reason
from ...report import log as report_log
from ...step_cache.config import DeepCacheSettings
from ...store.graph_store import attach
from ...store.location import personal_home
from . import component_call
from .components import choose_models, components, find_missing_weight
from .deep_cache import deep_cache as deep_cache_of
from .replaced_method import wrap_loops
from .runs import new_run

SHAPES = ANY, EXACT = ("any", "exact")
Pipeline = TypeVar("Pipeline")
Module = TypeVar("Module", bound=torch.nn.Module)

_NAME = "_accel"  # the attribute under which a pipeline keeps its `_Acceleration`; neither a component nor a setting


def accelerate_pipeline(
    pipe: Pipeline,
    ignores: str | Collection[str] = (),
    deep_cache: DeepCacheSettings | None = None,
    backend: str = DEFAULT,
    shapes: str = ANY,
    *,
    min_repetitions: int = 1,
    stop_on_trouble: bool = False,
    measured: bool | None = None,
) -> Pipeline:
    """The pipeline itself, whose models run compiled until `restore(pipe)`.

    ignores: components to leave alone: "unet", "transformer", "controlnet", "vae" (or only "vae.decoder",
        "vae.encoder"), "text_encoder", ...
    deep_cache: the quality for which steps are skipped; None skips none.
    backend: "inductor" generates fused kernels; "eager" captures the blocks without compiling them.
    shapes: "any" compiles once for all sizes and batches; "exact" compiles again for each.
    min_repetitions: leave block types alone that occur fewer times in a model.
    stop_on_trouble: raise if a block cannot run compiled; False runs it eagerly, and the log says why.
    measured: drop graphs that are no faster than eager. None: only with "inductor".

    The models themselves are accelerated, so another pipeline that shares them is too. A second call replaces the
    settings of the first. A model that replaces another (`pipe.unet = other`) is accelerated from the next denoising
    loop on.

    Raises:
        TypeError: `pipe` is not a pipeline, or `deep_cache` is not DeepCacheSettings.
        ValueError: an invalid name or number, with the valid ones; or a model's weights are not loaded.
    """
    settings = compile_settings(backend, shapes, stop_on_trouble, min_repetitions, measured)
    if deep_cache is not None and not isinstance(deep_cache, DeepCacheSettings):
        raise TypeError(f"deep_cache is a {type(deep_cache).__name__}; it must be DeepCacheSettings(...) or None.")
    ignores = (ignores,) if isinstance(ignores, str) else tuple(ignores)
    for name, model in choose_models(pipe, ignores).items():
        if (weight := find_missing_weight(model)) is not None:
            raise ValueError(
                f"{name} is not loaded: its {weight} is on the meta device. Load it, or put it in ignores."
            )
    restore(pipe)
    begin_use()
    _Acceleration(weakref.ref(pipe), ignores, settings, deep_cache).begin()
    return pipe


def compile_settings(
    backend: str = DEFAULT,
    shapes: str = ANY,
    stop_on_trouble: bool = False,
    min_repetitions: int = 1,
    measured: bool | None = None,
) -> CompileSettings:
    """The settings, as `accelerate_pipeline` takes them; raises ValueError as it does."""
    for name, value, options in (("backend", backend, BACKENDS), ("shapes", shapes, SHAPES)):
        if value not in options:
            raise ValueError(f"{name} is {value!r}; it must be one of: {', '.join(options)}.")
    if measured is None:
        measured = BACKENDS[backend].is_faster  # without a compiler there is nothing to gain
    return CompileSettings(backend, shapes == ANY, stop_on_trouble, min_repetitions, measured)


def begin_use() -> None:
    """Put the environment's settings of the log into force, and have saved graphs found."""
    report_log.obey_environment()
    attach(shared, personal_home)


def restore(pipe: Pipeline) -> Pipeline:
    """The pipeline as it was before it was accelerated, however often; does nothing to one that was not."""
    models = components(pipe)
    if (acceleration := _acceleration_of(pipe)) is not None:
        acceleration.end()
    for model in models.values():  # another pipeline with the same models may have accelerated them
        component_call.take_away(model)
    return pipe


@contextmanager
def accelerated(pipe: Pipeline, *args: Any, **kwargs: Any) -> Iterator[Pipeline]:
    """Accelerate the pipeline inside the context; takes the arguments of `accelerate_pipeline`.

    On exit, the pipeline is as it was, with its earlier acceleration if it had one.
    """
    before = _acceleration_of(pipe)
    # By another pipeline with the same models too.
    placed = {model: call for model in components(pipe).values() if (call := component_call.call_of(model)) is not None}
    try:
        yield accelerate_pipeline(pipe, *args, **kwargs)
    finally:
        restore(pipe)
        if before is not None:
            before.begin()
        component_call.place_again(placed)


def accelerate_module(module: Module, backend: str = DEFAULT, *, measured: bool | None = None) -> Module:
    """The module itself, whose repeated blocks run compiled until `restore_module(module)`, for every size and batch.

    It is called as before, by `module(...)`; a call of `module.forward` is not accelerated. Nothing of it is replaced,
    so it may be moved, loaded anew or given a LoRA meanwhile. What cannot run compiled runs as it is, and the log says
    why once.

    backend, measured: as for `accelerate_pipeline`.

    Raises:
        TypeError: not a module.
        ValueError: another backend than there are, or somebody else compiles the module as a whole.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not a {type(module).__name__}")
    settings = compile_settings(backend, measured=measured)
    begin_use()
    if not component_call.place(module, settings, None):
        raise ValueError(f"{type(module).__name__} is compiled as a whole already: leave that out.")
    return module


def restore_module(module: Module) -> Module:
    """The module as it was before `accelerate_module`."""
    component_call.take_away(module)
    return module


@contextmanager
def one_run() -> Iterator[None]:
    """A context around a sampler's loop: calls in it share what is looked up once a run, and its graphs stay in memory
    until the end."""
    with new_run():
        yield


@dataclass(eq=False)
class _Acceleration:
    """The acceleration of one pipeline, which owns it: `begin` and `end` it, any number of times."""

    pipe: weakref.ref[Any]
    ignores: tuple[str, ...]
    settings: CompileSettings
    deep_cache: DeepCacheSettings | None
    models: dict[str, weakref.ref[torch.nn.Module]] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """None: a copy of a pipeline is not accelerated, pickled or not."""
        return type(None), ()

    def begin(self) -> None:
        pipe = self.pipe()
        with ExitStack() as undo:
            if self.deep_cache is not None:
                undo.enter_context(deep_cache_of(pipe, self.deep_cache))
            undo.enter_context(wrap_loops(pipe, self._loop))
            self._place_models()
            vars(pipe)[_NAME] = self
            self.undo = undo.pop_all()

    def end(self) -> None:
        pipe = self.pipe()
        if vars(pipe).get(_NAME) is self:
            del vars(pipe)[_NAME]
        try:
            self.undo.close()
        finally:
            for name in list(self.models):
                self._take_away(name)

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """One denoising loop, which is one run."""
        self._place_models()
        with new_run():
            yield

    def _place_models(self) -> None:
        """Accelerate the pipeline's models, and no longer those that others have replaced."""
        now = choose_models(self.pipe(), self.ignores)
        for name, reference in list(self.models.items()):
            if now.get(name) is not reference():
                self._take_away(name)
        for name in now.keys() - self.models:
            self.models[name] = weakref.ref(now[name])
            if not component_call.place(now[name], self.settings, self):
                fallbacks.note(type(now[name]).__name__, Reason("compiled_already"))

    def _take_away(self, name: str) -> None:
        if (model := self.models.pop(name)()) is not None:
            component_call.take_away(model, self)


def _acceleration_of(pipe: Any) -> _Acceleration | None:
    """The pipeline's own; None if it is not accelerated."""
    found = vars(pipe).get(_NAME)
    return found if isinstance(found, _Acceleration) and found.pipe() is pipe else None

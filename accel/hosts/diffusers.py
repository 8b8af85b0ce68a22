"""DeepCache in a diffusers pipeline: a context in which every image, or batch of them, is a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..cached_call import cached_call
from ..deep_cache import DeepCacheRun, DeepCacheSettings
from ..diffusers_boundary import DiffusersBoundary, has_diffusers_layout
from ..events import emit, log
from ..substitution import Order, substituted
from .diffusers_schedule import PipelineSchedule


@contextmanager
def deep_cache(pipe: Any, settings: DeepCacheSettings) -> Iterator[None]:
    """While it lasts, the pipeline's UNet runs its deep part only now and then.

    `pipe` has a `unet` and a `scheduler`. Leaving the context, however that happens, leaves both as they
    were, and no tensor behind. With settings that skip nothing, or a UNet that cannot be divided, the
    context does nothing. A UNet compiled as a whole runs uncompiled meanwhile.

    Emits "deep_cache_run" after each run. Raises ValueError when the depth is beyond the model.
    """
    unet = getattr(pipe, "unet", None)
    unet = getattr(unet, "_orig_mod", unet)
    if not has_diffusers_layout(unet):
        log.warning("DeepCache: %s is a model that it cannot divide; every step runs in full.", type(unet).__name__)
        yield
        return
    cache = _Cache(pipe, DiffusersBoundary(unet, settings.depth), settings)
    if settings.is_off:
        yield
        return
    with ExitStack() as undo:

        def place() -> None:
            if cache.stand_in is None or unet.__dict__.get("forward") is not cache.stand_in:
                undo.enter_context(substituted({unet: cache.call}, Order.CACHED))
                cache.stand_in = unet.__dict__["forward"]

        def end_image() -> None:
            cache.end_run()
            place()

        undo.callback(cache.close)
        undo.enter_context(_after_images(pipe, end_image))
        place()
        yield


@contextmanager
def _after_images(pipe: Any, act: Callable[[], None]) -> Iterator[None]:
    """While it lasts, `act` at the end of every call of the pipeline that does not fail.

    CPU offload takes the models' forwards away there, ours with them, and puts new ones in place.
    """
    name = "maybe_free_model_hooks"
    own = getattr(pipe, name, None)
    if own is None:
        yield
        return

    def free_then_act(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        act()
        return out

    is_foreign = name in vars(pipe)
    setattr(pipe, name, free_then_act)
    try:
        yield
    finally:
        delattr(pipe, name)
        if is_foreign:
            setattr(pipe, name, own)


class _Cache:
    """The run that the pipeline is in, and how far it has come."""

    def __init__(self, pipe: Any, boundary: DiffusersBoundary, settings: DeepCacheSettings):
        self.pipe, self.boundary, self.settings = pipe, boundary, settings
        self.stand_in: Any = None
        self.schedule: PipelineSchedule | None = None
        self.run: DeepCacheRun | None = None
        self.evaluation: tuple[Any, ...] = (-1,)
        """Place in the schedule, and how often the scheduler has stepped: the calls of an evaluation share both."""

    @torch.compiler.disable
    def call(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the UNet: skipped, in full and remembered, or plain."""
        sample = args[0] if args else kwargs.get("sample")
        run = self._begin(args[1] if len(args) > 1 else kwargs.get("timestep"))
        if run is None:
            return inner(*args, **kwargs)
        return cached_call(
            run,
            self.boundary,
            # Cond and uncond come as one batch, from the first step to the last: one stream.
            run.streams(sample, ("batch",), (0,), None),
            lambda: inner(*args, **kwargs),
            lambda: inner(*args, **self.boundary.withhold(kwargs)),
            lambda error: isinstance(error, torch.OutOfMemoryError),
        )

    def _begin(self, timestep: Any) -> DeepCacheRun | None:
        """The run that a call at `timestep` belongs to; None for one outside the scheduler's schedule."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is None or timestep is None:
            return None
        if self.schedule is None or not self.schedule.is_of(scheduler):
            self.end_run()
            self.schedule = PipelineSchedule(scheduler)
        place = self.schedule.place_of(timestep)
        if place is None:
            return None
        if self.run is None or place < self.evaluation[0]:
            self.end_run()
            self.run = DeepCacheRun(self.settings)
            self.run.schedule = self.schedule.run_from(place)
            window = (self.settings.start_percent, self.settings.end_percent)
            self.run.window = tuple(self.schedule.level_at(percent) for percent in window)
        evaluation = (place, getattr(scheduler, "step_index", None), getattr(scheduler, "counter", None))
        if evaluation != self.evaluation:
            self.run.begin_evaluation(self.schedule.level(place))
            self.evaluation = evaluation
        return self.run

    def end_run(self) -> None:
        """Nothing of the image is kept."""
        if self.run is not None:
            self.run.close()
            emit("deep_cache_run", full_steps=self.run.full_steps, skipped_steps=self.run.skipped_steps)
        self.run, self.evaluation = None, (-1,)

    def close(self) -> None:
        """The context is over: whatever still holds this lets calls through as they are."""
        self.end_run()
        self.pipe = self.schedule = self.stand_in = None

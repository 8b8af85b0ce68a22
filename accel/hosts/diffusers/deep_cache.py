"""DeepCache in a diffusers pipeline: a context in which every image, or batch of images, is a DeepCacheRun."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from ...core.events import emit, log
from ...modules.blocks import is_compiled, uncompiled
from ...modules.substitution import Order, substituted
from ...report.facts import skipping_fact
from ...report.run import Skipping
from ...step_cache.cached_call import cached_call, with_own_lists
from ...step_cache.config import DeepCacheSettings
from ...step_cache.noise_levels import angle as angle_of
from ...step_cache.run import DeepCacheRun
from ...step_cache.splits.layouts import find_split, why_no_split
from ...step_cache.splits.token_streams import NoStreams, arguments
from ...step_cache.splits.unet import DownUpUNetSplit
from .denoising_loop import around_loops
from .predictions import around_steps, denoised, facts_of, follows_of, noisy, share_of
from .schedule import PipelineSchedule

DENOISERS = ("unet", "transformer", "transformer_2")
"""Components that a pipeline calls at every step; Wan 2.2 has two, one for each part of the schedule."""

_TIMESTEPS = ("timestep", "timesteps", "t")
"""Names of the argument that says where in the schedule a call is."""

_PLAIN_STEP = ("model_output", "timestep", "sample", "eta", "generator", "return_dict")
"""Arguments of a scheduler's step that change nothing of how predictions reach its later latents, as long as it adds no
noise."""

_called: ContextVar[tuple[torch.nn.Module, ...]] = ContextVar("accel_deep_cache_called", default=())
"""Models that are in a cached call. Where the contexts of several pipelines share a model, the innermost one caches."""


@contextmanager
def deep_cache(pipe: Any, settings: DeepCacheSettings) -> Iterator[None]:
    """Within the context, the pipeline's UNet or transformers skip their blocks on some steps.

    `pipe` has a `scheduler`, any of `DENOISERS`, and a `progress_bar` around its denoising loop. Between images the
    models are untouched, so they may be moved, offloaded, shared or replaced, and the scheduler too; nothing of an
    image is kept, however it ends. With settings that skip nothing, or models without a split, the context does
    nothing. A model compiled as a whole runs uncompiled within it. What the scheduler is given by full steps decides
    what is skipped; where that cannot be told, every step runs in full.

    Emits "deep_cache_run" after each run: one for each image and, where a pipeline has two, transformer.
    """
    with ExitStack() as undo:
        if models_to_split(pipe, log.warning) and not settings.is_off:
            running: dict[int, ExitStack] = {}
            # Images that were broken off, whose frames an exception may keep alive.
            undo.callback(lambda: [image.close() for image in list(running.values())])
            undo.enter_context(around_loops(pipe, partial(_image, weakref.ref(pipe), settings, running)))
        del pipe  # the context must not keep its memory
        yield


def models_to_split(pipe: Any, report: Callable[..., None]) -> list[torch.nn.Module]:
    """The pipeline's models that have a split; `report` gets the reason for each of the others."""
    models = [getattr(pipe, name, None) for name in DENOISERS]
    models = [uncompiled(model) for model in models if model is not None]
    if not models:
        report("DeepCache: it cannot divide %s, which has none of %s.", type(pipe).__name__, ", ".join(DENOISERS))
    found = []
    for model in models:
        if find_split(model) is not None:
            found.append(model)
        else:
            message = "DeepCache: it cannot divide %s: %s; every step runs in full."
            report(message, type(model).__name__, why_no_split(model))
    return found


@contextmanager
def _image(pipe: weakref.ref[Any], settings: DeepCacheSettings, running: dict[int, ExitStack]) -> Iterator[None]:
    """One denoising loop; a loop within it, as over the parts of a video, belongs to it. The models are looked up anew.

    running: thread in the middle of an image → what ends the image.
    """
    thread = threading.get_ident()
    if thread in running:
        yield
        return
    with ExitStack() as undo:
        running[thread] = undo
        undo.callback(running.pop, thread, None)
        models, scheduler = models_to_split(pipe(), log.debug), getattr(pipe(), "scheduler", None)
        for model in models:
            cache = _Cache(pipe(), model, settings, len(models))
            undo.callback(cache.end_image)
            undo.enter_context(substituted({model: cache.call}, Order.CACHED, this_thread_only=True))
            if callable(getattr(scheduler, "step", None)):
                undo.enter_context(around_steps(scheduler, cache.before_step, cache.after_step))
        yield


class _Cache:
    """The run of one model of the pipeline, and its progress; for one denoising loop."""

    def __init__(self, pipe: Any, model: torch.nn.Module, settings: DeepCacheSettings, models: int):
        self.pipe, self.model, self.settings, self.models = pipe, model, settings, models
        self.is_compiled = is_compiled(model)
        """Whether torch traces into its layers, where it could not ask for the thread."""
        self.schedule: PipelineSchedule | None = None
        self.unknown_timesteps: Any = None
        """The scheduler's timesteps where no schedule could be made of them."""
        self.plain_calls = self.cached_calls = 0
        self.run: DeepCacheRun | None = None
        self.evaluation: tuple[Any, ...] = (-1,)
        """Index in the schedule and the scheduler's step counts: the calls of one evaluation share them."""
        self.layouts: list[Hashable] = []
        """`_layout` of each call of the current evaluation."""
        self.made: Callable[[], Any] | None = None
        """Gives the latent of the scheduler's last step, as long as somebody has it; None before its first."""

    @torch.compiler.disable
    def call(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the model: skipped, full with its features stored, or plain."""
        if self.model in _called.get():
            return inner(*args, **kwargs)
        try:
            named = arguments(self.model, args, kwargs)
        except NoStreams:
            return inner(*args, **kwargs)  # raises the error of wrong arguments
        timestep = next((named.pop(name) for name in _TIMESTEPS if name in named), None)
        latent = _joined(next(iter(named.values()), None))
        is_known = timestep is not None and latent is not None
        # What guides by gradients needs a call that leads back to the latent.
        has_gradients = is_known and torch.is_grad_enabled() and latent.requires_grad
        run = self._begin(timestep) if is_known and not has_gradients else None
        if run is None:
            self.plain_calls += 1
            return inner(*args, **kwargs)
        self.cached_calls += 1
        features = run.of(self.model)
        before = _called.set((*_called.get(), self.model))
        self.layouts.append(_layout(named))
        # A transformer's residuals stay: what skipped blocks are given has no effect.
        withheld = features.split.withhold(kwargs) if isinstance(features.split, DownUpUNetSplit) else kwargs
        try:
            return cached_call(
                features,
                # Cond and uncond are one batch from the first step to the last, so one branch; or separate calls, in
                # the same order at every step.
                features.branches(latent, ("batch",), (0,), self.layouts[-1]),
                lambda: inner(*args, **with_own_lists(kwargs)),
                lambda: inner(*args, **withheld),
                (),
                this_thread_only=not self.is_compiled,
            )
        finally:
            _called.reset(before)

    def before_step(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Before the scheduler's step, with its arguments. Returns what it is to be given in place of the model's
        output, if anything."""
        run, layouts = self.run, tuple(self.layouts)
        self.layouts = []
        if run is None or not layouts:
            return None
        if not run.facts.adds_noise and given.get("eta"):  # DDIM's
            run.stop_correcting()
            run.run_in_full("its scheduler is told only in its steps that it adds noise")
            return None
        try:
            return self._ended(run, given, layouts)
        except Exception as error:
            run.stop_correcting()
            run.run_in_full(f"its predictions cannot be compared in this pipeline ({error})")
            return None

    def _ended(self, run: DeepCacheRun, given: Mapping[str, Any], layouts: tuple[Hashable, ...]) -> torch.Tensor | None:
        """The model's output with what it takes for the latent to be what it should be; None for as it is."""
        scheduler = self.schedule.scheduler
        output, timestep, sample = (given[name] for name in ("model_output", "timestep", "sample"))
        if output.shape != sample.shape:
            raise ValueError("they have another shape than its latent")
        has_more = any(value is not None and name not in _PLAIN_STEP for name, value in given.items())
        if has_more or self.made is not None and self.made() is not sample:
            run.stop_correcting()  # it is not a plain step, or the latent was changed since the last, as for a mask
        latent = noisy(scheduler, timestep, sample, run.angle)
        prediction = denoised(scheduler, output, timestep, sample, run.angle)
        asked = getattr(self.pipe, "guidance_scale", None), layouts
        corrected = run.end(latent, self.schedule.level(self.evaluation[0]), prediction, asked)
        if corrected is prediction:
            return None
        return output + ((corrected - prediction) / share_of(scheduler, run.angle)).to(output.dtype)

    def after_step(self, result: Any) -> None:
        """After the scheduler's step, with what it returned."""
        latent = result[0] if isinstance(result, tuple) and result else getattr(result, "prev_sample", None)
        self.made = weakref.ref(latent) if isinstance(latent, torch.Tensor) else lambda: None

    def _begin(self, timestep: Any) -> DeepCacheRun | None:
        """The run of a call at `timestep`; None for one outside the scheduler's schedule."""
        schedule = self._schedule()
        place = None if schedule is None else schedule.place_of(timestep)
        if place is None:
            return None
        if self.run is None or place < self.evaluation[0]:
            self.end_run()
            self.run = self._start_run(schedule, place)
        counted = tuple(getattr(schedule.scheduler, name, None) for name in ("step_index", "counter"))
        if (place, *counted) != self.evaluation:
            self.layouts.clear()
            self.run.begin(schedule.level(place))
            self.evaluation = (place, *counted)
        return self.run

    def _schedule(self) -> PipelineSchedule | None:
        """The current image's schedule; None where it cannot be read."""
        scheduler = getattr(self.pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or timesteps is self.unknown_timesteps:
            return None
        if self.schedule is None or not self.schedule.is_of(scheduler):
            self.end_run()
            try:
                self.schedule = PipelineSchedule(scheduler)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                self.schedule, self.unknown_timesteps = None, timesteps
                message = "DeepCache: %s has a schedule that it does not understand (%s); every step runs in full."
                log.warning(message, type(scheduler).__name__, error)
        return self.schedule

    def _start_run(self, schedule: PipelineSchedule, place: int) -> DeepCacheRun:
        settings, facts, scheduler = self.settings, facts_of(schedule, place), schedule.scheduler
        has_hooks = any(module._forward_hooks for module in self.model.modules() if module is not self.model)
        try:
            follows = tuple(follows_of(scheduler, angle_of(level, facts.is_flow)) for level in facts.levels)
        except Exception:  # a scheduler without a config
            follows = None
        return DeepCacheRun(
            settings,
            facts,
            find_split,
            window=tuple(schedule.level_at(percent) for percent in (settings.start_percent, settings.end_percent)),
            follows=follows if self.models == 1 else None,
            # Self-attention guidance's.
            why_full="a hook may read what its layers give" if has_hooks else None,
        )

    def end_image(self) -> None:
        self.end_run()
        if self.plain_calls and not self.cached_calls and self.unknown_timesteps is None:
            message = "DeepCache: %s is called at other timesteps than its scheduler's; every step ran in full."
            log.warning(message, type(self.model).__name__)

    def end_run(self) -> None:
        """Close the run and report it."""
        if self.run is not None:
            run = self.run
            skipping = Skipping(
                steps_taken=run.letters,
                why_full=run.why_full,
                target_db=run.settings.quality,
                skipped_work=run.skipped_work,
                kept_bytes=run.bytes,
            )
            if not run.skipped_steps and run.why_full is None:
                log.info("%s", skipping_fact(skipping).sentence)
            run.close()
            emit("deep_cache_run", skipping=skipping, began=run.began)
        self.run, self.evaluation, self.made = None, (-1,), None
        self.layouts.clear()


def _joined(latent: Any) -> torch.Tensor | None:
    """The latents [B, ...] of a call; None for several of different sizes."""
    if isinstance(latent, list) and latent and all(isinstance(one, torch.Tensor) for one in latent):
        first = latent[0]
        is_even = all(one.shape == first.shape and one.dtype == first.dtype for one in latent)
        return torch.stack(latent) if is_even else None  # Z-Image takes a list of them
    return latent if isinstance(latent, torch.Tensor) and latent.ndim else None


def _layout(named: Mapping[str, Any]) -> Hashable:
    """The names of a call's arguments, with shapes, flags and texts, but no other values.

    Tells apart the branches of guidance that calls the model again without some layers, with another text, or without
    a ControlNet. Numbers are left out, since they may change with every step, and the contents of dicts, since some
    models add to them.
    """

    def described(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
        if isinstance(value, (list, tuple)):
            return tuple(one if type(one) is int else described(one) for one in value)
        return value if value is None or isinstance(value, (bool, str)) else type(value)

    return tuple((name, described(value)) for name, value in named.items())

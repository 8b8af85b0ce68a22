"""DeepCache in a diffusers pipeline: a context in which every image, or batch of images, is a DeepCacheRun."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ...core.events import emit, log
from ...modules.first_call import is_compiled
from ...modules.substitution import Order, substituted
from ...report.headline import why_none_skipped
from ...report.run import Skipping
from ...step_cache.cached_call import cached_call
from ...step_cache.config import DeepCacheSettings
from ...step_cache.policies.quality import PLAIN
from ...step_cache.policies.sensitivity import learnt_in
from ...step_cache.predictions.correction import Correction, Response
from ...step_cache.run import DeepCacheRun
from ...step_cache.split_points import find_split, why_no_split
from ...step_cache.token_streams import NoStreams, arguments
from ...step_cache.unet_split import DownUpUNetSplit
from ...store import location
from .denoising_loop import around_loops
from .predictions import (
    around_steps,
    carried_by,
    combined,
    denoised,
    noisy,
    scheduler_response,
    share_of,
    told_to_add_noise,
)
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
    """Within the context, the pipeline's UNet or transformers skip their deep part on some steps.

    `pipe` has a `scheduler`, any of `DENOISERS`, and a `progress_bar` around its denoising loop. Between images the
    models are untouched, so they may be moved, offloaded, shared or replaced, and the scheduler too; nothing of an
    image is kept, however it ends. With settings that skip nothing, or models without a split, the context does
    nothing. A model compiled as a whole runs uncompiled within it. With a quality, some steps run both ways, and what
    the scheduler is given by either is compared; where it cannot be, every step runs in full.

    Emits "deep_cache_run" after each run: one for each image and, where a pipeline has two, transformer. Raises
    ValueError when the depth is beyond a model.
    """
    with ExitStack() as undo:
        if models_to_split(pipe, settings.depth, log.warning) and not settings.is_off:
            images = undo.enter_context(_Images(pipe, settings))
            undo.enter_context(around_loops(pipe, images.one))
        del pipe  # the context must not keep its memory
        yield


def models_to_split(pipe: Any, depth: int | None, report: Callable[..., None]) -> list[torch.nn.Module]:
    """The pipeline's models that have a split at `depth`; `report` gets the reason for each of the others."""
    models = [getattr(pipe, name, None) for name in DENOISERS]
    models = [getattr(model, "_orig_mod", model) for model in models if model is not None]
    if not models:
        report("DeepCache: it cannot divide %s, which has none of %s.", type(pipe).__name__, ", ".join(DENOISERS))
    found = []
    for model in models:
        if find_split(model, depth) is not None:
            found.append(model)
        else:
            message = "DeepCache: it cannot divide %s: %s; every step runs in full."
            report(message, type(model).__name__, why_no_split(model))
    return found


class _Images:
    """The images that a pipeline makes within this context; its models are looked up for each."""

    def __init__(self, pipe: Any, settings: DeepCacheSettings):
        self.pipe, self.settings = weakref.ref(pipe), settings
        self.made: dict[int, ExitStack] = {}
        """Thread in the middle of an image → what ends the image."""

    def __enter__(self) -> _Images:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in list(self.made.values()):
            undo.close()

    @contextmanager
    def one(self) -> Iterator[None]:
        """One denoising loop; a loop within it, as over the parts of a video, belongs to it."""
        thread = threading.get_ident()
        if thread in self.made:
            yield
            return
        with ExitStack() as undo:
            self.made[thread] = undo
            undo.callback(self.made.pop, thread, None)
            pipe = self.pipe()
            models, settings = self._models(pipe), self.settings
            for model in models:
                cache = _Cache(pipe, model, settings, len(models))
                undo.callback(cache.end_image)
                undo.enter_context(substituted({model: cache.call}, Order.CACHED, this_thread_only=True))
                scheduler = getattr(pipe, "scheduler", None)
                if callable(getattr(scheduler, "step", None)):
                    undo.enter_context(around_steps(scheduler, cache.before_step, cache.after_step))
            yield

    def _models(self, pipe: Any) -> list[torch.nn.Module]:
        try:
            return models_to_split(pipe, self.settings.depth, log.debug)
        except ValueError as error:
            log.warning("%s Every step runs in full.", error)  # a model replaced since the context began
            return []


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
        self.compared: list[tuple[Any, Any]] = []
        """Of each call of the current evaluation, where it is compared, the result as a skipped and as a full one."""
        self.layouts: list[Hashable] = []
        """Of each call of the current evaluation."""
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
        before = _called.set((*_called.get(), self.model))
        split = run.split
        self.layouts.append(_layout(named))
        once = functools.partial(
            cached_call,
            run,
            split,
            # Cond and uncond are one batch from the first step to the last, so one branch; or separate calls, in the
            # same order at every step.
            run.branches(latent, ("batch",), (0,), self.layouts[-1]),
            latent,
            lambda: inner(*args, **kwargs),
            # A transformer's residuals stay: what skipped blocks are given has no effect.
            lambda: inner(*args, **(split.withhold(kwargs) if isinstance(split, DownUpUNetSplit) else kwargs)),
            lambda error: isinstance(error, torch.OutOfMemoryError),
            this_thread_only=not self.is_compiled,
        )
        try:
            if not run.is_probing:
                return once()
            forecast = run.tried(once)
            with run.in_full():
                out = once()
            self.compared.append((forecast, out))
            return out
        finally:
            _called.reset(before)

    def before_step(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Before the scheduler's step, with its arguments: compare, where the evaluation that led to it is compared,
        and correct. Returns what the scheduler is to be given in place of the model's output, if anything."""
        run, compared, layouts = self.run, self.compared, tuple(self.layouts)
        self.compared, self.layouts = [], []
        if run is None:
            return None
        if run.is_probing:
            self._compare(given, compared)
        if not run.adds_noise and given.get("eta"):
            # DDIM's noise of its own, which it is only told now.
            if run.has_skipped:
                run.run_in_full("its scheduler began to add noise after it had skipped steps without")
            else:
                run.add_noise(told_to_add_noise(run.carries), find_split(self.model, self.settings.depth, True))
        return self._corrected(given, layouts) if run.correction is not None else None

    def _compare(self, given: Mapping[str, Any], compared: Sequence[tuple[Any, Any]]) -> None:
        run = self.run
        forecast = truth = None
        try:
            output, timestep, sample = (given[name] for name in ("model_output", "timestep", "sample"))
            forecast = combined(*zip(*compared, strict=True), output)
            if forecast is None:
                raise ValueError("its predictions have another shape than what its scheduler is given")
            forecast, truth = (
                denoised(self.schedule.scheduler, one, timestep, sample, run.angle) for one in (forecast, output)
            )
        except Exception as error:
            run.run_in_full(f"a quality cannot be measured in this pipeline ({error})")
        run.end_probe(forecast, truth)

    def _corrected(self, given: Mapping[str, Any], layouts: tuple[Hashable, ...]) -> torch.Tensor | None:
        """The model's output with what it takes for the latent to be what it should be; None for as it is."""
        run, scheduler = self.run, self.schedule.scheduler
        try:
            output, timestep, sample = (given[name] for name in ("model_output", "timestep", "sample"))
            others = [name for name, value in given.items() if value is not None and name not in _PLAIN_STEP]
            if not layouts or others or output.shape != sample.shape:
                raise ValueError("this step is not the scheduler's plain one")
            if self.made is not None and self.made() is not sample:
                raise ValueError("the latent was changed between steps")  # as for a mask
            share, level = share_of(scheduler, run.angle), self.schedule.level(self.evaluation[0])
            latent = noisy(scheduler, timestep, sample, run.angle)
            prediction = latent + share * output.float()
            asked = getattr(self.pipe, "guidance_scale", None), layouts
            corrected = run.corrected(latent, level, prediction, asked)
            return None if corrected is prediction else output + ((corrected - prediction) / share).to(output.dtype)
        except Exception as error:
            log.debug("DeepCache corrects nothing from here on: %s", error)
            run.stop_correcting()
            return None

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
            if self.run.is_probing:  # no step came
                self.run.run_in_full("a quality cannot be measured in this pipeline (its scheduler is not asked)")
                self.run.end_probe(None, None)
                self.compared.clear()
                self.layouts.clear()
            self.run.begin_evaluation(schedule.level(place))
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
        run = DeepCacheRun(self.settings)
        run.is_flow = schedule.is_flow
        run.carries, run.models = carried_by(schedule.scheduler), self.models
        run.adds_noise = run.carries is None or run.carries[0] != PLAIN[0]  # DDIM is told later, by an eta
        run.split = find_split(self.model, self.settings.depth, run.adds_noise)
        response = self._response(run, schedule, place)
        run.correction = None if response is None else Correction(response)
        home = location.personal_home()
        if run.target is not None and not location.is_off() and home is not None:
            run.learnt = learnt_in(home)
        run.guided_by = str(getattr(self.pipe, "guidance_scale", ""))
        if run.target is not None and run.carries is None:
            run.run_in_full(f"how {type(schedule.scheduler).__name__} carries errors on is not known to a quality")
        if any(module._forward_hooks for module in self.model.modules() if module is not self.model):
            run.run_in_full("a hook may read what its layers give")  # self-attention guidance
        run.window = tuple(schedule.level_at(p) for p in (self.settings.start_percent, self.settings.end_percent))
        run.set_schedule(schedule.run_from(place))
        return run

    def _response(self, run: DeepCacheRun, schedule: PipelineSchedule, place: int) -> Response | None:
        """Of the scheduler; None where nothing is corrected."""
        if not run.may_correct:
            return None
        try:
            return scheduler_response(schedule, place)
        except Exception as error:
            log.debug("DeepCache corrects nothing with %s: %s", type(schedule.scheduler).__name__, error)
            return None

    def end_image(self) -> None:
        self.end_run()
        if self.plain_calls and not self.cached_calls and self.unknown_timesteps is None:
            message = "DeepCache: %s is called at other timesteps than its scheduler's; every step ran in full."
            log.warning(message, type(self.model).__name__)

    def end_run(self) -> None:
        """Close the run and report it."""
        if self.run is not None:
            facts = self.run.quality_facts()
            skipping = Skipping(self.run.letters, self.run.why_full, **facts)
            if not self.run.log_quality(facts) and self.run.target is not None and not self.run.failed:
                why = why_none_skipped(skipping, self.run.full_steps)
                log.info("DeepCache, %d steps: %s.", self.run.full_steps, why)
            self.run.close()
            emit("deep_cache_run", skipping=skipping, began=self.run.began)
        self.run, self.evaluation, self.made = None, (-1,), None
        self.compared.clear()
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

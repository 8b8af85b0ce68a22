"""DeepCache in a diffusers pipeline: a context in which every image, or batch of images, is a DeepCacheRun."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch

from ...core.events import emit, log
from ...modules.blocks import unwrap_compiled
from ...modules.substitution import Order, substitute
from ...report.facts import make_skip_fact
from ...report.run import Skipping
from ...step_cache.config import DeepCacheSettings
from ...step_cache.noise_levels import angle as angle_of
from ...step_cache.run import DeepCacheRun
from .predictions import compute_denoised, facts_of, noisy, output_of, wrap_steps
from .replaced_method import wrap_loops
from .schedule import PipelineSchedule

DENOISERS = ("unet", "transformer", "transformer_2")
"""Components that a pipeline calls at every step; Wan 2.2 has two, one for each part of the schedule."""

_TIMESTEPS = ("timestep", "timesteps", "t")  # names of the argument that says where in the schedule a call is
_PLAIN_STEP = ("model_output", "timestep", "sample", "eta", "generator", "return_dict")
"""Arguments of a scheduler's step that change nothing of how predictions reach its later latents, as long as it adds no
noise."""

_called: ContextVar[tuple[torch.nn.Module, ...]] = ContextVar("accel_deep_cache_called", default=())
"""Models that are in a cached call. Where the contexts of several pipelines share a model, the innermost one caches."""


@contextmanager
def deep_cache(pipe: Any, settings: DeepCacheSettings) -> Iterator[None]:
    """Within the context, the pipeline does without its UNet or transformers on some steps.

    `pipe` has a `scheduler`, any of `DENOISERS`, and a `progress_bar` around its denoising loop. Between images the
    models are untouched, so they may be moved, offloaded, shared or replaced, and the scheduler too; nothing of an
    image is kept, however it ends. With settings that skip nothing the context does nothing. A model compiled as a
    whole runs uncompiled within it. Where what the scheduler is given cannot be told, every step runs in full.

    Emits "deep_cache_run" after each image.
    """
    with ExitStack() as undo:
        if not models_of(pipe):
            log.warning("DeepCache: %s has none of %s.", type(pipe).__name__, ", ".join(DENOISERS))
        elif not settings.is_off:
            running: dict[int, ExitStack] = {}
            # Images that were broken off, whose frames an exception may keep alive.
            undo.callback(lambda: list(map(ExitStack.close, list(running.values()))))
            undo.enter_context(wrap_loops(pipe, partial(_cache_image, weakref.ref(pipe), settings, running)))
        del pipe  # the context must not keep its memory
        yield


def models_of(pipe: Any) -> list[torch.nn.Module]:
    """The pipeline's models that are called at every step."""
    models = [getattr(pipe, name, None) for name in DENOISERS]
    return [unwrap_compiled(model) for model in models if model is not None]


@contextmanager
def _cache_image(pipe: weakref.ref[Any], settings: DeepCacheSettings, running: dict[int, ExitStack]) -> Iterator[None]:
    """One denoising loop; a loop within it, as over the parts of a video, belongs to it. running: thread in the middle
    of an image → what ends the image."""
    thread = threading.get_ident()
    if thread in running:
        yield
        return
    with ExitStack() as undo:
        running[thread] = undo
        undo.callback(running.pop, thread, None)
        image, scheduler = _Image(pipe(), settings), getattr(pipe(), "scheduler", None)
        undo.callback(image.end)
        for model in models_of(pipe()):
            call = partial(image.call, model)
            undo.enter_context(substitute({model: call}, Order.CACHED, this_thread_only=True))
        if callable(getattr(scheduler, "step", None)):
            undo.enter_context(wrap_steps(scheduler, image.begin_step, image.end_step))
        yield


class _Image:
    """One denoising loop: its run, and how far it has come."""

    def __init__(self, pipe: Any, settings: DeepCacheSettings):
        self._pipe, self._settings = pipe, settings
        self._schedule: PipelineSchedule | None = None
        self._timesteps: Any = None  # the scheduler's, of which this is the schedule, if one could be made
        self._run: DeepCacheRun | None = None
        self._evaluation: tuple[Any, ...] = (-1,)
        """Index in the schedule and the scheduler's step counts: the calls of one evaluation share them."""
        self._calls = 0  # calls of the current evaluation
        self._calls_before = 0  # calls of the evaluation before
        self._is_held = False  # whether one of the current evaluation's calls returned the output of the last full one
        self._returned: list[tuple[Any, Any]] = []
        """What each call of the last full evaluation was given, by names and shapes, and what it returned."""
        self._made: Callable[[], Any] | None = None
        """Gives the latent of the scheduler's last step, as long as somebody has it; None before its first."""

    @torch.compiler.disable
    def call(self, model: torch.nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of a model; in a skipped step, the output of the last full one, which `begin_step` corrects."""
        if model in _called.get():
            return inner(*args, **kwargs)
        named = {**dict(zip(_names_of(type(model)), args, strict=False)), **kwargs}  # type: ignore[arg-type]  # a class is hashable
        timestep = next((named.pop(name) for name in _TIMESTEPS if name in named), None)
        # What guides by gradients needs a call that leads back to the latent.
        has_gradients = torch.is_grad_enabled() and getattr(next(iter(named.values()), None), "requires_grad", False)
        if timestep is None or has_gradients or not self._begin(timestep, model):
            return inner(*args, **kwargs)
        # Branches of guidance, and whether there is guidance, differ in their order and in these.
        place, layout = self._calls, (model, [(name, _read_shapes(value)) for name, value in named.items()])
        self._calls += 1
        if self._run.skips and place < len(self._returned) and self._returned[place][0] == layout:
            self._is_held = True
            return self._returned[place][1]
        if not self._is_held:  # what was held cannot be called any more
            self._run.keep_full()
        before = _called.set((*_called.get(), model))
        try:
            out = inner(*args, **kwargs)
        finally:
            _called.reset(before)
        self._returned[place:] = [(layout, out)]
        parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else ()
        if sum(isinstance(part, torch.Tensor) for part in parts) > 1:
            self._run.run_in_full(f"{type(model).__name__} predicts several things at once")
        return out

    def begin_step(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Before the scheduler's step: what it is to be given in place of the model's output, if anything."""
        run, calls, self._calls = self._run, self._calls, 0
        if run is None or not calls:
            return None
        if not run.facts.adds_noise and given.get("eta"):  # DDIM's
            run.stop_correcting()
            run.run_in_full("its scheduler is told only in its steps that it adds noise")
        try:
            return self._end_evaluation(run, given, calls)
        except Exception as error:
            run.stop_correcting()
            run.run_in_full(f"its predictions cannot be compared in this pipeline ({error})")
            return None

    def _end_evaluation(self, run: DeepCacheRun, given: Mapping[str, Any], calls: int) -> torch.Tensor | None:
        """Returns the output to give to the scheduler; None to leave it as it is."""
        scheduler = self._schedule.scheduler
        output, timestep, sample = (given[name] for name in ("model_output", "timestep", "sample"))
        if output.shape != sample.shape:
            raise ValueError("they have another shape than its latent")
        has_more = any(value is not None and name not in _PLAIN_STEP for name, value in given.items())
        if has_more or self._made is not None and self._made() is not sample:
            run.stop_correcting()  # it is not a plain step, or the latent was changed since the last, as for a mask
        angle = angle_of(self._schedule.level(self._evaluation[0]), run.facts.is_flow)
        latent = noisy(scheduler, timestep, sample, angle)
        corrected = run.forecast(latent)
        if calls != self._calls_before:  # guidance has begun or ended
            run.forget()
        self._calls_before = calls
        if corrected is None and self._is_held:
            run.count(is_skipped=True)
            return None
        if corrected is None:
            prediction = compute_denoised(scheduler, output, latent, angle)
            corrected = run.end(latent, prediction)
            if corrected is prediction:
                return None
        return output_of(scheduler, corrected, latent, angle).to(output.dtype)

    def end_step(self, result: Any) -> None:
        """After the scheduler's step, with what it returned."""
        latent = result[0] if isinstance(result, tuple) and result else getattr(result, "prev_sample", None)
        self._made = weakref.ref(latent) if isinstance(latent, torch.Tensor) else lambda: None

    def _begin(self, timestep: Any, model: torch.nn.Module) -> bool:
        """Whether a call at `timestep` belongs to the run, which begins with the first one that does."""
        schedule = self._read_schedule()
        if schedule is None or (place := schedule.place_of(timestep)) is None:
            return False
        if self._run is None or place < self._evaluation[0]:
            self._end_run()
            settings = self._settings
            window = tuple(schedule.level_at(percent) for percent in (settings.start_percent, settings.end_percent))
            self._run = DeepCacheRun(settings, facts_of(schedule, place), window)
        evaluation = place, *(getattr(schedule.scheduler, name, None) for name in ("step_index", "counter"))
        if evaluation != self._evaluation:
            self._evaluation, self._calls, self._is_held = evaluation, 0, False
            self._run.begin(schedule.level(place), (model, getattr(self._pipe, "guidance_scale", None)))
        return True

    def _read_schedule(self) -> PipelineSchedule | None:
        """The current image's schedule; None where it cannot be read."""
        scheduler = getattr(self._pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is not self._timesteps:  # a scheduler makes new ones for every image, and each part of a video
            self._end_run()
            self._schedule, self._timesteps = None, timesteps
            try:
                self._schedule = PipelineSchedule(scheduler)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                message = "DeepCache: %s has a schedule that it does not understand (%s); every step runs in full."
                log.warning(message, type(scheduler).__name__, error)
        return self._schedule

    def end(self) -> None:
        """Drop all that is kept, and report."""
        if self._run is None and self._schedule is not None:
            message = "DeepCache: %s is called at other timesteps than its scheduler's; every step ran in full."
            log.warning(message, f"a model of {type(self._pipe).__name__}")
        self._end_run()

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.close()
            skipping = Skipping.from_lease(self._run)
            if not skipping.skipped_steps and self._run.why_full is None:
                log.info("%s", make_skip_fact(skipping).sentence)
            emit("deep_cache_run", skipping=skipping, began=self._run.began)
        self._run, self._evaluation, self._made = None, (-1,), None
        self._calls, self._returned = 0, []


@lru_cache
def _names_of(kind: type[torch.nn.Module]) -> tuple[str, ...]:
    """The names of what models of this class are called with."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _read_shapes(value: Any) -> Any:
    """An argument's shape; of a list of images, as Z-Image's, those of all: with guidance it has more."""
    return list(map(_read_shapes, value)) if isinstance(value, (list, tuple)) else getattr(value, "shape", None)

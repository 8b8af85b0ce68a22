"""What a pipeline's scheduler is given at each step, what it would have been given had the step been skipped, and how
that reaches its later latents."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from ...modules.substitution import rebound
from ...step_cache.policies.quality import PLAIN
from ...step_cache.predictions.correction import Predict, Response, response_of
from ...step_cache.step_schedule import angle as angle_of
from .schedule import PipelineSchedule

_MULTISTEP, _ANCESTRAL, _FROM_PREDICTION = (1.0, 1.0), (2.0, 0.0), (math.inf, 0.0)

_CARRIED = {
    **dict.fromkeys(("DDIM", "EulerDiscrete", "HeunDiscrete", "KDPM2Discrete"), PLAIN),
    **dict.fromkeys(("FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete"), PLAIN),
    **dict.fromkeys(("DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep", "DEISMultistep"), _MULTISTEP),
    **dict.fromkeys(("LMSDiscrete", "PNDM"), _MULTISTEP),
    **dict.fromkeys(("EulerAncestralDiscrete", "KDPM2AncestralDiscrete", "DPMSolverSDE", "DDPM"), _ANCESTRAL),
    **dict.fromkeys(("LCM", "TCD", "FlowMatchLCM"), _FROM_PREDICTION),
}
"""Names of schedulers, each with `kept` and `beyond` of `policies.quality.Carried`."""

MOST_LEFT = 0.5
"""The share of what a scheduler is given that may be something else than a sum of predictions. It is 0.2 with guidance
that scales each place by itself (Lumina 2's), and 1 with predictions that were laid out anew."""


def carried_by(scheduler: Any) -> tuple[float, float] | None:
    """How a scheduler carries errors on: `kept` and `beyond` of `policies.quality.Carried`; None for one that is not
    known."""
    names = (one.__name__.removesuffix("Scheduler") for one in type(scheduler).__mro__)
    known = next((_CARRIED[name] for name in names if name in _CARRIED), None)
    config = getattr(scheduler, "config", None)
    if known is None or getattr(config, "invert_sigmas", False):
        return None
    if getattr(config, "stochastic_sampling", False):  # of FlowMatchEulerDiscreteScheduler: as LCM's
        return _FROM_PREDICTION
    adds_noise = str(getattr(config, "algorithm_type", "")).startswith("sde")
    return told_to_add_noise(known) if adds_noise else known


def told_to_add_noise(carried: tuple[float, float]) -> tuple[float, float]:
    """How a scheduler carries errors on once it adds noise."""
    return _ANCESTRAL[0], carried[1]


def denoised(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor, angle: float) -> torch.Tensor:
    """The denoised latent [B, ...] in float32 that `output` stands for.

    output, timestep, sample: as `scheduler.step` gets them. angle: the noise level (`step_schedule.angle`).

    Raises ValueError for a prediction of a kind that is not known.
    """
    share = share_of(scheduler, angle)
    kept = {"v_prediction": math.cos(angle) ** 2, "sample": 0.0}.get(_kind(scheduler), 1.0)
    return kept * noisy(scheduler, timestep, sample, angle) + share * output.float()


def noisy(scheduler: Any, timestep: Any, sample: torch.Tensor, angle: float) -> torch.Tensor:
    """The noisy latent [B, ...] in float32, in which the image has its own size, or its share of it with a flow.

    Arguments as for `denoised`.
    """
    if _kind(scheduler) == "flow_prediction":
        return sample.float()
    # All of diffusers' schedulers scale what the model gets to unit variance, whatever they keep themselves.
    return scheduler.scale_model_input(sample, timestep).float() / math.cos(angle)


def share_of(scheduler: Any, angle: float) -> float:
    """By how much the denoised latent changes where what the model returns changes by 1.

    Raises ValueError for a prediction of a kind that is not known.
    """
    cosine, sine, kind = math.cos(angle), math.sin(angle), _kind(scheduler)
    shares = {"flow_prediction": -sine / (sine + cosine), "epsilon": -sine / cosine}
    shares |= {"v_prediction": -sine, "sample": 1.0}
    if kind not in shares:
        raise ValueError(f"its scheduler predicts {kind}")
    return shares[kind]


def _kind(scheduler: Any) -> str:
    return getattr(scheduler.config, "prediction_type", "flow_prediction")


def scheduler_response(schedule: PipelineSchedule, place: int) -> Response | None:
    """How predictions reach the later latents of a run from the step at `place` on; None where they may not be
    corrected. Runs a copy of the scheduler on the CPU, without calling the model."""
    original = schedule.scheduler
    if _kind(original) != ("flow_prediction" if schedule.is_flow else "epsilon"):
        return None  # forecasts of other kinds of predictions follow the latent less
    levels, timesteps = schedule.run_from(place), schedule.timesteps[place:].cpu()
    # Configs made from another scheduler's have fields that the class ignores.
    own = inspect.signature(type(original).__init__).parameters
    is_clipped = any(getattr(original.config, name, False) for name in ("clip_sample", "thresholding") if name in own)
    if is_clipped or len(timesteps) != len(levels) - 1:
        return None  # it is not linear, or evaluates steps more than once
    if getattr(original, "step_index", None) not in (None, place):
        return None  # it went on or back

    def sample(predict: Predict, latent: torch.Tensor) -> torch.Tensor:
        scheduler = _on_cpu(original)
        for timestep, level in zip(timesteps, levels, strict=False):
            angle = angle_of(level, schedule.is_flow)
            seen = noisy(scheduler, timestep, latent, angle)
            output = (predict(seen, level) - seen) / share_of(scheduler, angle)
            latent = scheduler.step(output, timestep, latent, return_dict=False)[0]
        return latent

    with torch.random.fork_rng(devices=[]):  # older Euler schedulers draw noise and scale it by 0
        return response_of(levels, sample)


def _on_cpu(scheduler: Any) -> Any:
    """A copy, without what contexts have made of its step."""
    shallow = copy.copy(scheduler)
    vars(shallow).pop("step", None)
    tensors = {name: one.cpu() for name, one in vars(shallow).items() if isinstance(one, torch.Tensor)}
    vars(shallow).update(tensors)
    return copy.deepcopy(shallow)


def combined(forecasts: Sequence[Any], truths: Sequence[Any], given: torch.Tensor) -> torch.Tensor | None:
    """What the scheduler would have been given instead of `given` [B, ...], in its shape and in float32.

    forecasts, truths: of each model call of the evaluation, what it returned as a skipped and as a full one. The
    pipeline has combined the truths, as guidance does: each sample of `given` is a sum of them with factors, which are
    found by projection, and the forecasts' errors add up with the same ones. None where shapes do not fit; NaN, which
    skips nothing and needs no waiting for the device, where a sample is no such sum.
    """
    parts = [_rows(tensor, given) for tensor in (*truths, *forecasts)]
    if not forecasts or any(part is None for part in parts):
        return None
    bases, others = sum(parts[: len(truths)], []), sum(parts[len(truths) :], [])
    # The first as it is, the others by their difference from it: neighbours differ little.
    bases, others = ([part[0], *(one - part[0] for one in part[1:])] for part in (bases, others))
    flat, error = given.float().flatten(1), 0.0
    rest = flat
    for index, base in enumerate(bases):
        for before in range(index):
            share = _share(base, bases[before])
            base, others[index] = base - share * bases[before], others[index] - share * others[before]
        bases[index] = base
        share = _share(flat, base)
        error, rest = error + share * (others[index] - base), rest - share * base
    is_sum = rest.norm(dim=1, keepdim=True) <= MOST_LEFT * flat.norm(dim=1, keepdim=True)
    return torch.where(is_sum, flat + error, math.nan).reshape(given.shape)


def _share(of: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The factor [B, 1] of `base` in `of`, both [B, N]."""
    return (of * base).sum(1, keepdim=True) / base.square().sum(1, keepdim=True).clamp_min(1e-30)


def _rows(output: Any, given: torch.Tensor) -> list[torch.Tensor] | None:
    """What one model call returned, as one [B, N] for each branch in its batch; None where it does not fit `given`.

    What a model returns beyond the prediction, as a variance or tokens of a reference, comes after it.
    """
    if isinstance(output, (tuple, dict)):
        output = next(iter(output.values() if isinstance(output, dict) else output), None)
    if isinstance(output, list) and output and all(isinstance(one, torch.Tensor) for one in output):
        output = torch.stack(output) if len({one.shape for one in output}) == 1 else None
    if not isinstance(output, torch.Tensor) or output.ndim < 2 or not given.ndim or output.shape[0] % given.shape[0]:
        return None
    if output.ndim == given.ndim and output.shape[1] > given.shape[1]:
        output = output[:, : given.shape[1]]
    rows = output.float().flatten(1)
    return list(rows.split(given.shape[0])) if rows.shape[1] == given[0].numel() else None


@contextmanager
def around_steps(
    scheduler: Any, begin: Callable[[dict[str, Any]], torch.Tensor | None], end: Callable[[Any], None]
) -> Iterator[None]:
    """Within it, `begin` gets the arguments of each `scheduler.step` before that runs, and returns what it is to be
    given in place of the model's output, if anything; `end` gets what it returns."""
    own = vars(scheduler)
    before = own.get("step")
    step = own["step"] = _Step(scheduler.step, before, begin, end)
    try:
        yield
    finally:
        step.is_over = True
        # Runs of other threads with this scheduler may have begun after this one, or ended before it.
        while isinstance(top := own.get("step"), _Step) and top.is_over:
            if top.before is None:
                del own["step"]
            else:
                own["step"] = top.before


class _Step:
    """In place of a scheduler's `step`. before: what stood on the scheduler itself."""

    def __init__(self, own: Callable[..., Any], before: Any, begin: Callable[..., Any], end: Callable[..., Any]):
        functools.update_wrapper(self, own)  # pipelines ask for its parameters
        self._own, self.before, self._begin, self._end = own, before, begin, end
        self.is_over = False
        self._names = tuple(inspect.signature(own).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_over:
            return self._own(*args, **kwargs)
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        output = self._begin(given)
        if output is not None:
            args, kwargs = (), {**given, "model_output": output}
        result = self._own(*args, **kwargs)
        self._end(result)
        return result

    def __deepcopy__(self, memo: dict) -> Any:
        """The scheduler's own method, bound to the copy of the scheduler; itself where only its attributes are copied,
        to be put back."""
        own = self._own
        while isinstance(own, _Step):  # of a context around this one
            own = own._own
        return rebound(own, memo, self) if isinstance(own, MethodType) else copy.deepcopy(own, memo)

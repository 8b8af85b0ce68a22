"""What a pipeline's scheduler is given at each step, and what it would have been given had the step been skipped."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

PLAIN, _MULTISTEP, _ANCESTRAL, _FROM_PREDICTION = (1.0, 0.0), (1.0, 1.0), (2.0, 0.0), (math.inf, 0.0)

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
    return (_ANCESTRAL[0], known[1]) if adds_noise else known


def may_add_noise(scheduler: Any) -> bool:
    """Whether a scheduler adds noise in a step, is not known, or is told only in mid-run, by an eta."""
    carried, step = carried_by(scheduler), getattr(type(scheduler), "step", None)
    return carried is None or carried[0] != 1.0 or step is None or "eta" in inspect.signature(step).parameters


def denoised(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor, angle: float) -> torch.Tensor:
    """The denoised latent [B, ...] in float32 that `output` stands for.

    output, timestep, sample: as `scheduler.step` gets them. angle: the noise level (`step_schedule.angle`).

    Raises ValueError for a prediction of a kind that is not known.
    """
    output, kind = output.float(), getattr(scheduler.config, "prediction_type", "flow_prediction")
    cosine, sine = math.cos(angle), math.sin(angle)
    if kind == "flow_prediction":
        return sample.float() - sine / (sine + cosine) * output
    # All of diffusers' schedulers scale what the model gets to unit variance, whatever they keep themselves.
    scaled = scheduler.scale_model_input(sample, timestep).float()
    if kind == "epsilon":
        return (scaled - sine * output) / cosine
    if kind == "v_prediction":
        return cosine * scaled - sine * output
    if kind == "sample":
        return output
    raise ValueError(f"its scheduler predicts {kind}")


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
def around_steps(scheduler: Any, note: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within it, `note` gets the arguments of each `scheduler.step` before that runs."""
    before, own = vars(scheduler).get("step"), scheduler.step

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        note({**dict(zip(("model_output", "timestep", "sample"), args, strict=False)), **kwargs})
        return own(*args, **kwargs)

    scheduler.step = step
    try:
        yield
    finally:
        if vars(scheduler).get("step") is step:
            del scheduler.step
            if before is not None:
                scheduler.step = before

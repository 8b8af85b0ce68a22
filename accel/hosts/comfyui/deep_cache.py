"""DeepCache inside ComfyUI: a clone of the model with wrappers, and a state for every sampler run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

from ...deep_cache import DeepCacheRun, DeepCacheSettings
from ...events import emit, log
from ...substitution import Order, substituted
from ...unet_boundary import UNetBoundary, has_unet_layout

KEY = "accel_deep_cache"
"""Of our wrappers, and of the run's state in its transformer_options."""

_WRAPPED = (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.DIFFUSION_MODEL)

_lock = threading.Lock()
_last_run: dict[str, int] | None = None


def apply_deep_cache(model_patcher: Any, settings: DeepCacheSettings) -> Any:
    """A clone of the ModelPatcher that samples with DeepCache, in place of any earlier settings.

    At interval 1, or for a model without a UNet's layout, the clone samples as if this pack were not
    there. Raises ValueError when the depth is beyond the model.
    """
    clone = model_patcher.clone()
    for kind in _WRAPPED:
        clone.remove_wrappers_with_key(kind, KEY)
    model = clone.get_model_object("diffusion_model")
    if not has_unet_layout(model):
        log.warning("DeepCache: %s is not a UNet with skip levels; every step runs in full.", type(model).__name__)
        return clone
    UNetBoundary(model, settings.depth)
    if settings.interval > 1:
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _run_wrapper(settings))
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, _begin_evaluation)
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, _call_model)
    return clone


def last_run() -> dict[str, int] | None:
    """`{"full_steps": n, "skipped_steps": n}` of the DeepCache run that ended last in this process."""
    with _lock:
        return None if _last_run is None else dict(_last_run)


def _run_wrapper(settings: DeepCacheSettings) -> Callable[..., Any]:
    def keep_state_for_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        # The guider's model_options belong to this run; core copies them, with our state by reference.
        options = executor.class_obj.model_options.setdefault("transformer_options", {})
        before = options.get(KEY)
        run = options[KEY] = DeepCacheRun(settings)
        try:
            return executor(*args, **kwargs)
        finally:
            if before is None:
                options.pop(KEY, None)
            else:
                options[KEY] = before
            run.close()
            _report(run)

    return keep_state_for_run


def _report(run: DeepCacheRun) -> None:
    global _last_run
    with _lock:
        _last_run = {"full_steps": run.full_steps, "skipped_steps": run.skipped_steps}
    emit("deep_cache_run", full_steps=run.full_steps, skipped_steps=run.skipped_steps)


def _begin_evaluation(executor: Any, x: Any, timestep: Any, model_options: dict | None = None, seed: Any = None) -> Any:
    """Around every evaluation of the guider, whatever number of model calls it makes: the one place
    that reads sigmas, since that waits for the GPU."""
    model_options = {} if model_options is None else model_options
    options = model_options.get("transformer_options", {})
    run: DeepCacheRun | None = options.get(KEY)
    if run is not None:
        schedule = options.get("sample_sigmas")
        if not run.schedule and schedule is not None:
            run.schedule = tuple(schedule.tolist())
        run.begin_evaluation(float(torch.as_tensor(timestep).max()))
    return executor(x, timestep, model_options, seed)


@torch.compiler.disable
def _call_model(
    executor: Any,
    x: torch.Tensor,
    timesteps: Any = None,
    context: Any = None,
    y: Any = None,
    control: dict | None = None,
    transformer_options: dict | None = None,
    **kwargs: Any,
) -> Any:
    """Around every call of the UNet: skipped, in full and remembered, or plain.

    Not for Dynamo: what `TorchCompileModel` traced on a full step would be wrong on a skipped one.
    """
    transformer_options = {} if transformer_options is None else transformer_options
    plain = (x, timesteps, context, y, control, transformer_options)
    run: DeepCacheRun | None = transformer_options.get(KEY)
    boundary = None if run is None else _boundary(run, executor.class_obj)
    keys = None if boundary is None else _streams(run, x, transformer_options)
    if keys is None:
        out = executor(*plain, **kwargs)
        if boundary is not None:
            run.count(skipped=False)
        return out

    if run.can_skip(keys):
        try:
            with substituted(boundary.skipping(run, keys), Order.CACHED):
                withheld = boundary.withhold(control)
                out = executor(x, timesteps, context, y, withheld, transformer_options, **kwargs)
            run.count(skipped=True)
            return out
        except Exception as error:
            if _must_pass(error):
                raise
            run.failed = True
            log.warning("DeepCache: a skipped step failed (%s); the rest of this run is computed in full.", error)
            log.debug("DeepCache: where it failed", exc_info=True)
        out = executor(*plain, **kwargs)
    else:
        with substituted(boundary.recording(run, keys), Order.CACHED):
            out = executor(*plain, **kwargs)
    run.count(skipped=False)
    return out


def _boundary(run: DeepCacheRun, model: torch.nn.Module) -> UNetBoundary | None:
    """Where the run's model is cut, looked up at its first call; None for any other model."""
    if run.boundary is None and has_unet_layout(model):
        run.boundary = UNetBoundary(model, run.settings.depth)
    return run.boundary if run.boundary is not None and run.boundary.model is model else None


def _streams(run: DeepCacheRun, x: torch.Tensor, options: dict[str, Any]) -> list | None:
    window = options.get("context_window")
    if window is not None and not hasattr(window, "index_list"):
        return None
    frames: Hashable = None if window is None else tuple(window.index_list)
    animate_diff = options.get("ad_params") or {}
    if animate_diff.get("sub_idxs") is not None:
        frames = (frames, tuple(animate_diff["sub_idxs"]))
    return run.streams(x, options.get("uuids"), options.get("cond_or_uncond", ()), frames)


def _must_pass(error: Exception) -> bool:
    """Interrupts, and lack of memory, which core handles itself."""
    out_of_memory = comfy.model_management.OOM_EXCEPTION
    if out_of_memory is not Exception and isinstance(error, out_of_memory):
        return True
    return isinstance(error, comfy.model_management.InterruptProcessingException)

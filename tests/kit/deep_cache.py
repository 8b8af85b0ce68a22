"""What tests of DeepCache in ComfyUI share.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import gc
from typing import Any

from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.run import DeepCacheRun

from kit.step_cache import every

SMALL = {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1] * 4,
}
"""Changes of `tiny_models.unet` that leave it two levels."""


def cached(model, interval=3, **settings):
    return apply_deep_cache(model, every(interval, **settings))


def last_run() -> dict[str, Any] | None:
    """DeepCache in the last run: full_steps, skipped_steps, target_db, skipped_work; None before the first."""
    run, names = records.last(), ("full_steps", "skipped_steps", "target_db", "skipped_work")
    return None if run is None else {name: getattr(run.skipping, name) for name in names}


def counts():
    return last_run()["full_steps"], last_run()["skipped_steps"]


def split_chunks(model):
    """Make core run every conditioning chunk in a call of its own."""
    asked = model.model.memory_required
    model.model.memory_required = lambda *args, **given: 1e30 if "cond_shapes" in given else asked(*args, **given)
    return model


def calls_of(model) -> list[float]:
    """Noise levels, as the model is told them, of the calls of its network from now on."""
    network, calls = model.model.diffusion_model, []
    network.register_forward_pre_hook(lambda _, args: calls.append(args[1].max().item()))
    return calls


def assert_no_trace(model):
    changed = [name for name, part in model.model.diffusion_model.named_modules() if "forward" in part.__dict__]
    assert changed == []
    gc.collect()
    runs = [thing for thing in gc.get_objects() if type(thing) is DeepCacheRun]
    assert not any(run._known or run._skipped or run._correction for run in runs)
    assert host.KEY not in model.model_options.get("transformer_options", {})


def said(caplog):
    """Log lines of DeepCache."""
    return [record.getMessage() for record in caplog.records if "DeepCache" in record.getMessage()]

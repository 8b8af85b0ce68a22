"""What tests of DeepCache share: cached models, forced splits, and calls of a UNet one by one.

Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.features import Features
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.splits.layouts import find_split
from torch.utils.flop_counter import FlopCounterMode

from kit import tiny_models
from kit.step_cache import every, features_of, run_of

SPLIT_TOLERANCE = 1e-4
"""Share of the largest value that may differ: joined and split batches add in another order, over six steps."""


def cached(model, interval=3, **settings):
    return apply_deep_cache(model, every(interval, **settings))


def last_run() -> dict[str, Any] | None:
    """The last DeepCache run: full_steps, skipped_steps, target_db, skipped_work; None before the first."""
    known = records.deep_cache()
    names = ("full_steps", "skipped_steps", "target_db", "skipped_work")
    return None if known is None else {name: getattr(known, name) for name in names}


def counts():
    return last_run()["full_steps"], last_run()["skipped_steps"]


def split_chunks(model, split=lambda: True):
    """Make core run every conditioning chunk in a call of its own while `split()`."""
    asked = model.model.memory_required

    def memory_required(*args, **kwargs):
        return 1e30 if split() and "cond_shapes" in kwargs else asked(*args, **kwargs)

    model.model.memory_required = memory_required
    return model


def failing(model, error, when):
    """The model with a patch that raises `error` where `when(call, h)`: the number of the call, what a block gave."""
    calls = [0]

    def patch(h, transformer_options):
        if transformer_options["block"] == ("input", 0):
            calls[0] += 1
        if when(calls[0], h):
            raise error
        return h

    model = model.clone()
    model.set_model_input_block_patch(patch)
    return model


def assert_close(actual, expected, tolerance=SPLIT_TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_no_trace(model):
    changed = [name for name, part in model.model.diffusion_model.named_modules() if "forward" in part.__dict__]
    assert changed == []
    gc.collect()
    things = gc.get_objects()
    assert not any(features._histories for features in things if type(features) is Features)
    assert not any(run._full.known or run._correction for run in things if type(run) is DeepCacheRun)
    assert host.KEY not in model.model_options.get("transformer_options", {})


def said_of_fallbacks(caplog):
    """Log lines of skipped calls that fell back to full ones, or of residuals that could not be added."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "DeepCache" in line or "control could not" in line]


def call_unet(model, run, x, sigma, control=None, patches=None, uuids=("u",), begins=True):
    if begins:
        run.begin(sigma)
    options = {
        host.KEY: SimpleNamespace(run=run),
        "uuids": list(uuids),
        "cond_or_uncond": list(range(len(uuids))),
        "wrappers": {WrappersMP.DIFFUSION_MODEL: {host.KEY: [host._call_model]}},
        "patches": patches or {},
    }
    context = torch.randn(x.shape[0], 77, tiny_models.CONTEXT_DIM, generator=torch.Generator().manual_seed(3))
    unet = model.model.diffusion_model
    with torch.inference_mode():
        return unet(x, torch.full((x.shape[0],), 500.0), context, control=control, transformer_options=options)


def unet_run(interval=3, levels=(3.0, 2.0, 1.0, 0.0)):
    """A run of any model that can be split."""
    return run_of(every(interval), levels, find_split)


def full_and_skipped_flops(split, x, call):
    """Of a full and of a skipped `call()` of the split's model on two chunks `x`, as torch counts them."""
    features = features_of(split, levels=(2.0, 1.0, 0.0))
    spent = []
    for sigma, stand_ins in ((2.0, split.full_layers), (1.0, split.skip_layers)):
        features.run.begin(sigma)
        layers = stand_ins(features, features.branches(x, ["a", "b"], [0, 1], None))
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad(), substituted(layers, Order.CACHED):
            call()
        spent.append(counter.get_total_flops())
    return spent


SMALL = {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1] * 4,
}
"""Changes of `tiny_models.unet` that leave it two levels."""

Streams = Callable[[int, dict], list[Hashable]]
"""From a call's place in its step and its transformer_options to one key for each conditioning chunk of its batch."""


class Slow:
    """The state of one run of `reference`; its wrappers are `begin` and `call`."""

    def __init__(self, interval: int, streams: Streams):
        self.interval, self.streams = interval, streams
        self.step = self.calls = -1
        self.features: dict[Hashable, torch.Tensor] = {}

    @property
    def skipping(self) -> bool:
        return self.step % self.interval != 0

    def begin(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.step, self.calls = self.step + 1, -1
        if not self.skipping:
            self.features.clear()
        return executor(*args, **kwargs)

    def call(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        streams = self.streams(self.calls, args[-1])
        unet = executor.class_obj

        def hold(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            chunks = zip(streams, output.chunk(len(streams)), strict=True)
            return torch.cat([self.features.setdefault(stream, chunk.clone()) for stream, chunk in chunks])

        hook = list(unet.output_blocks[-1])[-1].register_forward_hook(hold)
        try:
            return executor(*args, **kwargs)
        finally:
            hook.remove()


def by_place(call: int, options: dict) -> list[Hashable]:
    """Streams told apart by the call's place in its step, and theirs in it: for runs that ask alike on every step."""
    return [(call, chunk) for chunk in range(len(options["uuids"]))]


def by_uuid(call: int, options: dict) -> list[Hashable]:
    """Streams told apart by conditioning and context window: for runs whose calls come and go."""
    window = options.get("context_window")
    frames = None if window is None else tuple(window.index_list)
    return [(uuid, frames) for uuid in options["uuids"]]


def reference(model, interval=3, streams: Streams = by_place):
    """A clone that samples with the slow DeepCache, for one run of a sampler that asks once a step."""
    clone, slow = model.clone(), Slow(interval, streams)
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "slow", slow.begin)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "slow", slow.call)
    clone.set_attachments("slow", slow)
    return clone


def assert_as_reference(
    model,
    interval=3,
    steps=4,
    sample=tiny_models.sample,
    expected=None,
    other_order=None,
    slow=reference,
    **run,
):
    """The run is the plain one at interval 1, and the reference's at `interval`; the plain model stays as it was.

    model: with its company. expected: full and skipped steps. other_order: the same model, its company added
    after DeepCache. slow: the reference, from model and interval. Returns the cached image.
    """
    off = sample(cached(model, 1), steps=steps, **run)
    out = sample(cached(model, interval), steps=steps, **run)
    full = -(-steps // interval)
    assert counts() == (expected or (full, steps - full))
    assert torch.equal(out, sample(slow(model, interval), steps=steps, **run))
    if other_order is not None:
        assert torch.equal(out, sample(other_order(), steps=steps, **run))
        assert counts() == (expected or (full, steps - full))
    assert not any("forward" in part.__dict__ for part in model.model.diffusion_model.modules())
    plain = sample(model, steps=steps, **run)
    assert torch.equal(plain, off)
    assert out.isfinite().all() and not torch.equal(out, plain)
    return out

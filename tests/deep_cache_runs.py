"""What tests of DeepCache share: cached models, forced splits, and calls of a UNet one by one.

Imported by tests that have put a ComfyUI tree on the path.
"""

import gc

import tiny_models
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache, last_run
from comfy_accel.accel.modules.substitution import Order, substituted
from comfy_accel.accel.step_cache.run import DeepCacheRun
from torch.utils.flop_counter import FlopCounterMode
from uniform_hold import uniform_hold

SPLIT_TOLERANCE = 1e-4
"""Of the largest value: joined and split batches add in another order, over six steps."""


def cached(model, interval=3, depth=None, **settings):
    return apply_deep_cache(model, uniform_hold(interval, depth, **settings))


def counts():
    return last_run()["full_steps"], last_run()["skipped_steps"]


def split_chunks(model, split=lambda: True):
    """Make core run every conditioning chunk in a call of its own while `split()`."""
    asked = model.model.memory_required

    def memory_required(*args, **kwargs):
        return 1e30 if split() and "cond_shapes" in kwargs else asked(*args, **kwargs)

    model.model.memory_required = memory_required
    return model


def assert_close(actual, expected, tolerance=SPLIT_TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_no_trace(model):
    changed = [name for name, part in model.model.diffusion_model.named_modules() if "forward" in part.__dict__]
    assert changed == []
    gc.collect()
    runs = [thing for thing in gc.get_objects() if type(thing) is DeepCacheRun]
    assert not any(run._histories or run._drift._references or run._drift._changes for run in runs)
    assert not any(run.guidance._difference is not None for run in runs if run.guidance is not None)
    targets = [run.target for run in runs if run.target is not None]
    assert not any(target._squares or target._fulls or target._features for target in targets)
    assert host.KEY not in model.model_options.get("transformer_options", {})


def said_of_fallbacks(caplog):
    """Log lines of skipped calls that fell back to full ones, or of residuals that could not be added."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "DeepCache" in line or "control could not" in line]


def call_unet(model, run, x, sigma, control=None, patches=None, uuids=("u",), begins=True):
    if begins:
        run.begin_evaluation(sigma)
    options = {
        host.KEY: run,
        "uuids": list(uuids),
        "cond_or_uncond": list(range(len(uuids))),
        "wrappers": {WrappersMP.DIFFUSION_MODEL: {host.KEY: [host._call_model]}},
        "patches": patches or {},
    }
    context = torch.randn(x.shape[0], 77, tiny_models.CONTEXT_DIM, generator=torch.Generator().manual_seed(3))
    unet = model.model.diffusion_model
    with torch.inference_mode():
        return unet(x, torch.full((x.shape[0],), 500.0), context, control=control, transformer_options=options)


def full_and_skipped(model, depth, height, width, **call):
    """The UNet at one and the same input, first as a full step and then as a skipped one."""
    run = DeepCacheRun(uniform_hold(3, depth))
    run.schedule = (3.0, 2.0, 1.0, 0.0)
    x = torch.randn(2, 4, height, width, generator=torch.Generator().manual_seed(1))
    make = {name: value if callable(value) else lambda value=value: value for name, value in call.items()}
    outs = [call_unet(model, run, x, sigma, **{name: value() for name, value in make.items()}) for sigma in (3.0, 2.0)]
    assert (run.full_steps, run.skipped_steps, run.failed) == (1, 1, False)
    return outs


def full_and_skipped_flops(split, x, call):
    """Of a full and of a skipped `call()` of the split's model on two chunks `x`, as torch counts them."""
    run = DeepCacheRun(uniform_hold(3))
    run.schedule = (2.0, 1.0, 0.0)
    spent = []
    for sigma, stand_ins in ((2.0, split.full_layers), (1.0, split.skip_layers)):
        run.begin_evaluation(sigma)
        layers = stand_ins(run, run.branches(x, ["a", "b"], [0, 1], None))
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad(), substituted(layers, Order.CACHED):
            call()
        spent.append(counter.get_total_flops())
    return spent


def residuals(x, names=("input", "middle", "output")):
    batch, _, height, width = x.shape
    shapes = []
    for channels in ((32, 32, 32), (64, 64), (128,)):
        shapes += [(batch, count, height, width) for count in channels]
        height, width = (height + 1) // 2, (width + 1) // 2
    # Input blocks 2 and 4 are the downsamplings: their output has the next level's size.
    shapes = [
        shapes[0],
        shapes[1],
        (*shapes[2][:2], *shapes[3][2:]),
        shapes[3],
        (*shapes[4][:2], *shapes[5][2:]),
        shapes[5],
    ]
    fill = lambda i, shape: torch.full(shape, 0.1 * (i + 1))  # noqa: E731
    every = {
        "input": [fill(i, shape) for i, shape in reversed(list(enumerate(shapes)))],
        "middle": [fill(9, shapes[-1])],
        "output": [fill(i, shape) for i, shape in enumerate(shapes)],
    }
    return {name: every[name] for name in names}

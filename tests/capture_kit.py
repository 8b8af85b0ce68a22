"""A small model and runs of it, for tests of captured calls; no ComfyUI here."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.cuda_graphs.model_capture import ModelCapture
from comfy_accel.accel.cuda_graphs.model_guard import CaptureHost
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from cpu_capturer import CpuCapturer

WIDTH = 8
EAGER_BLOCKS = CompileSettings(backend="eager", min_repetitions=100)
"""No block is compiled, since tracing is most of a test's time."""


class Toy(torch.nn.Module):
    """[B, S, 8] in and out; `scale` is a number, `control` maps "middle" to residuals."""

    def __init__(self, seed: int = 0, blocks: int = 3):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
            self.register_buffer("shift", torch.randn(WIDTH))
        self.eval().requires_grad_(False)

    def forward(self, x, t, context=None, control=None, scale=1.0):
        Toy.forwards += 1
        h = (x * t[:, None, None] + self.shift * scale).to(x.dtype)
        for block in self.blocks:
            h = torch.tanh(block(h))
            if context is not None:
                h = h + context.mean(1, keepdim=True)
            if control is not None and control["middle"]:
                residual = control["middle"].pop()
                h += 0 if residual is None else residual
        return h


Toy.forwards = 0


def capturing_cache(capturer=None, **bounds) -> tuple[GraphCache, CpuCapturer]:
    cache, capturer = GraphCache(**bounds), capturer or CpuCapturer()
    cache.captures = CapturePool(capturer)
    return cache, capturer


@contextmanager
def run(model, cache, host=None, inner=None):
    """One run: a function that calls the model as its captures do."""
    with cache.lease() as lease:
        capture = ModelCapture(model, cache, cache.captures, lease, {}, host or CaptureHost())
        yield lambda *args, **kwargs: capture.call(inner or model.forward, *args, **kwargs)


def latent(seed=0, batch=2, tokens=5, dtype=torch.float32):
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def times(seed=0, batch=2):
    return torch.rand(batch, generator=torch.Generator().manual_seed(seed)) + 0.5


def check_calls(model, call, count, **kwargs):
    """Make calls of one variant with other values each, all right bit for bit; the number of times the model ran."""
    before = Toy.forwards
    plain = 0
    for seed in range(count):
        x, t = latent(seed, **kwargs), times(seed, kwargs.get("batch", 2))
        out = call(x, t)
        plain -= Toy.forwards
        expected = model(x, t)
        plain += Toy.forwards
        assert torch.equal(out, expected)
    return Toy.forwards - before - plain


def reasons() -> list[str]:
    """Why blocks ran uncompiled, and calls were not captured."""
    return [row["fields"].get("why", row)["reason"] for row in fallbacks.rows()]


def settle(call, *args, **kwargs):
    """The calls until there is a capture."""
    for _ in range(3):
        out = call(*args, **kwargs)
    return out

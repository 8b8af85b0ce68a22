"""A capturer that needs no GPU: it logs the operators of a call and runs them again, in place.

It keeps to the rules of CUDA graphs. Operators on fixed storages are replayed, never Python: an operator reads where it
read during the capture, wherever the weights or the inputs are by then, and writes where it wrote. Graphs share memory:
making or replaying one spoils what all others have computed. Waiting for a value fails during a capture.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.core.reasons import Reason
from comfy_accel.accel.cuda_graphs.model_capture import ModelCapture
from comfy_accel.accel.cuda_graphs.model_guard import CaptureHost
from comfy_accel.accel.cuda_graphs.pool import CapturePool
from comfy_accel.accel.dispatch.whole_calls import WholeCalls
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

STAGES = ("warm_up", "begin", "during", "end", "first replay", "later replay")

_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def tensors_in(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Log(TorchDispatchMode):
    def __init__(self, fail_after: int | None, error: type[Exception]):
        super().__init__()
        self.operators: list[tuple] = []
        self.made: dict[int, torch.Tensor] = {}
        self.fixed: dict[int, torch.Tensor] = {}
        """Tensors from outside, by their id, as aliases: a parameter that is given other data keeps it to itself."""
        self.originals: list[torch.Tensor] = []
        self.constants: set[int] = set()
        self._fail_after, self._error = fail_after, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._fail_after is not None and len(self.operators) >= self._fail_after:
            raise self._error("simulated")
        if any(tag in func.tags for tag in _WAITS):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        if "lift_fresh" in func.name():
            self.constants.add(storage(out))
        fix = self._fix
        self.operators.append((func, tree_map(fix, args), tree_map(fix, kwargs), out))
        read = {storage(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            if storage(tensor) not in read:
                self.made[storage(tensor)] = tensor
        return out

    def _fix(self, value):
        if not isinstance(value, torch.Tensor) or storage(value) in self.made:
            return value
        if id(value) not in self.fixed:
            self.originals.append(value)  # so that its id stays its own
            self.fixed[id(value)] = value.detach()
        return self.fixed[id(value)]


class CpuGraph:
    """reads: the tensors from outside that it reads, at the addresses that they had. replays: how often it was."""

    def __init__(self, capturer: CpuCapturer, log: _Log):
        self._capturer = weakref.ref(capturer)
        self._operators = log.operators
        self._made = list(log.made.values())
        self.reads = [tensor for tensor in log.fixed.values() if storage(tensor) not in log.constants]
        self.own_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self._made)
        self.nbytes = 0
        self.replays = 0

    def replay(self) -> None:
        capturer = self._capturer()
        self.replays += 1
        capturer.replays += 1
        if capturer.fails_at("first replay" if self.replays == 1 else "later replay"):
            raise capturer.error("simulated")
        capturer.spoil(self)
        with torch.inference_mode():
            for func, args, kwargs, out in self._operators:
                self._do(func, args, kwargs, out)

    def _do(self, func, args, kwargs, out) -> None:
        if func._schema.is_mutable:
            func(*args, **kwargs)
            return
        read = {storage(tensor) for tensor in tensors_in((args, kwargs))}
        written = [tensor for tensor in tensors_in(out) if storage(tensor) not in read]
        if not written:
            return  # a view
        again = func(*args, **kwargs)
        for known, new in zip(tensors_in(out), tensors_in(again), strict=True):
            if storage(known) not in read:
                known.copy_(new)

    def spoil(self) -> None:
        """Somebody else uses the memory of what was computed here."""
        with torch.inference_mode():
            for tensor in self._made:
                if tensor.numel():
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


class CpuCapturer:
    """fail_at: one of STAGES, at which `error` is raised. bytes: what its pool holds."""

    def __init__(self, fail_at: str | None = None, error: type[Exception] = RuntimeError):
        self.lock = threading.RLock()
        self.fail_at, self.error = fail_at, error
        self.reason: Reason | None = None
        self.device_waits = self.room = True
        self.bytes = 0
        self.graphs: weakref.WeakSet[CpuGraph] = weakref.WeakSet()
        self.warm_ups = self.captures = self.replays = self.given_back = 0

    def fails_at(self, stage: str) -> bool:
        return self.fail_at == stage

    def why_not(self, device):
        return self.reason

    def time_call(self, device, call):
        return call(), lambda: self.device_waits

    def has_room(self, device):
        return self.room

    def warm_up(self, device, call):
        self.warm_ups += 1
        if self.fails_at("warm_up"):
            raise self.error("simulated")
        return call()

    def capture(self, device, call):
        self.captures += 1
        if self.fails_at("begin"):
            raise self.error("simulated")
        self.spoil(None)
        log = _Log(5 if self.fails_at("during") else None, self.error)
        with log:
            out = call()
        if self.fails_at("end"):
            raise self.error("simulated")
        graph = CpuGraph(self, log)
        graph.nbytes = max(graph.own_bytes - self.bytes, 0)
        self.bytes += graph.nbytes
        # A capture computes nothing.
        graph.spoil()
        self.graphs.add(graph)
        return graph, out

    def give_back(self):
        self.given_back += 1

    def reset(self):
        self.bytes = 0

    def spoil(self, but) -> None:
        for graph in list(self.graphs):
            if graph is not but:
                graph.spoil()

    def assert_reads_only(self, *allowed: torch.Tensor) -> None:
        """Every capture reads its own buffers, which nobody but it holds, and these tensors."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in allowed}
        for graph in self.graphs:
            for tensor in graph.reads:
                if tensor.numel() and tensor.untyped_storage().data_ptr() not in addresses:
                    raise AssertionError(f"a capture reads a foreign {list(tensor.shape)}")


def left(capturer: CpuCapturer) -> int:
    """The captures that are alive."""
    gc.collect()
    return len(capturer.graphs)


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
        forwards.append(0)
        h = (x * t[:, None, None] + self.shift * scale).to(x.dtype)
        for block in self.blocks:
            h = torch.tanh(block(h))
            if context is not None:
                h = h + context.mean(1, keepdim=True)
            if control is not None and control["middle"]:
                residual = control["middle"].pop()
                h += 0 if residual is None else residual
        return h


forwards: list[int] = []
"""One for each time that a toy has run, beside the toys: they keep nothing."""


def capturing_cache(capturer=None, **bounds) -> tuple[GraphCache, CpuCapturer]:
    cache, capturer = GraphCache(**bounds), capturer or CpuCapturer()
    cache.captures = CapturePool(capturer)
    return cache, capturer


@contextmanager
def run(model, cache, host=None, inner=None):
    """One run: a function that calls the model as its captures do."""
    with cache.lease() as lease:
        calls = WholeCalls(type(model).__name__, {}, cache, CompileSettings())
        capture = ModelCapture(model, cache, cache.captures, lease, calls, host or CaptureHost())
        yield lambda *args, **kwargs: capture.call(inner or model.forward, *args, **kwargs)


def latent(seed=0, batch=2, tokens=5, dtype=torch.float32):
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def times(seed=0, batch=2):
    return torch.rand(batch, generator=torch.Generator().manual_seed(seed)) + 0.5


def check_calls(model, call, count, **kwargs):
    """Make calls of one variant with other values each, all right bit for bit; the number of times the model ran."""
    before = len(forwards)
    plain = 0
    for seed in range(count):
        x, t = latent(seed, **kwargs), times(seed, kwargs.get("batch", 2))
        out = call(x, t)
        plain -= len(forwards)
        expected = model(x, t)
        plain += len(forwards)
        assert torch.equal(out, expected)
    return len(forwards) - before - plain


def reasons() -> list[str]:
    """Why blocks ran uncompiled, and calls were not captured."""
    return [row["fields"].get("why", row)["reason"] for row in fallbacks.rows()]


def settle(call, *args, **kwargs):
    """The calls until there is a capture."""
    for _ in range(3):
        out = call(*args, **kwargs)
    return out

"""Questions of `bench gpu --plan` that are about no contender's steps; each row is printed at once.

Models at full width with random weights, few of their layers where the row is about a block. A row that fails says so
and costs no other. Its page can be pasted into an issue as it is.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from dev.tools import command

from .child import begin
from .gpu_cases import CAPTURED, COMPILED, EAGER, SPEED_UP
from .report import Row

MASKED = ((2, 300), (2, 320), (2, 1024), (1, 4096))
OUTLIERS = (1, 100)
LARGE, FIRST_LAYERS = (7, 40), ("img_in", "x_embedder", "input_blocks")
"""Channels of the stream between blocks that are made so many times larger, and the layers that write it first."""

SIZES = ((1024, 1024, 1), (720, 960, 2), (512, 512, 1))
STEPS = 8
CALLS = 10


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    begin(options.quick)
    from .gpu_models import free

    earlier = options.out and options.out / "rows.json"
    rows: list[Row] = json.loads(earlier.read_text(encoding="utf-8")) if earlier and earlier.exists() else []
    rows = [row for row in rows if row["row"] not in (options.rows or ROWS)]
    for name in options.rows or ROWS:
        started = time.monotonic()
        try:
            for row in ROWS[name](options.quick):
                _keep(rows, {"row": name, **row, "after_s": round(time.monotonic() - started)}, options.out)
        except Exception as error:
            _keep(rows, {"row": name, "failed": f"{type(error).__name__}: {error}"[:500]}, options.out)
        free()
    print(_page(rows))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none is given")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="add to rows.md and rows.json there after each row")
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU: whether it runs")
    return parser.parse_args(arguments)


def _keep(rows: list[Row], row: Row, out: Path | None) -> None:
    rows.append(row)
    print(_line(row), file=sys.stderr, flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        (out / "rows.md").write_text(_page(rows), encoding="utf-8")


def _line(row: Row) -> str:
    return ", ".join(f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in row.items())


def _page(rows: list[Row]) -> str:
    return "\n".join(["# Rows of this card", "", *(f"- {_line(row)}" for row in rows), ""])


def machine(quick: bool) -> Iterator[Row]:
    """The card, its software and its memory."""
    import torch

    from dev.tools.comfyui import tree

    from . import gpu_device, gpu_models, report

    device = gpu_models.FULL["SDXL"].device
    row: Row = {**gpu_device.described(device), **report.versions(tree())}
    if device.type == "cuda":
        row["capability"] = torch.cuda.get_device_capability(device)
        row["free_mb"] = torch.cuda.mem_get_info(device)[0] >> 20
        row["allocator"] = torch.cuda.get_allocator_backend()
    yield row


def values(quick: bool) -> Iterator[Row]:
    """How far compiled blocks are off, as a part of what the comparison allows, with large channels in the stream."""
    for name, outlier in ((name, outlier) for name in ("Flux", "SDXL", "Z-Image") for outlier in OUTLIERS):
        with _loaded(name, quick, layers=1) as (runs, lineup), _ratios() as ratios:
            network = runs.model.model.diffusion_model
            first = next(layer for layer in map(network._modules.get, FIRST_LAYERS) if layer is not None)
            first = first if hasattr(first, "weight") else first[0][0]
            first.weight.data[list(LARGE)] *= outlier
            for case in _cases(quick):
                runs.run(lineup.patcher(SPEED_UP), case, STEPS)
            worst = {"median": statistics.median(ratios or [0.0]), "worst": max(ratios, default=0.0)}
            thrown_out = sum(not ratio <= 1 for ratio in ratios)
            yield {"model": name, "outlier": outlier, "compared": len(ratios), "thrown_out": thrown_out, **worst}


def masked(quick: bool) -> Iterator[Row]:
    """Masked attention, compiled for any size: the kernel that torch takes, its first and second call, a capture."""
    import comfy.ops
    import torch
    from comfy_accel.accel.compile import block_compiler
    from comfy_accel.accel.fingerprint.block_call import Call
    from comfy_accel.accel.fingerprint.kinds import describe, kinds_of, template_of, weight_slots
    from comfy_accel.accel.signature import tree_spec

    from .gpu_models import difference

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = (torch.nn.Linear(512, 512, bias=False) for _ in range(2))

        def forward(self, x, mask):
            batch, tokens, _ = x.shape
            q = self.q(x).view(batch, tokens, 8, 64).transpose(1, 2)
            out = comfy.ops.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return self.o(out.transpose(1, 2).reshape(batch, tokens, 512))

    device, dtype = _device(), torch.float32 if quick else torch.bfloat16
    block = Masked().to(device, dtype).requires_grad_(False)
    (kind,) = kinds_of([describe(block)])
    weights, graphs = weight_slots(block, kind.weights).take(), []
    with torch.inference_mode():
        for batch, tokens in MASKED:
            x = torch.randn(batch, tokens, 512, device=device, dtype=dtype)
            mask = torch.zeros(batch, 1, tokens, tokens, device=device, dtype=dtype)
            mask[..., tokens // 2 :] = -1e4
            inputs: list[torch.Tensor] = []
            spec = tree_spec.flatten(((x, mask), {}), inputs)
            shapes = [*weights, *(tensor.to("meta") for tensor in inputs)]
            graph = next((graph for graph in graphs if graph.accepts(shapes)), None)
            is_new = graph is None
            if is_new:
                call = Call(kind, spec, weights, inputs)
                graph = block_compiler.compile_block(template_of(block), call, savable=False)
                graphs.append(graph)
            seconds = []
            for _ in range(2):
                _wait()
                started = time.perf_counter()
                out = graph.run([*weights, *inputs])
                _wait()
                seconds.append(time.perf_counter() - started)
            expected = block(x, mask)
            row: Row = {"batch": batch, "tokens": tokens, "compiled": is_new, "first_ms": seconds[0] * 1e3}
            row |= {"second_ms": seconds[1] * 1e3, "difference": difference(out, expected)}
            if device.type == "cuda":
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    replayed = graph.run([*weights, *inputs])
                captured.replay()
                row |= {"kernel": _longest(functools.partial(block, x, mask)), "replay": difference(replayed, expected)}
            yield row


def attention(quick: bool) -> Iterator[Row]:
    """Another node's attention (a stand-in for SageAttention that calls core's): Flux's blocks compiled around it."""
    import torch

    @torch.compiler.disable
    def of_another_node(own: Callable, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    with _loaded("Flux", quick, layers=4) as (runs, lineup):
        runs.model.model_options["transformer_options"]["optimized_attention_override"] = of_another_node
        yield from _steps("Flux", runs, lineup, quick)


def fp8(quick: bool) -> Iterator[Row]:
    """Flux with fp8 weights (e4m3), which are cast in each call."""
    import comfy.model_patcher
    import comfy.supported_models
    import torch
    from kit.tiny_models import randomize

    family, device = _subject("Flux", quick, layers=4).family, _device()
    config = getattr(comfy.supported_models, family.model_class)(dict(family.config))
    config.set_inference_dtype(torch.float8_e4m3fn, torch.bfloat16)
    model = config.get_model({}, device=device).eval()
    randomize(model.diffusion_model, 0)
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)
    with _loaded("Flux", quick, layers=4, model=patcher) as (runs, lineup):
        yield from _steps("Flux", runs, lineup, quick)


def attention_kernels(quick: bool) -> Iterator[Row]:
    """Which kernel this core takes for a model's longest attention, and what torch's others take for it."""
    from comfy_accel.accel.core.errors import one_line
    from torch.nn import functional

    own = functional.scaled_dot_product_attention
    for name in ("Flux", "Z-Image", "Wan"):
        with _loaded(name, quick, layers=1) as (runs, _):
            with mock.patch.object(functional, own.__name__, side_effect=own) as seen:
                runs.run(runs.model, _cases(quick)[0], 1)
            args, options = max(seen.call_args_list, key=lambda call: call.args[0].numel() * call.args[1].shape[-2])
            seen.reset_mock()
        shape = list(args[0].shape)
        for backend in (None, "FLASH_ATTENTION", "CUDNN_ATTENTION"):
            call = functools.partial(_attend, backend, *args, **options)
            row: Row = {"model": name, "q": shape, "chosen_by": backend or "this core"}
            try:
                seconds = _seconds(call)
                row["kernel"] = _longest(call)
            except RuntimeError as error:
                yield row | {"failed": one_line(error)}
                continue
            tflop = 4 * math.prod(shape) * args[1].shape[-2] / 1e12
            yield row | {"ms": seconds * 1e3, "tflops": tflop / seconds}


def rope(quick: bool) -> Iterator[Row]:
    """Z-Image's blocks with comfy-kitchen's rotary embedding traced, as ours do it, and as an operator."""
    from comfy_accel.accel.hosts.comfyui import kitchen_kernels

    if "comfy_kitchen" not in sys.modules:
        yield {"model": "Z-Image", "why": "this core has no comfy-kitchen"}
        return
    own = kitchen_kernels._TRACED
    for traced in (own, ()):
        kitchen_kernels._TRACED = traced
        try:
            with _loaded("Z-Image", quick, layers=4) as (runs, lineup):
                yield from ({"traced": traced is own, **row} for row in _steps("Z-Image", runs, lineup, quick))
        finally:
            kitchen_kernels._TRACED = own


ROWS = {one.__name__: one for one in (machine, attention_kernels, rope, values, attention, fp8, masked)}


def _steps(model: str, runs: Any, lineup: Any, quick: bool) -> Iterator[Row]:
    """A row for each of the contenders: the second of two images."""
    from .gpu_models import difference

    expected = None
    for contender in (EAGER, COMPILED, CAPTURED):
        with lineup.running(contender) as spent:
            run = [runs.run(lineup.patcher(contender), _cases(quick)[0], STEPS) for _ in range(2)][-1]
        expected = run.answer if expected is None else expected
        yield {
            **{"model": model, "contender": contender, "step_ms": statistics.median(run.steps) * 1e3},
            **{"difference": difference(run.answer, expected)},
            **{name: spent[name] for name in ("compilations", "uncompiled", "captures", "replays", "reasons")},
        }


def _subject(name: str, quick: bool, layers: int | None = None) -> Any:
    """layers: of each kind; None: as many as published."""
    from . import gpu_models
    from .kernels import shallow

    subject = (gpu_models.QUICK if quick else gpu_models.FULL)[name]
    if quick or layers is None:
        return subject
    return replace(subject, family=replace(subject.family, config={**subject.family.config, **shallow(name, layers)}))


@contextmanager
def _loaded(name: str, quick: bool, layers: int | None = None, model: Any = None) -> Iterator[tuple[Any, Any]]:
    """Runs of a model and its contenders, which are gone afterwards."""
    import torch

    from .compilations import RecompileLimit
    from .gpu_contenders import Lineup
    from .gpu_models import Runs, free

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work, RecompileLimit() as limit:
        runs = Runs(_subject(name, quick, layers), model)
        with torch.inference_mode():
            yield runs, Lineup(Path(work), limit, "eager" if quick else "inductor", runs.model)
    del runs
    free()


def _cases(quick: bool) -> list[Any]:
    from .gpu_cases import Case

    return [Case(width, height, batch) for width, height, batch in SIZES[: 2 if quick else None]]


@contextmanager
def _ratios() -> Iterator[list[float]]:
    """What each comparison of an output comes to; above 1 it is thrown out."""
    from comfy_accel.accel.signature import output_check

    own, found = output_check._worst, []

    def worst(*args: Any) -> float:
        found.append(own(*args))
        return found[-1]

    output_check._worst = worst
    try:
        yield found
    finally:
        output_check._worst = own


def _attend(backend: str | None, *args: Any, **options: Any) -> Any:
    """Attention with a backend of torch's, by name; None: as core calls it."""
    import comfy.ops
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend is None:
        return comfy.ops.scaled_dot_product_attention(*args, **options)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return functional.scaled_dot_product_attention(*args, **options)


def _seconds(call: Callable[[], Any]) -> float:
    """Of one of several calls in a row, after two to warm up."""
    for count in (2, CALLS):
        _wait()
        started = time.perf_counter()
        for _ in range(count):
            call()
        _wait()
    return (time.perf_counter() - started) / CALLS


def _longest(call: Callable[[], Any]) -> str:
    """The name of the longest kernel in a call; of the longest operator without a GPU."""
    from .gpu_device import kernels

    return next((name[:90] for name, *_ in kernels(call, _device())), "the profiler saw none")


def _device() -> Any:
    import comfy.model_management

    return comfy.model_management.get_torch_device()


def _wait() -> None:
    from .gpu_device import wait

    wait(_device())


if __name__ == "__main__":
    sys.exit(command.run(main))

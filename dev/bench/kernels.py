"""The GPU code of each kind of block, counted in instructions: as we compile it, compiled for one size, and core's.

Full-size models, one step at 1024 x 1024 on the made-up device: it is their code that is looked at, and nothing but
the compiler is timed, in processor time, which hardly depends on what else the machine does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kit import made_up_device

from dev import WORK, Problem
from dev.tools import command, pack
from dev.tools.inprocess import boot

from . import report
from .session_plan import Case

MODELS = ("SD1.5", "SDXL", "SD3", "Flux", "Flux.2", "Z-Image", "Qwen-Image", "Wan", "HunyuanVideo", "LTX 2")
OURS, STATIC, CORE = "ours", "static", "core"
WHOLE = "whole model"
LAYERS = (1, 2)
"""Of each kind, in whole models. What the second has more is layers alone, without what is before and after these."""
COLUMNS = (
    *("model", "block", "variant", "elements", "kernels", "launches", "instructions_per_element"),
    *("software_divisions", "externs", "cpu_seconds", "mark"),
)
LEGEND = """\
elements: of the block's largest input. launches: of Triton kernels and of library calls (externs).
instructions_per_element: SASS instructions that all threads of all Triton kernels issue, loops multiplied by their
trip counts. software_divisions: integer divisions by sizes known only at run time.
cpu_seconds: processor time of compiling a block, on one core.

core / ours compares whole models at full width. Each is compiled with one layer and with two of each block
type (UNets: one or two ResBlocks on each of their two upper levels, each followed by a transformer block where the
checkpoint has one). Only the instructions that the second layer adds are compared, so whatever surrounds the layers
cancels out. core is measured at its second size: it traces 768 x 768 without compiling it, then compiles 1024 x 1024
with the sizes that changed as dynamic. In ours, blocks alone are compiled and counted. What core calls of
comfy-kitchen (0.33) counts as launches alone. elements: of the latent, cond and uncond. mark: graph breaks, or why
there are no figures."""


def main(arguments: list[str] | None = None) -> int | None:
    parser = report.parser("kernels", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is given")
    parser.add_argument("--blocks", action="store_true", help="blocks alone, without whole models: a third of the time")
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(MODELS):
        raise Problem(f"There is no model {unknown.pop()}: choose of {', '.join(MODELS)}.")
    if not made_up_device.is_here():
        return _run_on_made_up_device(arguments)
    boot(cpu=False)
    pack.load()
    made_up_device.prepare()
    made_up_device.sample_without_values()
    rows = []
    for name in options.models or MODELS:
        if is_known(name):
            rows += [*measure(name), *([] if options.blocks else measure_whole(name))]
    print(f"\n{report.table(rows, COLUMNS)}\n\n{report.table(sum_up(rows))}\n\n{LEGEND}")
    report.finish(options.json, rows)


def _run_on_made_up_device(arguments: list[str] | None) -> int:
    """Run the same in a process that has the made-up device."""
    try:
        folder = made_up_device.build(WORK / "made-up-device")
    except made_up_device.Unavailable as why:
        raise Problem(f"This needs a made-up device: {why}.") from None
    command_line = [sys.executable, "-m", "dev.bench.kernels", *(sys.argv[1:] if arguments is None else arguments)]
    environment = {**os.environ, **made_up_device.environment(folder), "ACCEL_STORE": "off", "OMP_NUM_THREADS": "1"}
    environment["FAKECUDA_MEM_MB"] = str(128 << 10)  # of which none is taken
    return subprocess.run(command_line, env=environment).returncode


def is_known(name: str) -> bool:
    """Whether this core has the model; if not, that is said."""
    import comfy.supported_models

    from . import full_size

    known = hasattr(comfy.supported_models, full_size.FULL[name].family.model_class)
    if not known:
        print(f"This ComfyUI has no {name}.", file=sys.stderr)
    return known


def measure(name: str) -> list[report.Row]:
    """The rows of one model: each graph that one step of it compiles, and the same call compiled for its size alone."""
    import torch
    from comfy_accel.accel.compile import block_compiler
    from comfy_accel.accel.core.fallbacks import fallbacks

    from . import full_size

    rows: list[report.Row] = []
    compile_block = block_compiler.compile_block

    def compile_both(template: Any, call: Any, *rest: Any, **settings: Any) -> Any:
        kind = call.kind
        ours = None
        for variant in (OURS, STATIC):
            for_one_size = dataclasses.replace(call, kind=dataclasses.replace(kind, varying=()), any_size=False)
            with _compiling_afresh():
                started = _read_cpu_seconds()
                if variant == OURS:
                    graph = compile_block(template, call, *rest, **settings)
                else:
                    graph = compile_block(template, for_one_size)
                seconds = _read_cpu_seconds() - started
                launches = _record_launches(graph, call.tensors)
            ours = ours or graph
            label = f"{kind.name} {' '.join('x'.join(map(str, tensor.shape)) for tensor in call.inputs)}"
            rows.append(make_row(name, label, variant, max(map(torch.Tensor.numel, call.inputs)), launches, seconds))
            report.tell(rows[-1], COLUMNS)
        return ours

    runs = full_size.Runs(full_size.FULL[name])
    with mock.patch.object(block_compiler, compile_block.__name__, compile_both), torch.inference_mode():
        runs.run(_compile_blocks(runs.model), Case(1024, 1024), 1)
    for fallback in fallbacks.rows():
        print(f"{name}: {fallback}", file=sys.stderr)
    return rows


def measure_whole(name: str) -> list[report.Row]:
    """The rows of whole models with few layers: ours, and core's at its second size."""
    from . import full_size

    rows: list[report.Row] = []
    for variant, layers in itertools.product((OURS, CORE), LAYERS):
        subject = full_size.make_shallow(name, layers)
        label, elements = _name(layers), 2 * math.prod(subject.make_latent(Case(1024, 1024)).shape)
        found = {**dict.fromkeys(COLUMNS), "model": name, "block": label, "variant": variant}
        try:
            with _compiling_afresh():  # or the second has the configurations alone that were chosen for the first
                launches, breaks = _launch_whole(subject, variant)
            found = make_row(name, label, variant, elements, launches)
            found["mark"] = f"{breaks} graph breaks" if breaks else None
        except Exception as error:
            found["mark"] = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        rows.append(found)
        report.tell(found, COLUMNS)
    return rows


def _name(layers: int) -> str:
    return f"{WHOLE}, {layers} of each layer"


def _launch_whole(subject: Any, variant: str) -> tuple[Launches, int]:
    """One call of the model at 1024 x 1024, compiled as the variant's node does; and its graph breaks."""
    import torch

    from . import full_size, session

    runs = full_size.Runs(subject)
    node, sizes = (_compile_blocks, (1024,)) if variant == OURS else (session.node("core", "inductor"), (768, 1024))
    model = node(runs.model)
    with torch.inference_mode():
        return record_last_size(lambda side: runs.run(model, Case(side, side), 1), sizes)


def _compile_blocks(model: Any) -> Any:
    """The ModelPatcher with its blocks compiled, for every size and without CUDA graphs."""
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate

    return accelerate(model, CompileSettings(), GraphCache(max_bytes=24 << 30), graphs=False)


def record_last_size(call: Callable[[int], Any], sizes: Sequence[int]) -> tuple[Launches, int]:
    """What a call at the last size launches, and its graph breaks; others are traced alone.

    Raises:
        Problem: it launches no kernel that was compiled.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx, output_code

    run = output_code.CompiledFxGraph.__call__
    with mock.patch.object(compile_fx, "compile_fx", lambda traced, *_, **__: traced.forward):
        for size in sizes[:-1]:
            call(size)
    counters["graph_break"].clear()
    call(sizes[-1])
    breaks = sum(counters["graph_break"].values())
    with _recording() as (launched, externs):

        def counted(self: Any, inputs: Any) -> Any:
            with externs:
                return run(self, inputs)

        with mock.patch.object(output_code.CompiledFxGraph, "__call__", counted):
            call(sizes[-1])
    if not launched:
        raise Problem("Nothing that was compiled ran.")
    return Launches([_read_kernel(*launch) for launch in launched], externs.counts), breaks


def _read_cpu_seconds() -> float:
    """Processor time until now, with that of compilers that it has waited for."""
    return sum(os.times()[:4])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a Triton kernel, by the configuration of fewest instructions that the autotuner may choose."""

    name: str
    instructions: int
    divisions: int


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one call of a graph launches."""

    kernels: list[Kernel]
    externs: Counter


def make_row(
    model: str, block: str, variant: str, elements: int, launches: Launches, seconds: float | None = None
) -> report.Row:
    return {
        **{"model": model, "block": block, "variant": variant, "elements": elements},
        "kernels": len({kernel.name for kernel in launches.kernels}),
        "launches": len(launches.kernels) + launches.externs.total(),
        "instructions_per_element": sum(kernel.instructions for kernel in launches.kernels) / elements,
        "software_divisions": sum(kernel.divisions for kernel in launches.kernels),
        "externs": " ".join(f"{count} {name}" for name, count in sorted(launches.externs.items())),
        "cpu_seconds": seconds and round(seconds, 1),
    }


def sum_up(rows: Sequence[report.Row]) -> list[report.Row]:
    """For each model: ours over static, weighted by elements; core over ours, and what a layer more launches."""
    answer = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        wholes = [row for row in own if row["block"].startswith(WHOLE)]
        of = {v: [row for row in own if row["variant"] == v and row not in wholes] for v in (OURS, STATIC)}
        instructions, launches = (_subtract_layers(wholes, name) for name in ("instructions_per_element", "launches"))
        spent = {v: sum(row["instructions_per_element"] * row["elements"] for row in of[v]) for v in of}
        answer.append(
            {
                "model": model,
                "graphs": len(of[OURS]),
                "ours / static": spent[OURS] / spent[STATIC],
                "core / ours": _divide(instructions[CORE], instructions[OURS]) if wholes else None,
                **{f"a layer's launches, {v}": count for v, count in launches.items()},
                "software divisions": sum(row["software_divisions"] for row in of[OURS]),
                "launches, ours": sum(row["launches"] for row in of[OURS]),
                "launches, static": sum(row["launches"] for row in of[STATIC]),
                **{f"cpu seconds, {v}": sum(row["cpu_seconds"] for row in of[v]) for v in of},
            }
        )
    return answer


def _divide(one: float | None, other: float | None) -> float | str:
    return "failed" if one is None or other is None else one / other


def _subtract_layers(rows: Sequence[report.Row], column: str) -> dict[str, float | None]:
    """What one more layer of each kind adds to a whole model, ours and core's; None where one has failed."""
    if not rows or any(row["elements"] is None for row in rows):
        return dict.fromkeys((OURS, CORE))
    fewer, more = ({row["variant"]: row[column] for row in rows if row["block"] == _name(layers)} for layers in LAYERS)
    return {variant: more[variant] - fewer[variant] for variant in (OURS, CORE)}


def _record_launches(graph: Any, tensors: Sequence[Any]) -> Launches:
    """What the graph launches with these tensors."""
    import torch

    with _recording() as (launched, externs), torch.inference_mode():
        graph.run(list(tensors))  # it chooses each kernel's configuration
        launched.clear()
        with externs:
            graph.run(list(tensors))
    return Launches([_read_kernel(autotuner, args) for autotuner, args in launched], externs.counts)


@contextmanager
def _recording() -> Iterator[tuple[list[tuple[Any, tuple]], Any]]:
    """While it lasts: the Triton kernels launched, with their arguments, and a mode that counts other operations."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.utils._python_dispatch import TorchDispatchMode

    class Externs(TorchDispatchMode):
        counts: Counter = Counter()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not function.is_view and not function.name().startswith("aten::empty"):
                self.counts[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    launched: list[tuple[Any, tuple]] = []
    run = CachingAutotuner.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append((self, args))
        return run(self, *args, **kwargs)

    with mock.patch.object(CachingAutotuner, "run", recorded):
        yield launched, Externs()


def _read_kernel(autotuner: Any, args: Sequence[Any]) -> Kernel:
    names = [name for name, kind in autotuner.triton_meta["signature"].items() if kind != "constexpr"]
    sizes = dict(zip(names, args, strict=False))
    of = [_count_instructions(autotuner, result, args, sizes) for result in autotuner.compile_results]
    return Kernel(autotuner.fn.__name__, *min(of))


def _count_instructions(autotuner: Any, result: Any, args: Sequence[Any], sizes: dict[str, Any]) -> tuple[int, int]:
    """Instructions of all threads of a launch, and its divisions in software."""
    _, grid = autotuner._interpret_args_grid(tuple(args), result.config)
    threads = math.prod(grid) * 32 * result.config.num_warps
    trips = 1
    for name, block in result.config.kwargs.items():
        size = sizes.get(f"{name.removesuffix('_BLOCK').lower()}_numel")
        if name.startswith("R") and isinstance(size, int):
            trips *= math.ceil(size / block)
    code = disassemble(_read_cubin(result))
    loops = [(target, at) for at, op, target in code if op == "BRA" and target is not None and target < at]
    issued = sum(trips if any(first <= at <= last for first, last in loops) else 1 for at, _, _ in code)
    # A division begins with the divisor's reciprocal, rounded up.
    return issued * threads, sum(op.startswith("I2F") and op.endswith(".RP") for _, op, _ in code)


def _read_cubin(result: Any) -> bytes:
    """A kernel's binary; where torch's own launcher runs it, from Triton's cache."""
    if hasattr(result.kernel, "asm"):
        return result.kernel.asm["cubin"]
    result.reload_cubin_path()
    return Path(result.kernel.cubin_path).read_bytes()


Instruction = tuple[int, str, "int | None"]
"""Address, operation, target of a branch."""


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*)(.*)", re.MULTILINE)


@functools.cache
def disassemble(cubin: bytes) -> list[Instruction]:
    """The code of a kernel, as the disassembler in Triton's wheel reads it."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ask = [tool, "--dump-sass", file.name]
        text = subprocess.run(ask, capture_output=True, text=True, env={}, check=True).stdout
    found, forks = [], []
    for address, condition, op, rest in _LINE.findall(text):
        target = re.search(r"\b0x([0-9a-f]+)\b", rest) if op.startswith(("BRA", "CALL")) else None
        target = None if target is None else int(target[1], 16)
        op = "BRA" if op.startswith("BRA") else op
        if op == "BRA" and condition and target > int(address, 16):
            forks.append((int(address, 16), target))
        found.append((int(address, 16), op, target))
    # The end is filled up with a branch to itself and what no thread comes to.
    end = next((at for at, op, target in found if op == "BRA" and target == at), None)
    code = [item for item in found if item[1] != "NOP" and item[0] != end]
    for fork, target in forks:
        code = _keep_one_way(code, fork, target)
    return code


def _keep_one_way(code: list[Instruction], fork: int, target: int) -> list[Instruction]:
    """The code with the shorter of two ways alone, where each of these reads or writes memory.

    Such are the ways for planes of a multiple of 16 elements, and for others; those measured are of the former.
    """
    first = [item for item in code if fork < item[0] < target]
    after = first[-1] if first else None
    if after is None or after[1] not in ("EXIT", "BRA"):
        return code
    second = [item for item in code if target <= item[0] and (after[2] is None or item[0] < after[2])]
    if not all(any(op.startswith(("LDG", "STG")) for _, op, _ in way) for way in (first, second)):
        return code
    left_out = {item[0] for item in max(first, second, key=len)}
    return [item for item in code if item[0] not in left_out]


@contextmanager
def _compiling_afresh() -> Iterator[None]:
    """While it lasts, nothing is found that was compiled before."""
    import torch
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.utils import clear_caches, fresh_cache

    torch._dynamo.reset()
    clear_caches()
    CompiledTritonKernels.cache_clear()
    with fresh_cache():
        yield


if __name__ == "__main__":
    sys.exit(command.run(main))

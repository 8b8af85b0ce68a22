"""The GPU code of each kind of block, counted in instructions: as we compile it, compiled for one size, and core's.

Full-size models, one step at 1024 x 1024 on the made-up device: it is their code that is looked at, and nothing but
the compiler is timed, in processor time, which hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit import made_up_device

from tools import WORK, Problem, command, pack
from tools.inprocess import boot

from . import report

MODELS = ("SD1.5", "SDXL", "Flux", "Z-Image", "Qwen-Image", "Wan")
OURS, STATIC, CORE = "ours", "static", "core"
VARIANTS = (OURS, STATIC, CORE)
WHOLE = "whole model"
LAYERS = (1, 2)
"""Of each kind, in whole models. What the second has more is layers alone, without what is before and after these."""
COLUMNS = (
    *("model", "block", "variant", "elements", "kernels", "launches", "instructions_per_element", "vector_share"),
    *("software_divisions", "int64_arguments", "externs", "bytes", "cpu_seconds"),
    "mark",
)
LEGEND = """\
elements: of the block's largest input. launches: of Triton kernels and of library calls (externs).
instructions_per_element: SASS instructions that all threads of all Triton kernels issue, loops multiplied by their
trip counts. vector_share: the share of loads and stores in the code that move 128 bits; a load of one number for many
elements counts like any other. software_divisions: integer divisions by sizes known only at run time.
int64_arguments: 64-bit sizes, and the inverses of sizes that turn a division into a multiplication. bytes: of all
tensors passed to Triton kernels. cpu_seconds: processor time of compiling, on one core."""
LEGEND_OF_WHOLE = """\
core / ours compares whole models at full width. Each is compiled with one layer and with two of each block
type (UNets: one or two ResBlocks on each of their two upper levels, each followed by a transformer block where the
checkpoint has one). Only the instructions that the second layer adds are compared, so whatever surrounds the layers
cancels out. core is measured at its second size: it traces 768 x 768 without compiling it, then compiles 1024 x 1024
with the sizes that changed as dynamic. In ours, blocks alone are compiled and counted. elements: of the latent, cond
and uncond. cpu_seconds: of the first call at the size counted. mark: graph breaks, or why there are no figures."""

NOTES = """\
Flux's double block and Qwen-Image's give text and image weights of their own after one attention. Each product reads a
slice of its result, which is not contiguous over the images of a batch: `bmm` multiplies each image by the same weight,
and copies nothing. As `addmm` both slices would be copied first: tried by hand in Flux's double block, 2.04 GB instead
of 1.88 and 30 launches instead of 28, for 1 % fewer instructions. For one image `bmm` is one product anyway.

Of what compiling Flux's double block takes (profiled by hand) a quarter is Triton and ptxas, which compile the 28
configurations of its 17 kernels once each; the rest is tracing and inductor's Python. Static code is quicker to compile
since its sizes are numbers. On a machine with more cores PyTorch compiles kernels in parallel."""


def main(arguments: list[str] | None = None) -> int | None:
    options = _parse(arguments)
    if not made_up_device.is_here():
        return _on_the_device(arguments)
    comfyui = boot(cpu=False)
    pack.load()
    made_up_device.prepare()
    made_up_device.sample_without_values()
    rows = []
    for name in options.models or MODELS:
        if blocks := [variant for variant in options.variants if variant != CORE]:
            rows += measure(name, blocks, options.block, options.details)
        if CORE in options.variants:
            rows += whole(name, options.limit)
        if options.json:
            report.write(options.json, _merged(options.json, rows), comfyui)
    print(f"\n{report.table(rows, COLUMNS)}\n\n{report.table(totals(rows))}\n\n{LEGEND}\n\n{LEGEND_OF_WHOLE}")
    if options.page:
        options.page.write_text(page(_merged(options.json, rows)), encoding="utf-8")


def _merged(file: Path | None, rows: Sequence[report.Row]) -> list[report.Row]:
    """The rows, and those in the file of models, or of their blocks, that were not measured again."""
    kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file and file.is_file() else []
    again = {_part(row) for row in rows}
    return sorted([row for row in kept if _part(row) not in again] + list(rows), key=_part)


def _part(row: report.Row) -> tuple[int, bool]:
    """Which model a row is of, and whether of the whole of it."""
    return MODELS.index(row["model"]), row["block"].startswith(WHOLE)


def page(rows: Sequence[report.Row]) -> str:
    """docs/kernels.md."""
    of_models = totals(rows)
    rounded = [{**row, "cpu_seconds": row.get("cpu_seconds") and round(row["cpu_seconds"])} for row in rows]
    return f"""# GPU code, counted without a GPU

Made by `python3 dev.py bench kernels --json docs/kernels.json --page docs/kernels.md`. It compiles each block type of
full-size models at 1024 x 1024, cond and uncond in one batch, for compute capability 9.0, and counts the instructions.
**ours** serves every size, **static** is the same block compiled for this size alone, and **core** is core's
*TorchCompileModel*. Nothing ran on a GPU, and nothing here is a speed.

{report.markdown(of_models, list(of_models[0]))}

{" ".join(LEGEND_OF_WHOLE.split())}

{NOTES}

Columns of the next table: {" ".join(LEGEND.split())}

{report.markdown(rounded, COLUMNS, ("model", "block", "variant", "externs", "mark"))}
"""


def _on_the_device(arguments: list[str] | None) -> int:
    """Run the same in a process that has the made-up device."""
    try:
        folder = made_up_device.build(WORK / "made-up-device")
    except made_up_device.Unavailable as why:
        raise Problem(f"This needs a made-up device: {why}.") from None
    command_line = [sys.executable, "-m", "bench.kernels", *(sys.argv[1:] if arguments is None else arguments)]
    environment = {**os.environ, **made_up_device.environment(folder), "ACCEL_STORE": "off", "OMP_NUM_THREADS": "1"}
    environment["FAKECUDA_MEM_MB"] = str(128 << 10)  # of which none is taken
    return subprocess.run(command_line, env=environment).returncode


def measure(
    name: str, variants: Sequence[str] = (OURS, STATIC), block: str = "", details: bool = False
) -> list[report.Row]:
    """The rows of one model: each graph that one step of it compiles, and the same call compiled for its size alone.

    block: what the names of the blocks begin with. details: print each kernel.
    """
    import torch
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from comfy_accel.accel.compile import block_compiler
    from comfy_accel.accel.compile.compiled_graph import CompileFailed
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.core.fallbacks import fallbacks
    from comfy_accel.accel.core.reasons import Reason
    from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate

    from . import gpu_models
    from .gpu_cases import Case
    from .gpu_models import Runs

    rows: list[report.Row] = []
    compile_block = block_compiler.compile_block

    def compile_both(template: Any, call: Any, *rest: Any) -> Any:
        kind = call.kind
        if not kind.name.startswith(block):
            raise CompileFailed(Reason("too_few_blocks", least=1))
        ours = None
        for variant in variants:
            is_ours = variant == OURS
            for_one_size = dataclasses.replace(call, kind=dataclasses.replace(kind, varying=()), any_size=False)
            given = (call, *rest) if is_ours else (for_one_size,)
            with _fresh_kernels():
                started = _cpu_seconds()
                graph = compile_block(template, *given)
                seconds = _cpu_seconds() - started
                launches = _launches(graph, call.tensors)
            ours = ours or graph
            label = f"{kind.name} {' '.join('x'.join(map(str, tensor.shape)) for tensor in call.inputs)}"
            rows.append(row(name, label, variant, max(map(torch.Tensor.numel, call.inputs)), launches, seconds))
            print(report.table(rows[-1:], COLUMNS).splitlines()[-1], file=sys.stderr, flush=True)
            if details:
                for launch in launches.kernels:
                    print(f"    {launch.line(rows[-1]['elements'])}", file=sys.stderr, flush=True)
        return ours

    cache = GraphCache(max_bytes=24 << 30)
    settings = CompileSettings()
    runs = Runs(gpu_models.FULL[name])
    block_compiler.compile_block = compile_both
    try:
        with torch.inference_mode():
            runs.run(accelerate(runs.model, settings, cache, graphs=False), Case(1024, 1024, 1), 1)
    finally:
        block_compiler.compile_block = compile_block
    for fallback in fallbacks.rows():
        print(f"{name}: {fallback}", file=sys.stderr)
    return rows


def whole(name: str, limit: int) -> list[report.Row]:
    """The rows of whole models with few layers: ours, and core's at its second size.

    limit: seconds of processor time for each.
    """
    from . import gpu_models
    from .gpu_cases import Case

    rows: list[report.Row] = []
    for variant, layers in itertools.product((OURS, CORE), LAYERS):
        subject = gpu_models.FULL[name]
        config = {**subject.family.config, **_shallow(name, layers)}
        label, elements = _label(layers), 2 * subject.latent(Case(1024, 1024, 1)).numel()
        found = {**dict.fromkeys(COLUMNS), "model": name, "block": label, "variant": variant}
        subject = dataclasses.replace(subject, family=dataclasses.replace(subject.family, config=config))
        started = _cpu_seconds()
        try:
            with _fresh_kernels(), _at_most(limit):
                launches, seconds, breaks = _of_whole(subject, variant)
            found = row(name, label, variant, elements, launches, seconds)
            found["mark"] = f"{breaks} graph breaks" if breaks else None
        except (Exception, OutOfTime) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            found |= {"cpu_seconds": round(_cpu_seconds() - started, 1), "mark": text}
        rows.append(found)
        print(report.table(rows[-1:], COLUMNS).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def _label(layers: int) -> str:
    return f"{WHOLE}, {layers} of each layer"


def _shallow(name: str, layers: int) -> dict[str, Any]:
    """Of the model's config, what makes it have so many layers of each kind."""
    if name in ("SD1.5", "SDXL"):
        upper = int(name == "SD1.5")  # transformer blocks at the upper level
        return {
            **{"channel_mult": [1, 2], "num_res_blocks": [layers] * 2, "transformer_depth_middle": 1},
            "transformer_depth": [upper] * layers + [1] * layers,
            "transformer_depth_output": [upper] * (layers + 1) + [1] * (layers + 1),
        }
    depths = {"Flux": ("depth", "depth_single_blocks"), "Z-Image": ("n_layers", "n_refiner_layers")}
    return dict.fromkeys(depths.get(name, ("num_layers",)), layers)


def _of_whole(subject: Any, variant: str) -> tuple[Launches, float, int]:
    """One call of the model at 1024 x 1024, compiled as the variant's node does; seconds, and graph breaks."""
    import torch
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from comfy_accel.accel.core.compile_settings import CompileSettings
    from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate

    from . import session
    from .gpu_cases import Case
    from .gpu_models import Runs

    runs = Runs(subject)
    if variant == OURS:
        model = accelerate(runs.model, CompileSettings(), GraphCache(max_bytes=24 << 30), graphs=False)
    else:
        model = session.node("core", "inductor")(runs.model)
    traced = (768,) if variant == CORE else ()
    with torch.inference_mode():
        return last_size(lambda side: runs.run(model, Case(side, side, 1), 1), (*traced, 1024))


def last_size(call: Callable[[int], Any], sizes: Sequence[int]) -> tuple[Launches, float, int]:
    """What a call at the last size launches, its compiling in seconds, its graph breaks; others are traced alone.

    Raises:
        Problem: it launches no kernel that was compiled.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx, output_code

    compiled, run = compile_fx.compile_fx, output_code.CompiledFxGraph.__call__
    compile_fx.compile_fx = lambda traced, *_, **__: traced.forward
    try:
        for size in sizes[:-1]:
            call(size)
    finally:
        compile_fx.compile_fx = compiled
    counters["graph_break"].clear()
    started = _cpu_seconds()
    call(sizes[-1])
    seconds, breaks = _cpu_seconds() - started, sum(counters["graph_break"].values())
    with _recording() as (launched, externs):

        def counted(self: Any, inputs: Any) -> Any:
            with externs:
                return run(self, inputs)

        output_code.CompiledFxGraph.__call__ = counted
        try:
            call(sizes[-1])
        finally:
            output_code.CompiledFxGraph.__call__ = run
    if not launched:
        raise Problem("Nothing that was compiled ran.")
    return Launches([_kernel(*launch) for launch in launched], externs.counts), seconds, breaks


def _cpu_seconds() -> float:
    """Processor time until now, with that of compilers that it has waited for."""
    return sum(os.times()[:4])


class OutOfTime(BaseException):
    """Not an Exception, which a compiler might take for its own."""


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """seconds: of this process' processor time."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"not compiled within {seconds} seconds of processor time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a Triton kernel, by the configuration of fewest instructions that the autotuner may choose."""

    name: str
    instructions: int
    loads: Counter
    divisions: int
    int64_arguments: int
    nbytes: int

    def line(self, elements: int) -> str:
        counts = f"{self.divisions} divisions, {self.int64_arguments} int64, {dict(self.loads)}"
        return f"{self.instructions / elements:8.2f} {self.name}: {counts}"


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one call of a graph launches."""

    kernels: list[Kernel]
    externs: Counter


def row(model: str, block: str, variant: str, elements: int, launches: Launches, seconds: float) -> report.Row:
    loads: Counter = sum((kernel.loads for kernel in launches.kernels), Counter())
    return {
        **{"model": model, "block": block, "variant": variant, "elements": elements},
        "kernels": len({kernel.name for kernel in launches.kernels}),
        "launches": len(launches.kernels) + launches.externs.total(),
        "instructions_per_element": sum(kernel.instructions for kernel in launches.kernels) / elements,
        "vector_share": loads["128"] / max(1, loads.total()),
        "software_divisions": sum(kernel.divisions for kernel in launches.kernels),
        "int64_arguments": sum(kernel.int64_arguments for kernel in launches.kernels),
        "externs": " ".join(f"{count} {name}" for name, count in sorted(launches.externs.items())),
        "bytes": sum(kernel.nbytes for kernel in launches.kernels),
        "cpu_seconds": round(seconds, 1),
    }


def totals(rows: Sequence[report.Row]) -> list[report.Row]:
    """For each model: ours over static, weighted by elements, and core over ours."""
    answer = []
    for model in dict.fromkeys(row["model"] for row in rows):
        blocks = [row for row in rows if _part(row) == (MODELS.index(model), False)]
        of = {v: [row for row in blocks if row["variant"] == v] for v in (OURS, STATIC)}
        spent = {v: sum(row["instructions_per_element"] * row["elements"] for row in of[v]) for v in of}
        answer.append(
            {
                **{
                    "model": model,
                    "graphs": len(of[OURS]),
                    "ours / static": spent[OURS] / spent[STATIC] if spent[STATIC] else None,
                    "core / ours": _core_over_ours([row for row in rows if _part(row) == (MODELS.index(model), True)]),
                },
                "software divisions": sum(row["software_divisions"] for row in of[OURS]),
                "launches, ours": sum(row["launches"] for row in of[OURS]),
                "launches, static": sum(row["launches"] for row in of[STATIC]),
                **{f"cpu seconds, {v}": sum(row["cpu_seconds"] for row in of[v]) for v in of},
            }
        )
    return answer


def _core_over_ours(rows: Sequence[report.Row]) -> float | str:
    """Instructions of one more layer of each kind; or a word why there is no such number."""
    if not rows:
        return "not measured"
    if any(row["elements"] is None for row in rows):
        return "failed"
    fewer, more = (
        {row["variant"]: row["instructions_per_element"] for row in rows if row["block"] == _label(layers)}
        for layers in LAYERS
    )
    return (more[CORE] - fewer[CORE]) / (more[OURS] - fewer[OURS])


def _launches(graph: Any, tensors: Sequence[Any]) -> Launches:
    """What the graph launches with these tensors."""
    import torch

    with _recording() as (launched, externs), torch.inference_mode():
        graph.run(list(tensors))  # it chooses each kernel's configuration
        launched.clear()
        with externs:
            graph.run(list(tensors))
    return Launches([_kernel(autotuner, args) for autotuner, args in launched], externs.counts)


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

    CachingAutotuner.run = recorded
    try:
        yield launched, Externs()
    finally:
        CachingAutotuner.run = run


def _kernel(autotuner: Any, args: Sequence[Any]) -> Kernel:
    sizes = dict(
        zip([n for n, kind in autotuner.triton_meta["signature"].items() if kind != "constexpr"], args, strict=False)
    )
    of = [_counted(autotuner, result, args, sizes) for result in autotuner.compile_results]
    instructions, loads, divisions = min(of, key=lambda counted: counted[0])
    return Kernel(
        autotuner.fn.__name__,
        instructions,
        loads,
        divisions,
        sum(kind == "i64" for kind in autotuner.triton_meta["signature"].values()),
        sum(arg.nbytes for arg in args if hasattr(arg, "nbytes")),
    )


def _counted(autotuner: Any, result: Any, args: Sequence[Any], sizes: dict[str, Any]) -> tuple[int, Counter, int]:
    """Instructions of all threads of a launch, its loads and stores by width, its divisions in software."""
    _, grid = autotuner._interpret_args_grid(tuple(args), result.config)
    threads = math.prod(grid) * 32 * result.config.num_warps
    numbers = result.config.kwargs
    trips = 1
    for name, block in numbers.items():
        if (
            name.startswith("R")
            and name.endswith("_BLOCK")
            and isinstance(sizes.get(f"{name[:-6].lower()}_numel"), int)
        ):
            trips *= math.ceil(sizes[f"{name[:-6].lower()}_numel"] / block)
    code = sass(_cubin(result))
    return sum(code.weights(trips)) * threads, code.loads(), code.divisions()


def _cubin(result: Any) -> bytes:
    """A kernel's binary; where torch's own launcher runs it, from Triton's cache."""
    if hasattr(result.kernel, "asm"):
        return result.kernel.asm["cubin"]
    result.reload_cubin_path()
    return Path(result.kernel.cubin_path).read_bytes()


Instruction = tuple[int, str, "int | None"]
"""Address, operation, target of a branch."""


@dataclasses.dataclass(frozen=True)
class Sass:
    """The instructions of one kernel."""

    instructions: list[Instruction]

    def weights(self, trips: int) -> list[int]:
        """How often each is issued. trips: of its loops together."""
        loops = [
            (target, at) for at, op, target in self.instructions if op == "BRA" and target is not None and target < at
        ]
        return [trips if any(first <= at <= last for first, last in loops) else 1 for at, _, _ in self.instructions]

    def loads(self) -> Counter:
        wide = (".128" in op for _, op, _ in self.instructions if op.startswith(("LDG", "STG", "LD.", "ST.")))
        return Counter("128" if is_wide else "narrow" for is_wide in wide)

    def divisions(self) -> int:
        """A division begins with the divisor's reciprocal, rounded up."""
        return sum(op.startswith("I2F") and op.endswith(".RP") for _, op, _ in self.instructions)


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*)(.*)", re.MULTILINE)


@functools.cache
def sass(cubin: bytes) -> Sass:
    """The code of a kernel, as the disassembler in Triton's wheel reads it."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-sass", file.name], capture_output=True, text=True, env={}, check=True
        ).stdout
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
        code = _one_way(code, fork, target)
    return Sass(code)


def _one_way(code: list[Instruction], fork: int, target: int) -> list[Instruction]:
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
def _fresh_kernels() -> Iterator[None]:
    """While it lasts, nothing is found that was compiled before."""
    import torch
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.utils import clear_caches, fresh_cache

    torch._dynamo.reset()
    clear_caches()
    CompiledTritonKernels.cache_clear()
    with fresh_cache():
        yield


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench kernels", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is given")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")
    parser.add_argument("--block", default="", metavar="NAME", help="only blocks whose class begins so")
    parser.add_argument(
        "--limit", type=int, default=900, metavar="SECONDS", help="processor time for each whole model; default: 900"
    )
    parser.add_argument("--details", action="store_true", help="also print each kernel")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there too, beside those of other models in it"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page of them there")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(MODELS)}")
    return options


if __name__ == "__main__":
    sys.exit(command.run(main))

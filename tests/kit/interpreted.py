"""Runs Triton's kernels and inductor's generated code on the CPU, in Triton's interpreter, in a process of its own.

Seen is each load and store of each program with its mask, and what is computed between them. Tensors begin as NaN and
lie between margins of NaN: what is never written or read too far comes out as NaN, and what is written too far is
found. Not seen are threads and barriers, how a card rounds, and whether the kernels build. Library calls are torch's
own, on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch

ROOT = Path(__file__).resolve().parents[2]

MARGIN = 1 << 12
"""Numbers before and after each tensor: as many as a program of most kernels has elements."""


def interpreted(function, *given):
    """What a function of this module answers, given what torch saves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "given.pt"
        torch.save(given, path)
        child = _interpreter()
        print(function.__name__, path, file=child.stdin, flush=True)
        if not child.stdout.readline():
            _interpreter.cache_clear()
            raise RuntimeError("The process that interprets has failed: its standard error says how.")
        return torch.load(path)


@functools.cache
def _interpreter():
    """A process that answers until this one ends: to import what it needs takes five seconds."""
    folder = tempfile.TemporaryDirectory()
    # Not the device that this process may have.
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "TMPDIR": folder.name}
    environment |= {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": folder.name}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
    child.folder = folder
    return child


def loaded(file):
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels(file, given):
    """What functions of a module answer, given a name, None and arguments for each; or a kernel's grid, for these."""
    module = loaded(file)
    module.wrap_triton = lambda kernel: kernel
    answers = []
    for name, grid, arguments in given:
        function = getattr(module, name)
        answers.append(function(*arguments) if grid is None else function[grid](*arguments) or arguments)
    return answers


@contextlib.contextmanager
def not_built() -> Iterator[None]:
    """A context in which inductor generates code and builds no kernels from it."""
    from torch._inductor.async_compile import AsyncCompile

    with (
        mock.patch.object(AsyncCompile, "triton", lambda *_, **_options: SimpleNamespace(run=lambda *_, stream: None)),
        mock.patch.object(AsyncCompile, "wait", lambda *_: None),
    ):
        yield


class GraphCall(NamedTuple):
    """A call of a compiled graph with tensors on the CPU.

    changes: (regular expression, text in its place) in the source of each kernel, which then runs in one configuration.
    """

    graph: Any
    tensors: Sequence[torch.Tensor]
    changes: tuple[tuple[str, str], ...] = ()


class Computed(NamedTuple):
    """What the kernels of such a call computed.

    answers: the graph's, one for each round; in each, each kernel has the next of its configurations. kernels: which
    were launched. configurations: of these together. within: nothing was written outside of a tensor.
    """

    answers: list[Any]
    kernels: int
    configurations: int
    within: bool


def computed(calls: Sequence[GraphCall]) -> list[Computed]:
    """What the graphs' kernels compute. All of a graph runs here but for its generated code."""
    from comfy_accel.accel.compile import generated_code
    from torch._inductor.output_code import CompiledFxGraph

    runs: list[tuple] = []

    class Seen(Exception):
        """What the generated code is called with is known."""

    def see(self, arguments):
        (module,) = (module for module in generated_code.all_modules() if getattr(module, "key", 0) == self.cache_key)
        runs.append((module.__file__, list(arguments), call.changes))
        raise Seen

    def answer(self, arguments):
        out, written = next(rounds)
        for argument, value in zip(arguments, written, strict=True):
            if value is not None:
                argument.copy_(value)
        return out

    def run(call):
        return call.graph.run([tensor.clone() for tensor in call.tensors])

    found = []
    with torch.inference_mode():
        with mock.patch.object(CompiledFxGraph, "__call__", see):
            for call in calls:
                with contextlib.suppress(Seen):
                    run(call)
        with mock.patch.object(CompiledFxGraph, "__call__", answer):
            for call, (answers, *rest) in zip(calls, interpreted(generated, runs), strict=True):
                rounds = iter(answers)
                found.append(Computed([run(call) for _ in answers], *rest))
    return found


def generated(runs):
    """What generated code computes, given its file, its arguments and changes for each; as `computed` reads it."""
    from torch._inductor.async_compile import AsyncCompile

    _prepare()
    AsyncCompile.wait = lambda *_: None
    modules, found = {}, []
    for file, arguments, changes in runs:
        AsyncCompile.triton = lambda self, name, source, **_: _Kernel(name, source, changes)  # noqa: B023
        if (file, changes) not in modules:
            modules[file, changes] = loaded(file)
        answers = []
        _Kernel.launched.clear()
        for _Kernel.round in itertools.count():
            given = [_poisoned_copy(argument) for argument in arguments]
            out = [part.clone() for part in modules[file, changes].call(list(given))]
            pairs = zip(given, arguments, strict=True)
            answers.append((out, [None if _same(one, other) else one.clone() for one, other in pairs]))
            counts = [len(kernel.configurations) for kernel in _Kernel.launched]
            if changes or _Kernel.round + 1 >= max(counts, default=1):
                break
        found.append((answers, len(counts), sum(counts), all(itertools.starmap(torch.equal, _margins))))
        _margins.clear()
    return found


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class _Kernel:
    """In place of a compiled kernel of generated code. round: says which of its configurations runs."""

    launched: dict[_Kernel, None] = {}
    round = 0

    def __init__(self, name, source, changes):
        from triton.language import constexpr

        source = source.replace("triton_helpers.set_driver_to_gpu()", "")
        for old, new in changes:
            source = re.sub(old, new, source)
        file = Path(tempfile.mkdtemp()) / f"{name}.py"
        file.write_text(source)
        self._kernel = getattr(loaded(file), name)
        parameters = inspect.signature(self._kernel.fn.fn).parameters.values()
        self._constants = {one.name for one in parameters if one.annotation is constexpr}
        # Those that differ in warps and stages alone are one here.
        self.configurations = list({str(config.kwargs): config for config in self._kernel.configs}.values())

    def run(self, *args, stream):
        from torch._inductor.runtime.triton_heuristics import GridExpr

        self.launched[self] = None
        configuration = self.configurations[self.round % len(self.configurations)]
        settings, function = self._kernel.inductor_meta, self._kernel.fn
        names = [name for name in inspect.signature(function.fn).parameters if name not in self._constants]
        given = dict(zip((*names, *settings.get("extra_launcher_args", ())), args, strict=True))
        grid = GridExpr.from_meta(settings, configuration).eval_slow(given)
        given = {name: given[name] for name in names} | self._kernel.triton_meta.get("constants", {})
        function[grid](**given, **configuration.kwargs)


_margins: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Margins of tensors, and these as they were."""


def _poisoned(shape, stride, dtype):
    """An empty tensor."""
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    storage = _poison(count + 2 * MARGIN, dtype)
    for margin in (storage[:MARGIN], storage[MARGIN + count :]):
        margin = margin.view(torch.uint8)  # numbers that are none are not equal
        _margins.append((margin, margin.clone()))
    return storage.as_strided(shape, stride, MARGIN)


def _poison(count, dtype):
    """NaN, each in bits of its own, so that one of another tensor is seen where it is written."""
    if not dtype.is_floating_point:
        return torch.full((count,), dtype is torch.bool or torch.iinfo(dtype).max, dtype=dtype)
    bits = getattr(torch, f"int{8 * dtype.itemsize}")
    return (torch.full((count,), math.nan, dtype=dtype).view(bits) | torch.randint(64, (count,), dtype=bits)).view(
        dtype
    )


def _poisoned_copy(value):
    if not isinstance(value, torch.Tensor):
        return value
    return _poisoned(value.shape, value.stride(), value.dtype).copy_(value)


@functools.cache
def _prepare():
    """Let generated code find here what it calls."""
    from dev.tools import pack

    pack.load()
    from comfy_accel.accel.kernels import convolution
    from torch._inductor.runtime import triton_helpers

    convolution.leave_to_library(torch.nn.Module())
    triton_helpers.libdevice = _Functions()
    _prepare.library = torch.library.Library("aten", "IMPL")
    for kind in ("flash", "efficient", "cudnn"):
        name = f"_scaled_dot_product_{kind}_attention"
        attention = functools.partial(_attention, getattr(torch.ops.aten, name).default)
        _prepare.library.impl(name, attention, "CPU")
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.cuda._DeviceGuard, torch.cuda.set_device = contextlib.nullcontext, lambda device: None
    torch._C._dynamo.guards._empty_strided_cuda = _poisoned


def _attention(operator, query, key, value, *rest, scale=None, **options):
    """As a card's operator: computed in float32, and laid out as there; of the rest it gives shapes."""
    on_meta = [part.to("meta") if isinstance(part, torch.Tensor) else part for part in (query, key, value, *rest)]
    out, *others = operator(*on_meta, scale=scale, **options)
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if rest and isinstance(rest[0], torch.Tensor):
        scores += rest[0]
    made = _poisoned(out.shape, out.stride(), out.dtype).copy_(scores.softmax(-1) @ value.float())
    return made, *others


class _Functions:
    """CUDA's functions of numbers, by their names, as torch has them on the CPU."""

    _OTHERWISE = {"fast_tanhf": "tanh", "nearbyint": "round"}

    def __getattr__(self, name):
        function = getattr(torch, self._OTHERWISE.get(name, name))

        def call(*given):
            from triton import language
            from triton.runtime.interpreter import TensorHandle

            out = function(*(torch.from_numpy(numpy.asarray(arg.handle.data)) for arg in given)).numpy()
            kind = language.int32 if name.startswith("is") else given[0].dtype.scalar
            return language.tensor(TensorHandle(out, kind), given[0].type.with_element_ty(kind))

        return call


def _mend():
    """Replace what Triton's interpreter has not, has one by one, or has otherwise than a card."""
    from triton.runtime import interpreter

    interpreter.int = _Whole("int", (), {})
    interpreter._convert_float = functools.partial(_converted, interpreter._convert_float)
    interpreter.ReduceOps.generic_reduce = _reduced
    # Half of its time goes into asking of each sum whether it overflows, patching the language at each call of a
    # function, and making the same few shapes anew.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter.tl.tensor.__init__, interpreter.tl.block_type.__init__ = _make_tensor, _make_type
    load = interpreter.InterpreterBuilder.create_masked_load

    def masked_load(self, pointers, mask, other, *rest):
        if other is None:  # a card promises no number there
            kind = pointers.get_element_ty()
            of_mask = 0x7FC0 if kind.is_bf16() else math.nan if kind.is_floating() else 1
            other = numpy.full_like(pointers.data, of_mask, interpreter._get_np_dtype(kind))
            other = interpreter.TensorHandle(other, kind)
        return load(self, pointers, mask, other, *rest)

    interpreter.InterpreterBuilder.create_masked_load = masked_load


@functools.cache
def _shape(sizes):
    """For a type and for a tensor, as the interpreter has it; the number of elements, and what it is called."""
    from triton.language import core

    of_type, of_tensor = core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes])
    return of_type, of_tensor, math.prod(sizes), str(of_type)


def _make_tensor(self, handle, kind):
    from triton.language import core

    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    _, self.shape, count, _ = _shape(tuple(kind.shape) if kind.is_block() else ())
    self.numel = core.constexpr(count)


def _make_type(self, element_ty, shape):
    self.element_ty = element_ty
    self.shape, _, self.numel, text = _shape(tuple(getattr(size, "value", size) for size in shape))
    self.name = f"<{text}, {element_ty}>"


def _converted(convert, values, given, wanted, rounding):
    """Numbers as others, bfloat16 rounded to the nearest: the interpreter cuts it off."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if {str(given), str(wanted)} != set(dtypes):
        return convert(values, given, wanted, rounding)
    numbers = torch.from_numpy(values.view(f"i{values.itemsize}")).view(dtypes[str(given)]).to(dtypes[str(wanted)])
    return numbers.view(getattr(torch, f"int{8 * numbers.itemsize}")).numpy()


def _reduced(self, given):
    """By the function that combines two: one half with the other, and so on."""
    parts, axis = self.unravel(given, self.axis)
    kinds, parts = [part.dtype for part in parts], [part.handle.data for part in parts]

    def tensors(parts):
        return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]

    while count := parts[0].shape[axis] // 2:
        halves = ([part.take(range(first, first + count), axis) for part in parts] for first in (0, count))
        combined = self.combine_fn.fn(*itertools.chain(*map(tensors, halves)))
        parts = [part.handle.data for part in (combined if isinstance(combined, tuple) else (combined,))]
    return tensors(parts if self.keep_dims else [part.squeeze(axis) for part in parts])


class _Whole(type):
    """`int`, of arrays with one element too, which numpy makes no number of any more."""

    def __instancecheck__(cls, value):
        return isinstance(value, int)

    def __call__(cls, value=0):
        return int(value.item() if hasattr(value, "item") else value)


if __name__ == "__main__":
    _mend()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, file = line.rstrip("\n").split(" ", 1)
        torch.save(globals()[name](*torch.load(file)), file)
        print("answered", file=answers, flush=True)

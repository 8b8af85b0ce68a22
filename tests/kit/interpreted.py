"""Runs Triton's kernels and inductor's generated code on the CPU, in Triton's interpreter, in a process of its own."""

import contextlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def interpreted(function, file, *tensors):
    """What a function of this module answers, given a file of code and tensors (or what else torch saves)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.pt"
        torch.save(tensors, path)
        # Not the device that this process may have.
        environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "TMPDIR": folder}
        subprocess.run([sys.executable, __file__, function.__name__, file, path], env=environment, check=True)
        return torch.load(path)


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


def generated(file, *tensors):
    """What inductor's generated code computes from tensors, in the order in which it takes those of like shapes."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.triton, AsyncCompile.wait = lambda self, name, source, **_: _Kernel(name, source), lambda *_: None
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype
    )
    torch.cuda._DeviceGuard, torch.cuda.set_device = contextlib.nullcontext, lambda device: None
    code, sizes, given, rest = Path(file).read_text(), {}, {}, list(tensors)
    for name, shape in re.findall(r"assert_size_stride\((arg\w+), \((.*?),?\), ", code):
        shape = shape.split(", ")
        fits = (len(shape) == tensor.ndim and shape[-1] == str(tensor.shape[-1]) for tensor in rest)
        given[name] = rest.pop(list(fits).index(True))
        sizes |= zip(shape, given[name].shape, strict=True)
    given |= {name: sizes.get(symbol) for symbol, name in re.findall(r"    (s\d+) = (arg\w+)", code)}
    return loaded(file).call([given[name] for name in sorted(given, key=lambda name: int(name[3:-2]))])


class _Kernel:
    """In place of a compiled kernel of generated code."""

    def __init__(self, name, source):
        file = Path(tempfile.gettempdir()) / f"{name}.py"
        source = source.replace("triton_helpers.set_driver_to_gpu()", "")
        file.write_text(re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n", "", source, flags=re.DOTALL))
        self.kernel = getattr(loaded(file), name)

    def run(self, *args, stream):
        names = inspect.signature(self.kernel.fn).parameters
        given = dict(zip(names, args, strict=False))
        blocks = {name: 64 for name in names if name.endswith("BLOCK")}
        grid = [-(-given[f"{axis}numel"] // 64) for axis in "xyz" if f"{axis}numel" in given]
        self.kernel[tuple(grid)](**given, **blocks)


class _Whole(type):
    """`int`, of arrays with one element too, which numpy makes no number of any more."""

    def __instancecheck__(cls, value):
        return isinstance(value, int)

    def __call__(cls, value=0):
        return int(value.item() if hasattr(value, "item") else value)


if __name__ == "__main__":
    from triton.runtime import interpreter

    interpreter.int = _Whole("int", (), {})
    _, function, source, path = sys.argv
    torch.save(globals()[function](source, *torch.load(path)), path)

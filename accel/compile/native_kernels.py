"""Generated code that loads without a compiler: its C++ kernels are binaries in it, and it imports none of torch's.

Inductor saves a graph's C++ kernels as source. Each process that loads it builds them again, and first tests what the
processor and the compiler can do, with six more builds, each run in a Python process of its own. To find functions such
as `torch.addmm`, the code imports what generates code, which takes 0.7 s.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import re
import types
import zlib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from ..core import torch_internals

_EXTERN = "extern_kernels"
_OF_COMPILER = re.compile(r"torch\.ops\.(prims|quantized_decomposed)\b")
"""Operators that are there once the compiler is imported."""


def load_kernel(packed: str, end: str):
    """The function `kernel` of an extension module. packed: its compressed bytes as text. end: of its file's name.

    Copied into generated code, so it imports what it uses. A library is loaded once in a process, from a file in the
    cache where torch has those that it builds.

    Raises:
        ImportError, OSError: this system cannot load it.
    """
    import base64
    import hashlib
    import importlib.util
    import os
    import sys
    import zlib

    import torch
    from torch._inductor.codecache import write_atomic
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    content = zlib.decompress(base64.b85decode(packed))
    # The last part of the name tells Python what the library's entry is called.
    name = f"accel_{hashlib.sha256(content).hexdigest()[:32]}.kernel"
    if name in sys.modules:
        return sys.modules[name].kernel
    # As inductor does before it loads a library of its own: the library asks for it.
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    path = os.path.join(cache_dir(), "accel", f"{name}{end}")
    try:
        with open(path, "rb") as file:
            is_there = file.read() == content
    except FileNotFoundError:
        is_there = False
    if not is_there:  # Windows replaces no library that some process has loaded
        write_atomic(path, content, make_dirs=True)
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module.kernel


def carry_built_kernels(graph: Any, modules: Sequence[types.ModuleType]) -> None:
    """Embed the built kernels in inductor's graph. modules: executed code, this graph's among them."""
    source = getattr(graph, "source_code", None)
    if not source:
        return
    module = next((module for module in modules if getattr(module, "key", None) == graph.cache_key), None)
    if module is not None and torch_internals.find_missing(torch_internals.BUILT_KERNELS) is None:
        source = embed_built_kernels(source, module)
    graph.source_code = remove_compiler_imports(source)
    # Torch writes the code to a file of this name, unless there is one, and runs the file.
    graph.cache_key = f"c{hashlib.sha256(graph.source_code.encode()).hexdigest()[:51]}"


def embed_built_kernels(source: str, module: types.ModuleType) -> str:
    """The generated source with the libraries that `module`, its execution here, has loaded, in place of the C++
    kernels. A kernel stays source where its library is not found, or has a suffix that Python does not load."""
    lines = source.encode().splitlines(keepends=True)
    replaced = False
    for statement in reversed(ast.parse(source).body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"))):
                owner = getattr(getattr(module, name, None), "__self__", None)
            case _:
                continue
        file = getattr(owner, "__file__", None)  # of the extension module that defines a built-in function
        library = Path(file) if isinstance(owner, types.ModuleType) and file and Path(file).is_file() else None
        if library is None or library.suffix not in EXTENSION_SUFFIXES:
            continue
        packed = base64.b85encode(zlib.compress(library.read_bytes(), 9)).decode()
        call = f"{name} = load_kernel({packed!r}, {library.suffix!r})\n"
        lines[statement.lineno - 1 : statement.end_lineno] = [call.encode()]
        replaced = True
    if not replaced:
        return source
    return f"{inspect.getsource(load_kernel)}\n\n{b''.join(lines).decode()}"


def remove_compiler_imports(source: str) -> str:
    """The generated source without imports of inductor's modules that it does not use, or only for functions that torch
    has under the same name."""
    tree = ast.parse(source)
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == _EXTERN
    ]
    extern = torch_internals.EXTERN_KERNELS.get(None)
    are_torchs = len(names) == used.count(_EXTERN) and all(
        getattr(torch, name, None) is getattr(extern, name, names) for name in names
    )
    lines = source.encode().splitlines(keepends=True)
    for statement in reversed(tree.body):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("torch._inductor."):
            imported = [alias.asname or alias.name for alias in statement.names]
            place = slice(statement.lineno - 1, statement.end_lineno)
            if not set(imported).intersection(used):
                del lines[place]
            elif imported == [_EXTERN] and are_torchs and not _OF_COMPILER.search(source):
                lines[place] = [f"{_EXTERN} = torch\n".encode()]
    return b"".join(lines).decode()

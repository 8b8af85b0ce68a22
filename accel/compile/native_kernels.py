"""Generated code with its C++ kernels embedded as binaries, so that loading it needs no C++ compiler.

Inductor saves a graph's C++ kernels as source. Each process that loads it builds them again, and first tests what the
processor and the compiler can do, with six more builds, each run in a Python process of its own.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import types
import zlib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from ..core import torch_internals


def built_kernel(packed: str, end: str):
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
    spec = importlib.util.spec_from_file_location(name, path)
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
    if module is not None and torch_internals.lacking(torch_internals.BUILT_KERNELS) is None:
        graph.source_code = with_built_kernels(source, module)
    # Torch writes the code to a file of this name, unless there is one, and runs the file.
    graph.cache_key = f"c{hashlib.sha256(graph.source_code.encode()).hexdigest()[:51]}"


def with_built_kernels(source: str, module: types.ModuleType) -> str:
    """The generated source with each C++ kernel replaced by the library that `module`, its execution here, loaded.

    A kernel stays source where its library is not found, or has a suffix that Python does not load.
    """
    lines = source.encode().splitlines(keepends=True)
    replaced = False
    for statement in reversed(ast.parse(source).body):
        name = _kernel_name(statement)
        library = _library_of(getattr(module, name, None)) if name else None
        if library is None or library.suffix not in EXTENSION_SUFFIXES:
            continue
        packed = base64.b85encode(zlib.compress(library.read_bytes(), 9)).decode()
        call = f"{name} = built_kernel({packed!r}, {library.suffix!r})\n"
        lines[statement.lineno - 1 : statement.end_lineno] = [call.encode()]
        replaced = True
    if not replaced:
        return source
    return f"{inspect.getsource(built_kernel)}\n\n{_without_idle_imports(b''.join(lines).decode())}"


def _without_idle_imports(source: str) -> str:
    """The source without unused imports of inductor's modules, each of which may take a second."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = source.encode().splitlines(keepends=True)
    for statement in reversed(tree.body):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("torch._inductor."):
            if not used & {alias.asname or alias.name for alias in statement.names}:
                del lines[statement.lineno - 1 : statement.end_lineno]
    return b"".join(lines).decode()


def _kernel_name(statement: ast.stmt) -> str | None:
    """The name in `name = async_compile.cpp_pybinding(...)`; None for any other statement."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"))):
            return name
    return None


def _library_of(function: object) -> Path | None:
    """The file of the extension module that defines a built-in function; None of any other object."""
    owner = getattr(function, "__self__", None)
    file = getattr(owner, "__file__", None)
    return Path(file) if isinstance(owner, types.ModuleType) and file and Path(file).is_file() else None

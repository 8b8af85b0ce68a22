"""Generated code with its C++ kernels embedded as binaries, so that loading it needs no C++ compiler.

Inductor saves a graph's C++ kernels as source. Each process that loads it builds them again, and first tests what the
processor and the compiler can do, with six more builds, each run in a Python process of its own.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import hashlib
import inspect
import shutil
import sys
import tempfile
import time
import types
import zlib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from ..core import torch_internals

FOLDER_PREFIX = "comfy-accel-"
"""Prefix of temporary folders from which libraries are loaded."""

_WEEK = 7 * 86400.0
"""Seconds."""


def built_kernel(packed: str, end: str):
    """The function `kernel` of an extension module. packed: its compressed bytes as text. end: of its file's name.

    Copied into generated code, so it imports what it uses. A library is loaded once in a process, from a folder that no
    other user can enter; its file is then deleted, where the system deletes loaded libraries (`delete_leftovers`).

    Raises:
        ImportError, OSError: this system cannot load it.
    """
    import base64
    import hashlib
    import importlib.util
    import os
    import shutil
    import sys
    import tempfile
    import zlib

    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    content = zlib.decompress(base64.b85decode(packed))
    # The last part of the name tells Python what the library's entry is called.
    name = f"accel_{hashlib.sha256(content).hexdigest()[:32]}.kernel"
    if name in sys.modules:
        return sys.modules[name].kernel
    # As inductor does before it loads a library of its own: the library asks for it.
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    refused = None
    for place in (None, cache_dir()):  # the system's folder for temporary files may be mounted noexec
        folder = None
        try:
            folder = tempfile.mkdtemp(prefix="comfy-accel-", dir=place)
            path = os.path.join(folder, f"kernel{end}")
            with open(path, "wb") as file:
                file.write(content)
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (ImportError, OSError) as error:
            refused = error
        else:
            sys.modules[name] = module
            return module.kernel
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise refused


@functools.lru_cache(maxsize=1)
def delete_leftovers() -> None:
    """On Windows, delete what earlier processes could not: the file of a library stays as long as it is loaded.

    Looks once in a process, and leaves alone what is younger than a week: another process may be about to load it.
    """
    if sys.platform != "win32":
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for place in (tempfile.gettempdir(), cache_dir()):
        for folder in Path(place).glob(f"{FOLDER_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _WEEK:
                    shutil.rmtree(folder, ignore_errors=True)


def carry_built_kernels(graph: Any, modules: Sequence[types.ModuleType]) -> str:
    """Embed the built kernels in inductor's graph; the name of its generated code then, "" where it has none.

    modules: executed code, this graph's among them.
    """
    source = getattr(graph, "source_code", None)
    if not source:
        return ""
    module = next((module for module in modules if getattr(module, "key", None) == graph.cache_key), None)
    if module is not None and torch_internals.lacking(torch_internals.BUILT_KERNELS) is None:
        graph.source_code = with_built_kernels(source, module)
    graph.cache_key = name_of(graph.source_code.encode())
    return graph.cache_key


def name_of(code: bytes) -> str:
    """The name under which generated code is saved; it says what is in it."""
    return f"c{hashlib.sha256(code).hexdigest()[:51]}"


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

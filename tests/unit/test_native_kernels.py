"""Built libraries in generated source."""

import _ctypes
import ast
import base64
import os
import types
import zlib
from pathlib import Path

from comfy_accel.accel.compile import native_kernels
from comfy_accel.accel.compile.native_kernels import with_built_kernels
from kit.stores import as_on_windows, held_open

SOURCE = """
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.idle import _idle as idle
import math
async_compile = AsyncCompile()


one = async_compile.cpp_pybinding(['float*'], r'''
code with "quotes", äöü, and a line = async_compile.cpp_pybinding(
''')
other = async_compile.triton('name', '''
kernel
''')
two = async_compile.cpp_pybinding(['float*'], '''more''')

def call(args):
    return one(args)
"""


def executed(**kernels):
    module = types.ModuleType("generated")
    vars(module).update(kernels)
    return module


def test_kernel_that_is_built_is_there_as_its_library():
    changed = with_built_kernels(SOURCE, executed(one=_ctypes.dlopen, two=len))
    statements = {
        statement.targets[0].id: statement.value
        for statement in ast.parse(changed).body
        if isinstance(statement, ast.Assign)
    }
    packed = ast.literal_eval(statements["one"].args[0])
    assert zlib.decompress(base64.b85decode(packed)) == Path(_ctypes.__file__).read_bytes()
    assert ast.unparse(statements["other"]) == "async_compile.triton('name', '\\nkernel\\n')"
    assert ast.unparse(statements["two"]).startswith("async_compile.cpp_pybinding(")  # no library is known of it
    assert "import AsyncCompile" in changed and "import math" in changed and "idle" not in changed
    assert changed.endswith("def call(args):\n    return one(args)\n")


def test_source_without_built_kernels_stays_as_it_is():
    assert with_built_kernels(SOURCE, executed()) == SOURCE
    assert with_built_kernels("x = 1\n", executed(x=_ctypes.dlopen)) == "x = 1\n"


def test_libraries_that_windows_kept_are_deleted_once_nobody_runs_them(tmp_path, monkeypatch):
    """Simulated: Windows deletes no library that is loaded."""
    names = {"old": 8 * 86400, "loaded": 8 * 86400, "young": 60, "of another program": 8 * 86400}
    for name, age in names.items():
        folder = tmp_path / (name if " " in name else f"{native_kernels.FOLDER_PREFIX}{name}")
        folder.mkdir()
        (folder / f"{name}.pyd").touch()
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    unlink = os.unlink

    def refuse(path, **how):
        if "loaded" in os.fspath(path):
            raise held_open()
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(native_kernels.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    looks = native_kernels.delete_leftovers.__wrapped__
    looks()
    assert len(list(tmp_path.glob("*/*.pyd"))) == 4  # elsewhere a process deletes its own
    as_on_windows(monkeypatch, native_kernels)
    looks()
    assert {file.stem for file in tmp_path.glob("*/*.pyd")} == {"loaded", "young", "of another program"}

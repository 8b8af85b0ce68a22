"""Built libraries in generated source."""

import _ctypes
import ast
import base64
import runpy
import types
import zlib
from pathlib import Path

import pytest
from comfy_accel.accel.compile.native_kernels import embed_built_kernels, remove_compiler_imports

SOURCE = """
from torch._inductor.async_compile import AsyncCompile
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
    changed = embed_built_kernels(SOURCE, executed(one=_ctypes.dlopen, two=len))
    statements = {
        statement.targets[0].id: statement.value
        for statement in ast.parse(changed).body
        if isinstance(statement, ast.Assign)
    }
    packed = ast.literal_eval(statements["one"].args[0])
    assert zlib.decompress(base64.b85decode(packed)) == Path(_ctypes.__file__).read_bytes()
    assert ast.unparse(statements["other"]) == "async_compile.triton('name', '\\nkernel\\n')"
    assert ast.unparse(statements["two"]).startswith("async_compile.cpp_pybinding(")  # no library is known of it
    assert changed.endswith("def call(args):\n    return one(args)\n")


def test_source_without_built_kernels_stays_as_it_is():
    assert embed_built_kernels(SOURCE, executed()) == SOURCE
    assert embed_built_kernels("x = 1\n", executed(x=_ctypes.dlopen)) == "x = 1\n"


HEADER = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.idle import _idle as idle
from torch._inductor.select_algorithm import extern_kernels
import math
async_compile = AsyncCompile()
"""
IMPORTED = "from torch._inductor.select_algorithm import extern_kernels\n"


def test_functions_of_torchs_are_called_without_the_compiler(tmp_path):
    changed = remove_compiler_imports(HEADER + "extern_kernels.addmm(a, b)\n")
    assert "import AsyncCompile" in changed and "import math" in changed and "idle" not in changed
    assert IMPORTED not in changed
    called = changed[changed.index("extern_kernels = ") :]
    scope = {"torch": types.SimpleNamespace(addmm=lambda a, b: (a, b)), "a": 1, "b": 2}
    (tmp_path / "called.py").write_text(called.replace("import math\nasync_compile = AsyncCompile()\n", ""))
    assert runpy.run_path(str(tmp_path / "called.py"), scope)["extern_kernels"] is scope["torch"]


@pytest.mark.parametrize(
    "code",
    [
        "extern_kernels.bias_addmm(a, b)",  # inductor's own
        "extern_kernels.addmm(a, b); extern_kernels.bias_addmm(a, b)",
        "getattr(extern_kernels, 'addmm')(a, b)",
        "extern_kernels.addmm(a, b); torch.ops.prims.prepare_softmax_online(a, 0)",
        "extern_kernels.addmm(a, b); torch.ops.quantized_decomposed.quantize_per_tensor.default(a)",
    ],
)
def test_what_the_compiler_alone_has_is_imported_from_it(code):
    assert IMPORTED in remove_compiler_imports(f"{HEADER}{code}\n")

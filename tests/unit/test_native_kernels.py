"""Built libraries in generated source."""

import _ctypes
import ast
import base64
import types
import zlib
from pathlib import Path

from comfy_accel.accel.compile.native_kernels import with_built_kernels

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

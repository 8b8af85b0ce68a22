"""How the engine is put together: what decides the content of a saved graph is in its key."""

from pathlib import Path

from comfy_accel.accel import store_key
from engine_imports import ENGINE, closure

ROOTS = ("compilers", "kinds", "block_runner", "compiled_layers")
"""Compiling, fingerprints and dispatch."""


def test_all_code_that_decides_what_is_in_a_saved_graph_is_in_its_key():
    decides = closure(ENGINE / f"{name}.py" for name in ROOTS)
    assert {path.relative_to(ENGINE).as_posix() for path in decides} == {
        Path(path).relative_to(ENGINE).as_posix() for path in store_key.engine_files()
    }

"""How the engine is put together: what decides the content of a saved graph is in its key."""

from pathlib import Path

from comfy_accel.accel.store import key
from engine_imports import ENGINE, closure, files

ROOTS = ("compile", "fingerprint", "dispatch")


def test_all_code_that_decides_what_is_in_a_saved_graph_is_in_its_key():
    decides = closure(file for name in ROOTS for file in files(ENGINE / name))
    assert {file.parent for file in decides} == {ENGINE / Path(folder).name for folder in key.engine_folders()}

"""How the engine is put together: what decides the content of a saved graph is in its key, and the wheel has it all."""

import ast
import re
from pathlib import Path

from comfy_accel.accel.store import key
from engine_imports import ENGINE, closure, files

ROOTS = ("compile", "fingerprint", "dispatch")


def test_all_code_that_decides_what_is_in_a_saved_graph_is_in_its_key():
    decides = closure(file for name in ROOTS for file in files(ENGINE / name))
    assert {file.parent for file in decides} == {ENGINE / Path(folder).name for folder in key.engine_folders()}


def test_wheel_lists_every_package_of_the_engine():
    text = (ENGINE.parent / "pyproject.toml").read_text(encoding="utf-8")
    listed = ast.literal_eval(re.search(r"^packages = (\[.*?^\])", text, re.DOTALL | re.MULTILINE)[1])
    folders = {file.parent.relative_to(ENGINE) for file in files()}
    assert listed == sorted(".".join(("comfy_accel", *folder.parts)) for folder in folders)

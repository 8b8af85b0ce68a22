"""How the engine is put together: packages, the direction of imports, what a saved graph's key and the wheel cover; how
much there is to read."""

from __future__ import annotations

import ast
import graphlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from comfy_accel.accel.store import key
from kit.engine_imports import ENGINE, closure, files, imported

from dev import ROOT

MAY_IMPORT = {
    "core": (),
    "signature": ("core",),
    "modules": ("core", "signature", "kernels"),
    "fingerprint": ("core", "signature", "modules"),
    "kernels": ("core", "signature"),
    "compile": ("core", "signature", "modules", "fingerprint", "kernels"),
    "cache": ("core", "signature", "modules", "fingerprint", "compile"),
    "store": ("core", "signature", "modules", "fingerprint", "compile", "cache"),
    "beside": ("core", "signature", "kernels", "compile"),
    "dispatch": ("core", "signature", "modules", "fingerprint", "compile", "cache", "beside"),
    "step_cache": ("core",),
    "cuda_graphs": ("core", "signature", "modules", "fingerprint", "compile", "cache", "dispatch"),
    "report": ("core", "compile", "cache", "step_cache"),
    "sizing": ("core",),
}
"""A package → those it may import, type-only imports included. `hosts` and the files at the top may import any."""

MOST_FILES = 12
"""In a package: more than a newcomer reads through in search of one."""

HOSTS_NAMES = re.compile(r"comfy(?![-_]accel)|diffusers", re.IGNORECASE)


HOSTS_FILES = re.compile(r"gguf|safetensors|\bckpt\b|\.sft\b|IQ4_|Q4_K", re.IGNORECASE)


BUDGETS = json.loads((Path(__file__).parent / "budgets.json").read_text(encoding="utf-8"))
"""Lines of Python (of JavaScript in `web`) a folder with all below it, and words a page or folder of pages.

They only fall: what is added somewhere is taken away elsewhere, in the same commit.
"""


def package_of(file: Path) -> str:
    return file.relative_to(ENGINE).parts[0]


def test_all_code_that_decides_what_is_in_a_saved_graph_is_in_its_key():
    decides = closure(file for name in ("compile", "fingerprint", "dispatch") for file in files(ENGINE / name))
    covered = {ENGINE / Path(file).parent.name / Path(file).name for file in key.engine_files()}
    assert {file.parent for file in decides} == {file.parent for file in covered}
    assert set(decides) - covered == {ENGINE / "core" / "sentences.py"}  # words, which decide nothing


def test_packages_import_in_one_direction():
    assert {package_of(file) for file in files() if file.parent != ENGINE} == {*MAY_IMPORT, "hosts"}
    wrong = {
        (file.relative_to(ENGINE).as_posix(), other.relative_to(ENGINE).as_posix())
        for file in files()
        for other in imported(file)
        if package_of(file) in MAY_IMPORT and package_of(other) not in (package_of(file), *MAY_IMPORT[package_of(file)])
    }
    assert not wrong


def test_no_file_imports_itself_by_way_of_others():
    graph = {file: imported(file) for file in files()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(file.relative_to(ENGINE).as_posix() for file in error.args[1]))


def test_a_package_is_small_enough_to_be_read_through():
    folders = {file.parent for file in files()}
    counts = {folder: len([f for f in folder.glob("*.py") if f.name != "__init__.py"]) for folder in folders}
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}
    assert counts[ENGINE] <= 3


def test_only_hosts_know_the_programs_around_the_engine_and_their_files():
    """Names of public artefacts (`comfy_accel`, the distribution) are not meant."""
    named = [
        f"{file.relative_to(ENGINE)}:{number}: {line}"
        for file in files()
        if package_of(file) in MAY_IMPORT
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if HOSTS_NAMES.search(line) or HOSTS_FILES.search(line)
    ]
    assert named == []


def test_wheel_lists_every_package_of_the_engine():
    text = (ENGINE.parent / "pyproject.toml").read_text(encoding="utf-8")
    listed = ast.literal_eval(re.search(r"^packages = (\[.*?^\])", text, re.DOTALL | re.MULTILINE)[1])
    folders = {file.parent.relative_to(ENGINE) for file in files()}
    assert listed == [*sorted(".".join(("comfy_accel", *folder.parts)) for folder in folders), "comfy_accel_fleet"]


def test_nothing_that_a_user_of_comfyui_downloads_needs_the_fleet():
    root = ENGINE.parent
    code = [*files(), *(root / "nodes").glob("*.py"), root / "__init__.py", root / "prestartup_script.py"]
    assert [
        file for file in code if re.search(r"^\s*(from|import) .*fleet", file.read_text("utf-8"), re.MULTILINE)
    ] == []
    assert "fleet/" in (root / ".comfyignore").read_text(encoding="utf-8").split()


def lines(folder: str) -> int:
    ends = (".js",) if folder == "web" else (".py",)
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in _files(folder, ends))


def words(page: str) -> int:
    """Of a page, or of all pages in a folder: what has a letter or a digit, so rules and pipes of tables are none."""
    files = [ROOT / page] if page.endswith(".md") else _files(page, (".md",))
    return sum(any(map(str.isalnum, word)) for file in files for word in file.read_text(encoding="utf-8").split())


def _files(folder: str, ends: tuple[str, ...]) -> Iterable[Path]:
    return (file for file in (ROOT / folder).rglob("*") if file.suffix in ends and "__pycache__" not in file.parts)


@pytest.mark.parametrize("unit, name", [(unit, name) for unit, budget in BUDGETS.items() for name in budget])
def test_nothing_grows_without_a_decision(unit: str, name: str):
    count: Callable[[str], int] = {"lines": lines, "words": words}[unit]
    found, budget = count(name), BUDGETS[unit][name]
    assert found <= budget, f"{name} has {found} {unit}, {found - budget} too many: take out what they replace"


PREPOSITIONS = frozenset(
    "about after against among apart around as at before beside beyond by during for from in inside into like minus no "
    "not of off on only out outside over per plus since through to unlike until up via with within without".split()
)
PARTICIPLE = re.compile(
    r"\w\w+(ed|ing)|begun|bound|built|chosen|given|grown|held|kept|known|laid|left|made|seen|shown|told|written"
)


def test_functions_are_named_by_verbs():
    """At most one in twenty begins with a participle or a preposition; in diffusers' hooks it is one in thirty."""
    first = [
        node.name.strip("_").split("_")[0]
        for file in files()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")
    ]
    odd = sorted(word for word in first if word in PREPOSITIONS or PARTICIPLE.fullmatch(word))
    assert len(odd) <= len(first) / 20, odd

"""How much there is to read: lines of code a package, words a page. Growth is a decision, which a commit explains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dev import ROOT

BUDGETS = json.loads((Path(__file__).parent / "budgets.json").read_text(encoding="utf-8"))
"""Lines of Python (of JavaScript in `web`) a folder with all below it, and words a page.

To raise one, say in a commit of its own what the lines or words buy.
"""

SLACK = 0.03
"""A budget that is larger than what there is by more than this share is to be lowered."""


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
    assert found <= budget, f"{name} has {found} {unit}, {found - budget} too many: shorten it, or raise the budget"
    lower = round(found * (1 + SLACK / 3))
    assert found >= budget * (1 - SLACK), f"{name} has {found} {unit} of {budget}: lower its budget to {lower}"


def test_every_package_and_page_has_a_budget():
    packages = {f"accel/{folder.name}" for folder in (ROOT / "accel").iterdir() if (folder / "__init__.py").is_file()}
    tests = {f"tests/{folder.name}" for folder in (ROOT / "tests").iterdir() if any(folder.glob("*.py"))}
    assert {"accel", "nodes", "fleet", "dev", "web", "tests", *packages, *tests} <= BUDGETS["lines"].keys()
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "fleet/README.md", "docs", *pages} <= BUDGETS[
        "words"
    ].keys()

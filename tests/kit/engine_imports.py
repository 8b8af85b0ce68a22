"""The engine's import graph, read from its source: which file imports which, with or without type-only imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "accel"


def files(folder: Path = ENGINE) -> list[Path]:
    """Every Python file of the engine."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported(file: Path, type_only: bool = True) -> set[Path]:
    """The engine's files that `file` imports. type_only: those imported under TYPE_CHECKING too."""
    return set(_imports(ast.parse(file.read_text(encoding="utf-8")), file, type_only))


def closure(roots: Iterable[Path]) -> set[Path]:
    """The roots and all that importing them runs: no type-only imports."""
    seen: set[Path] = set()
    waiting = list(roots)
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += imported(file, type_only=False)
    return seen


def _imports(node: ast.AST, file: Path, type_only: bool) -> Iterator[Path]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        if not type_only:
            return
    if isinstance(node, ast.ImportFrom) and node.level:
        folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        candidates = [folder.with_suffix(".py"), *(folder / f"{name.name}.py" for name in node.names)]
        yield from filter(Path.is_file, candidates)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, file, type_only)

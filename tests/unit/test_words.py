"""Nothing that a user reads has a word that docs/glossary.md refuses."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/lab/*.md",
    "fleet/README.md",
    "web/docs/**/en.md",
    "example_workflows/*.json",
]
CODE = [
    "nodes/*.py",
    "accel/core/sentences.py",
    "accel/hosts/comfyui/words.py",
    "accel/report/*.py",
    "accel/hosts/comfyui/server/*.py",
]


def refused() -> dict[str, str]:
    """Pattern → what to write."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", page.partition("## The words we don't")[2], re.MULTILINE)
    return {pattern.replace(r"\|", "|"): instead for pattern, instead in rows}


def prose(text: str) -> str:
    """Without code, which may have to be named as it is."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^ *```.*?^ *```", "", text))


def strings(text: str) -> Iterator[str]:
    """The sentences in Python code, docstrings left out."""
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            if _is_sentence(node.value):
                yield node.value


def _is_sentence(text: str) -> bool:
    """Whether it is more than a name or the value of an input, which stay as they are."""
    return len(text.split()) > 2


def leaves(texts) -> Iterator[str]:
    if isinstance(texts, str):
        yield texts
    else:
        for value in texts.values() if isinstance(texts, dict) else texts if isinstance(texts, list) else ():
            yield from leaves(value)


def read() -> Iterator[tuple[Path, str]]:
    """Every file that has texts for users, with its texts."""
    for path in (path for pattern in PAGES for path in sorted(ROOT.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            yield path, "\n".join(filter(_is_sentence, leaves(json.loads(text))))
        elif path.name not in {"glossary.md", "zh.md"}:
            yield path, prose(text)
    for path in sorted(ROOT.glob("locales/en/*.json")):
        yield path, "\n".join(filter(_is_sentence, leaves(json.loads(path.read_text(encoding="utf-8")))))
    for path in (path for pattern in CODE for path in sorted(ROOT.glob(pattern))):
        yield path, "\n".join(strings(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def texts():
    return list(read())


def test_what_users_read_has_no_refused_word(texts):
    assert len(texts) > 40
    patterns = refused()
    assert len(patterns) >= 10
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}: write {instead}"
        for path, text in texts
        for pattern, instead in patterns.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert found == []

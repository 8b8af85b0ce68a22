"""Links of the pages lead somewhere, and the files that these name are there."""

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from dev import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "fleet/README.md", *(f"docs/{page}" for page in ("*.md", "lab/*.md"))]
FILES = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_named_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = unquote(link).partition("#")
        if re.match(r"https?:|\.\./\.\./issues", target):  # the issues are GitHub's
            continue
        file = page.parent / target if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link
    for name in re.findall(r"(?:tests/\w+/)?\btest_\w+\.py\b", text):
        assert any(f"/{path}".endswith(f"/{name}") for path in TRACKED), name
    # In backticks: of the repository, or of the engine where they begin with one of its packages.
    if page.name in ("architecture.md", "CONTRIBUTING.md", "captured-calls.md"):
        paths = re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|md|json|js))", text)
        assert [path for path in paths if not ((ROOT / path).is_file() or (ROOT / "accel" / path).is_file())] == []

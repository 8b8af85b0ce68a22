"""What developers run, by `dev.py` beside this folder, and what the tests need of it; users get nothing of it.

This file is standard library only: dev.py reads it before there is an environment.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The pack."""

WORK = ROOT / ".work"
"""Everything that is made here and may be deleted: base directories, checkpoints, images."""

PYTEST = "import sys; sys.path[:] = filter(None, sys.path); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""Python code: pytest as its own console script would start it. `-m pytest` puts the current folder first on the path,
where this pack's `nodes` would hide ComfyUI's."""


class Problem(Exception):
    """Something that the person at the keyboard can mend; its text is one sentence that says how."""

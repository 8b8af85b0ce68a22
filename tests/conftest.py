"""Makes the pack importable as `comfy_accel`, the way ComfyUI loads it, and `bench` beside it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# At the end, so that `nodes` still means ComfyUI's nodes.py.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import pack  # noqa: E402

pack.load()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Keep a file's tests in one worker, where they share models and graphs; all of the browser's share servers."""
    for item in items:
        name = "browser" if item.path.parent.name == "browser" else item.path.stem
        item.add_marker(pytest.mark.xdist_group(name))

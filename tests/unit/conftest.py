"""What tests share is beside their folders."""

import sys
from pathlib import Path

import pytest
from comfy_accel.accel.store import location, signing

sys.path.append(str(Path(__file__).resolve().parent.parent))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable of the machine's moves or signs the store."""
    for name in (signing.KEY_VARIABLE, location.VARIABLE, location.LIMIT_VARIABLE):
        monkeypatch.delenv(name, raising=False)

"""What tests share is beside their folders."""

import sys
from pathlib import Path

import pytest
from comfy_accel.accel import store_location, store_trust

sys.path.append(str(Path(__file__).resolve().parent.parent))


@pytest.fixture
def plain_environment(monkeypatch):
    """No variable of the machine's moves or signs the store."""
    for name in (store_trust.KEY_VARIABLE, store_location.VARIABLE, store_location.LIMIT_VARIABLE):
        monkeypatch.delenv(name, raising=False)

"""What tests share is beside their folders."""

import pytest
from comfy_accel.accel.store import location, signing


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable of the machine's moves or signs the store."""
    for name in (signing.KEY_VARIABLE, location.VARIABLE, location.LIMIT_VARIABLE):
        monkeypatch.delenv(name, raising=False)

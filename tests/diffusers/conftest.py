"""Pipelines of diffusers, built here from configurations: nothing is fetched, and no graph is kept on this disk."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent))


@pytest.fixture(autouse=True)
def no_store(monkeypatch):
    monkeypatch.setenv("ACCEL_STORE", "off")

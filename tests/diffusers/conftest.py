"""Pipelines of diffusers, built here from configurations: nothing is fetched, and no graph is kept on this disk."""

import pytest


@pytest.fixture(autouse=True)
def no_store(monkeypatch):
    monkeypatch.setenv("ACCEL_STORE", "off")

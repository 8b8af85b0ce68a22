"""What tests share is beside their folders."""

import pytest
from comfy_accel.accel.store import location


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable of the machine's moves the store."""
    for name in (location.VARIABLE, location.LIMIT_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(monkeypatch):
    """The cache of `accelerate_module`, for one test alone and without a store."""
    from comfy_accel.accel.cache.graph_cache import GraphCache
    from comfy_accel.accel.hosts.diffusers import pipeline, runs

    own = GraphCache()
    monkeypatch.setattr(runs, "shared", own)
    monkeypatch.setattr(pipeline, "attach", lambda *_: None)
    return own

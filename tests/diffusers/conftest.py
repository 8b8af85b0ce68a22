"""Pipelines of diffusers, built here from configurations: nothing is fetched, and no graph is kept on this disk."""

import pytest

try:
    import accelerate  # noqa: F401
    import diffusers.schedulers  # noqa: F401
    import peft  # noqa: F401
except ImportError as error:
    collect_ignore_glob, missing = ["test_*.py"], error
else:
    missing = None


def pytest_report_header():
    return missing and f"tests/diffusers is left out ({missing}): tests/requirements.txt has what it needs"


@pytest.fixture(autouse=True)
def no_store(monkeypatch):
    monkeypatch.setenv("ACCEL_STORE", "off")

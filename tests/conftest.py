"""Makes the pack importable as `comfy_accel`, the way ComfyUI loads it, and `bench` beside it."""

import gc
import os
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# At the end, so that `nodes` still means ComfyUI's nodes.py; `python -m pytest` puts it first. `tests` for its `kit`.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT] + [str(ROOT), str(ROOT / "tests")]

# Before torch is imported. Threads that wait by spinning make small tensors minutes slower where another program shares
# the cores; and each process that compiles would build half a dozen programs to find out what the processor can do.
# Tests count what an image compiles, so they wait for code on machines of many cores too. And all of a run's processes
# have one day, which chooses members of sweeps (kit/thorough.py): name an earlier one to have its members again.
for variable, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "ACCEL_COMPILE_BESIDE": "0",
    "ACCEL_TEST_DAY": str(date.today().toordinal()),
}.items():
    os.environ.setdefault(variable, value)

from dev.tools import pack  # noqa: E402

pack.load()

TOGETHER = ("tests/browser/",), ("/test_routes.py", "/test_server.py", "/test_texts.py")
"""Parts of the paths of files whose tests share a server."""

APART = "tests/unit/test_made_up_device.py"
"""A file whose tests are processes of minutes each, and share nothing: they are begun first, by whoever is free."""


def pytest_addoption(parser):
    parser.addoption("--write-models", action="store_true", help="write docs/models.json and its page anew")


@pytest.fixture(autouse=True)
def own_counts():
    """Each test begins with no reason for running uncompiled, and with torch's counts at zero."""
    counted = {
        f"{pack.NAME}.accel.core.fallbacks": "fallbacks",
        "torch._dynamo.utils": "counters",
        "kit.compiled": "told",
    }
    for module, counts in counted.items():
        if module in sys.modules:  # what nobody has imported has counted nothing
            getattr(sys.modules[module], counts).clear()


@pytest.fixture(scope="module", autouse=True)
def own_garbage():
    """Collections see what the file makes alone: with all that is imported or left by others, each takes seconds."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    return (yield from skip_without_links())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from skip_without_links())


def skip_without_links():
    """Windows lets few accounts make symbolic links."""
    try:
        return (yield)
    except OSError as error:
        if getattr(error, "winerror", None) != 1314:  # ERROR_PRIVILEGE_NOT_HELD
            raise
        pytest.skip("this account may make no symbolic links")


def pytest_collection_modifyitems(items):
    """Two processes end at about the same time where the longest work is begun first."""
    items.sort(key=lambda item: not item.nodeid.startswith(APART))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep a file's tests in one worker, where they share models and graphs; all of the browser's share servers.

    Without xdist's own marks of groups, which pytest 9.2 passes over in silence.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]
            return next((names for names in TOGETHER if any(name in path for name in names)), path)

    return ByFile(config, log)


@pytest.fixture
def counts():
    """Full and skipped steps of each run of DeepCache that ends from now on."""
    from comfy_accel.accel.core.events import subscribe

    def hear(name, data):
        if name == "deep_cache_run":
            found.append((data["skipping"].full_steps, data["skipping"].skipped_steps))

    found, stop = [], subscribe(hear)
    yield found
    stop()


@pytest.fixture
def hide(monkeypatch):
    """From names of `torch_internals` to a torch without them."""

    def hide(*names):
        from comfy_accel.accel.core.torch_internals import _ABSENT, Internal

        find = Internal._find
        monkeypatch.setattr(Internal, "_find", lambda name: _ABSENT if name in names else find(name))

    return hide

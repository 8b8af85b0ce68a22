"""Where ComfyUI's store is, what it costs those who do not use it, and that it serves a real sampler."""

import ctypes
import json
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import comfy.model_management
import folder_paths
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.preferences import find_running_home
from comfy_accel.accel.hosts.comfyui.tracing import NO_RESULT_DEPENDS_ON
from comfy_accel.accel.store import location
from kit import tiny_models
from kit.asked_keys import asked_keys
from kit.zoo import ZOO

IMPORT_LIMIT, IMPORT_SHARE = 0.15, 0.04
"""Seconds of processor time beyond what ComfyUI imports anyway; on a machine on which that takes more than 4 s, this
share of it."""

NEWCOMER = """
import json, os, sys, time
root, user = sys.argv[1:]
begun = time.process_time()
sys.path += [root, root + "/tests"]
from dev.tools.inprocess import boot
boot(cpu=True)
import nodes, comfy.sd, comfy.samplers, comfy_api.latest, folder_paths
comfyui = time.process_time() - begun

written, touched = [], []

def note(path):
    try:
        text = os.fsdecode(path)
    except TypeError:  # a descriptor
        return
    if os.path.abspath(text).startswith(user):
        touched.append(text)

def hear(event, arguments):
    opened = event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & 3
    if opened or event in ("os.mkdir", "os.rename", "os.link"):
        written.append(os.fsdecode(arguments[0]))
    if event in ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.listdir", "os.scandir", "os.utime"):
        note(arguments[0])

def noting(function):
    def call(path, *arguments, **options):
        note(path)
        return function(path, *arguments, **options)
    return call

def load():
    from dev.tools import pack
    pack.load()
    from comfy_accel import nodes

def seconds():
    started = time.process_time()
    load()
    return time.process_time() - started

def seconds_of_a_fork():
    listen, tell = os.pipe()
    if not os.fork():
        try:
            os.write(tell, json.dumps(seconds()).encode())
        finally:
            os._exit(0)  # never back into what it was forked from
    os.close(tell)
    os.wait()
    return json.loads(os.read(listen, 1000))

# The first may have to write bytecode, and another process on the same core takes half of it.
tries = [seconds_of_a_fork() for _ in range(6)] if hasattr(os, "fork") else []

def phase(run):
    touched.clear()
    run()
    return list(touched)

def import_routes():
    import comfy_accel.accel.hosts.comfyui.server.routes

def make_node():
    from comfy_accel.nodes.accelerate_model import AccelModel
    global accelerated
    accelerated = AccelModel.execute(model, shapes="any size", backend="inductor", on_trouble="run eagerly").args[0]

def image():
    from comfy_accel.accel.cache.graph_cache import NoGraph
    from comfy_accel.accel.core.reasons import Reason
    from comfy_accel.accel.store.graph_store import GraphStore

    look = GraphStore.candidates

    def only_look(self, key, *arguments):
        list(look(self, key, *arguments))
        raise NoGraph(key, Reason("interrupted"))  # what comes next is compiling, which is not what is asked here

    GraphStore.candidates = only_look
    tiny_models.sample(accelerated, 64, 64, steps=1)

folder_paths.set_user_directory(user)
from kit import tiny_models
model = tiny_models.res_blocks()
for name in ("stat", "lstat", "access", "readlink"):  # of these Python tells nobody
    setattr(os, name, noting(getattr(os, name)))
sys.addaudithook(hear)
written.clear()
phases = {"load": phase(load)}
written_by_loading = [name for name in written if "pycache" not in name]
if not tries:
    tries = [seconds()]
phases.update((run.__name__, phase(run)) for run in (import_routes, make_node, image))
from kit import asked_keys
answer = {"seconds": tries, "comfyui": comfyui, "written": written_by_loading, "touched": phases}
print(json.dumps({**answer, "keys": asked_keys.asked_keys()}))
"""


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """What a new process tells, with a user folder of its own, as it begins to use the pack.

    touched: phase → the paths under ComfyUI's user folder that it asked for, reading and mere looks included.
    """
    root = str(Path(__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_STORE")}
    environment["PYTHONHASHSEED"] = "1"  # the order of sets differs from this process's
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each try would parse all of the pack, as no user's does
    command = [sys.executable, "-c", NEWCOMER, root, str(tmp_path_factory.mktemp("user"))]
    out = subprocess.check_output(command, cwd=os.sep, env=environment, text=True)
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The process' own cache with a store under a user folder of the test's own."""
    monkeypatch.delenv(location.VARIABLE, raising=False)
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(shared, "store", None)
    return tmp_path / "user" / "__accel"


def test_importing_the_pack_is_quick_and_writes_nothing(newcomer):
    assert newcomer["written"] == []
    share = max(1.0, newcomer["comfyui"] * IMPORT_SHARE / IMPORT_LIMIT)
    assert min(newcomer["seconds"]) / share < IMPORT_LIMIT


def test_nothing_in_the_users_folder_is_asked_for_before_the_first_image(newcomer):
    touched = newcomer["touched"]
    assert touched["load"] == touched["import_routes"] == touched["make_node"] == []
    assert any("__accel" in path for path in touched["image"])


def test_names_of_saved_graphs_are_the_same_in_every_process_and_at_every_size(newcomer):
    keys = asked_keys()
    assert keys == newcomer["keys"]
    for small, large in keys:
        assert small == large
        assert len(small) > 1 and not any("None" in name for name in small)


def test_node_alone_touches_no_disk(home):
    accelerate(tiny_models.unet(), CompileSettings(backend="eager"))
    assert shared.store is not None
    assert not home.parent.exists()


def test_users_folder_is_one_that_no_request_reaches(home):
    assert find_running_home() == home
    public = getattr(folder_paths, "get_public_user_directory", None)
    if public is None:
        pytest.skip("this ComfyUI keeps no users' folders from requests (get_public_user_directory)")
    assert public(home.name) is None


def kinds_of_core():
    return {
        name: {kind.digest: kind.opaque for kind in survey(specimen.build(), 1, NO_RESULT_DEPENDS_ON).kinds}
        for name, specimen in ZOO.items()
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the library that is loaded here has this name there alone")
def test_kinds_are_the_same_on_machines_with_other_memory_and_while_core_uses_it(monkeypatch):
    def on_a_gpu(pinned, library, **used):
        management = {"MAX_PINNED_MEMORY": pinned, "TOTAL_PINNED_MEMORY": pinned // 2, **used}
        for name, value in management.items():
            monkeypatch.setattr(comfy.model_management, name, value, raising=False)
        if "comfy.memory_management" in sys.modules:  # what core sets for the time of a prompt
            cache = types.SimpleNamespace(ram=pinned) if used else None
            release = types.MethodType(lambda self, target, free_active=False: self.ram, cache) if used else None
            memory = sys.modules["comfy.memory_management"]
            monkeypatch.setattr(memory, "RAM_CACHE_HEADROOM", pinned // 3, raising=False)
            monkeypatch.setattr(memory, "extra_ram_release_callback", release, raising=False)
        for name in [name for name in sys.modules if name.startswith("comfy_aimdo.")]:
            if hasattr(sys.modules[name], "lib"):
                monkeypatch.setattr(sys.modules[name], "lib", ctypes.CDLL(library))
        return kinds_of_core()

    largest = weakref.ref(torch.nn.Linear(1, 1)), 5
    fresh = on_a_gpu(12345678901, None)
    assert on_a_gpu(98765432109, "libm.so.6", LARGEST_CASTED_WEIGHT=largest, STREAMS={0: [object()]}) == fresh
    assert not any(opaque for kinds in fresh.values() for opaque in kinds.values())

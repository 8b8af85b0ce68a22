"""Who does not use the pack pays nothing for its store: not even a look at its folder, before the first prompt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PHASES = """
import json, os, sys
root, user = sys.argv[1:]
sys.path += [root, root + "/tests"]
from bench.inprocess import boot
boot(cpu=True)
import nodes, comfy.sd, comfy.samplers, comfy_api.latest, folder_paths
folder_paths.set_user_directory(user)
import tiny_models
model = tiny_models.small_unet()

touched = []

def note(path):
    try:
        text = os.fsdecode(path)
    except TypeError:  # a descriptor
        return
    if os.path.abspath(text).startswith(user):
        touched.append(text)

def hear(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.listdir", "os.scandir", "os.utime"):
        note(arguments[0])

def noting(function):
    def call(path, *arguments, **options):
        note(path)
        return function(path, *arguments, **options)
    return call

for name in ("stat", "lstat", "access", "readlink"):  # of these Python tells nobody
    setattr(os, name, noting(getattr(os, name)))
sys.addaudithook(hear)

def phase(run):
    touched.clear()
    run()
    return list(touched)

def load():
    from bench import pack
    pack.load()
    import comfy_accel.nodes
    import comfy_accel.accel.hosts.comfyui.server.routes

def make_node():
    from comfy_accel.nodes.accelerate_model import AccelModel
    load.model = AccelModel.execute(model, "any size", "inductor", "run eagerly").args[0]

def image():
    tiny_models.sample(load.model, 64, 64, steps=1)

print(json.dumps({run.__name__: phase(run) for run in (load, make_node, image)}))
"""


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    """Phase → the paths under ComfyUI's user folder that it asked for, reading and mere looks included."""
    root = str(Path(__file__).resolve().parents[2])
    user = str(tmp_path_factory.mktemp("user"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_STORE")}
    environment["CXX"] = "no-such-compiler"  # every kind fails at its compiling, which is not what is asked here
    out = subprocess.check_output([sys.executable, "-c", PHASES, root, user], cwd=os.sep, env=environment, text=True)
    return json.loads(out.splitlines()[-1])


def test_importing_the_pack_asks_for_nothing_in_the_users_folder(touched):
    assert touched["load"] == []


def test_node_asks_for_nothing_in_the_users_folder(touched):
    assert touched["make_node"] == []


def test_first_accelerated_image_looks_into_the_store(touched):
    assert any("__accel" in path for path in touched["image"])

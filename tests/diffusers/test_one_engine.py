"""A process with ComfyUI's node pack and the installed package in it has one engine: one cache, one budget."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers.schedulers", reason="needs the package diffusers: tests/requirements.txt")

ROOT = Path(__file__).resolve().parents[2]

PROCESS = """
import json, logging, sys
root, base, packs = sys.argv[1:]
sys.path.append(root)
from bench.inprocess import boot
boot(cpu=True)
sys.path[:0] = [packs]  # where the package is installed
said = []
class Hear(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("accel").addHandler(Hear())

import accel
from accel import DeepCacheSettings, accelerate_pipeline, restore
names = [name for name in sys.modules if name.startswith("accel.")]
told = {"file": accel.__file__, "imported": sorted(names)[:1]}

import folder_paths
folder_paths.set_user_directory(base)
from bench import pack
pack.load()  # as ComfyUI does, under a name of its own
from comfy_accel import nodes
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.cache.graph_cache import shared as comfys
from accel.cache.graph_cache import shared as own

sys.path.append(root + "/tests")
import pipeline_zoo as zoo
pipe = zoo.pipeline("StableDiffusionPipeline")
def image():
    return pipe(**zoo.prompt(pipe), width=32, height=32, num_inference_steps=2, output_type="latent")
comfys.set_budget(max_entries=0)  # so that nothing is compiled here, and the cache that was asked says so
assert accelerate_pipeline(pipe, backend="eager", deep_cache=DeepCacheSettings(interval=2)) is pipe
image()
told["refused"] = [row["reason"] for row in fallbacks.rows()]
told["store"] = str(comfys.store and comfys.store._folder)
restore(pipe)
told["left"] = [name for name in ("_compiled_call_impl", "forward") if name in vars(pipe.unet)]

accel.__version__ = "another"
own.set_budget(max_entries=0)
fallbacks.clear()
for _ in range(2):
    accelerate_pipeline(pipe, backend="eager")
    image()
    restore(pipe)
told["theirs"] = len(fallbacks.rows())
from accel.core.fallbacks import fallbacks
told["ours"] = len(fallbacks.rows()) > 0
told["said"] = [line for line in said if "version" in line]
print(json.dumps(told))
"""


def test_scripts_use_the_engine_that_comfyui_has_loaded_where_it_is_of_their_version(tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "accel").symlink_to(ROOT / "accel")
    monkeypatch.delenv("ACCEL_STORE")
    arguments = [ROOT, tmp_path / "user", installed]
    out = subprocess.run(
        [sys.executable, "-c", PROCESS, *map(str, arguments)], capture_output=True, text=True, timeout=500
    )
    assert out.returncode == 0, out.stderr[-3000:]
    told = json.loads(out.stdout.splitlines()[-1])
    assert told["file"] == str(installed / "accel" / "__init__.py")
    assert told["refused"] and all("may hold 0 kinds" in reason for reason in told["refused"])
    assert told["store"].startswith(str(tmp_path / "user"))
    assert told["left"] == []
    assert told["ours"] and told["theirs"] == 0
    assert told["said"] == [
        "ComfyUI has loaded version 0.1.0 of Accel and this is another: each has a graph cache of its own."
    ]


def test_version_is_that_of_the_package():
    import comfy_accel.accel

    (version,) = re.findall('^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert comfy_accel.accel.__version__ == version

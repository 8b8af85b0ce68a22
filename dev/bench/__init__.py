"""Measurements over a real ComfyUI with this pack, run by `dev.py` in the environment that it makes.

This file is standard library only: dev.py reads it before there is an environment.
"""

import sys

from dev import ROOT

BENCHES = {
    "demo": "plain and accelerated side by side at four sizes, one of them odd, in one process",
    "session": "what a session of sizes, batches, prompts, LoRAs, a ControlNet compiles and when, beside core's node",
    "deepcache": "what skipping costs in quality, on four trained networks: targets, other caches, fewer steps",
    "quality": "on a checkpoint of yours (--model FILE), how close each quality comes, with a sheet",
    "restart": "the first image of a new process: saved graphs, torch's own cache, neither, core's node, eager",
    "gpu": "on a GPU, every contender at every size: steps a second, first images, kernels, memory",
    "kernels": "GPU code of each kind of block, counted in instructions: ours, for one size, core's; needs no card",
    "overhead": "our own microseconds a block and a call, part by part; --images: of an image, beside others",
    "diffusers": "a diffusers script's session: plain, compile_repeated_blocks, torch.compile of the whole model, ours",
    "fleet": "real ComfyUIs under a real Ray: a replica killed, cold starts, a shutdown",
}
"""What `dev.py bench NAME` runs: module of this package → what it measures."""

WITH_DIFFUSERS = ("diffusers",)
"""Those of them that need what the tests are run with (tests/requirements.txt) too."""

WITH_RAY = ("fleet",)
"""Those that need Ray too (requirements-ray.txt)."""

sys.path.append(str(ROOT / "tests"))  # for its `kit`, after everything else

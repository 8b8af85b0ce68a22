"""Diffusion model classes of core, made tiny: what of each is compiled, and that it stays right and compiled.

Compiled calls equal eager ones at four sizes, and after the first nothing is compiled, but for blocks with an input
that has no row for each image: in a batch of 1 it looks as if it had, so they are compiled once more. The backend
"eager" captures the same graphs as inductor does and runs them as they are.
"""

import uuid

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint import module_files
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.substitution import Order, substitute
from kit.compiled import graphs
from kit.zoo import ZOO, Noise, Size
from torch._dynamo.utils import counters

LATER = [
    Size(height=10, width=15, frames=2, batch=4, tokens=40),
    Size(height=12, width=22, frames=5, batch=3, tokens=31),
    Size(height=20, width=18, frames=4, batch=1, tokens=24),
]
"""After a square first image of batch 1: other sizes, odd ones, and a batch of 1 after larger ones."""

TOLERANCE = 1e-5  # of the largest value: a copy made contiguous is summed in another order

cache = GraphCache()
"""One for the file, as in a process: models of one architecture share its graphs."""


# The others are of a class that one of these has too, with other options; or are made of what these are: Chroma and
# HunyuanVideo of Flux's blocks, AuraFlow and Mochi of SD3's last one that gives no text, HunyuanDiT of PixArt's blocks
# and a UNet's skips, OmniGen2 of Z-Image's, Cosmos predict2 of Wan's, HiDream of experts as Hunyuan3D 2.1 is. Stable
# Cascade, Stable Audio, ACE-Step, SVD and Wan VACE have blocks of their own, which only a newer core would change.
# test_models.py has all of them as core samples them, test_accelerate.py a UNet.
QUICK = "Flux", "SD3", "PixArt Sigma", "Z-Image", "Qwen-Image", "Wan t2v", "LTXV", "Hunyuan3D 2.1"


def options(size: Size, step: int) -> dict:
    """Core's per-call dict at one step; no two are equal."""
    sigmas = torch.linspace(1, 0, 6)
    return {
        "sigmas": sigmas[step : step + 1].repeat(size.batch),
        "sample_sigmas": sigmas,
        "cond_or_uncond": [0, 1][: size.batch],
        "uuids": [uuid.uuid4()],
        "patches": {},
        "patches_replace": {},
        "wrappers": {},
        "callbacks": {},
    }


def call(model: torch.nn.Module, name: str, size: Size, step: int) -> torch.Tensor:
    latent, given = ZOO[name].inputs(size, Noise(step))
    timestep = torch.full((latent.shape[0],), 0.7 - 0.1 * step)
    with torch.inference_mode():
        return model(
            latent,
            timestep,
            context=given.pop("context", None),
            control=None,
            transformer_options=options(size, step),
            **given,
        )


@pytest.mark.parametrize("name", ZOO)
def test_all_blocks_of_a_model_are_found_and_can_be_saved(name):
    specimen = ZOO[name]
    found = survey(specimen.build())
    assert (len(found.regions), len(found.kinds)) == (specimen.blocks, specimen.kinds), found.left_eager
    for kind in found.kinds:
        assert kind.opaque == frozenset() and module_files.digest(kind.sources - {""})


@pytest.mark.parametrize("name", QUICK)
def test_model_is_compiled_once_and_equals_eager_at_every_size(name):
    torch._dynamo.reset()
    sizes = [Size(), *LATER]
    specimen = ZOO[name]
    model = specimen.build()
    expected = [call(model, name, size, step) for step, size in enumerate(sizes)]
    assert all(out.isfinite().all() for out in expected)
    layers = block_layers(model, CompileSettings(backend="eager"), cache)
    hits = cache.statistics()["hits"]
    compiled = []
    with substitute(layers, Order.COMPILED):
        for step, size in enumerate(sizes):
            out = call(model, name, size, step)
            compiled.append(graphs())
            assert (out - expected[step]).abs().max() <= TOLERANCE * expected[step].abs().max(), size
    assert len(set(compiled[1:])) == 1 and compiled[1] - compiled[0] == specimen.later, compiled
    assert not counters["graph_break"]
    assert fallbacks.rows() == []
    assert cache.statistics()["hits"] > hits

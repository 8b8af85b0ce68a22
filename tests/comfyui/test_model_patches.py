"""ControlNets that come as model patches (Qwen-Image DiffSynth, Z-Image Fun) beside compiled blocks and DeepCache.

Core runs them between the blocks of the model, where they add to what a block returned; their networks are tiny
configurations of core's own classes, put on the model by core's own nodes.
"""

import dataclasses

import comfy.model_patcher
import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_extras import nodes_model_patch as core_nodes
from kit.controls import network, taesd, wan_vae
from kit.deep_cache import last_run
from kit.families import DITS
from kit.step_cache import uniform_hold
from kit.thorough import thorough_except
from torch._dynamo.utils import counters

Z_IMAGE = dataclasses.replace(
    DITS["Z-Image"],
    family=dataclasses.replace(
        DITS["Z-Image"].family, config={**DITS["Z-Image"].family.config, "n_layers": 7, "n_refiner_layers": 2}
    ),
    latents=((1, 16, 12, 12), (1, 16, 10, 16)),  # the patch takes no odd sizes
)
QWEN = dataclasses.replace(DITS["Qwen-Image"], latents=((1, 16, 1, 12, 12), (1, 16, 1, 10, 16)))


def z_image(mask=None, **config):
    if not hasattr(core_nodes, "ZImageFunControlnet"):
        pytest.skip("this ComfyUI has no ControlNet for Z-Image, or an earlier one")
    net = network(core_nodes.comfy.ldm.lumina.controlnet.ZImage_Control, dim=288, n_heads=3, n_kv_heads=3, **config)
    return Z_IMAGE, net, core_nodes.ZImageFunControlnet(), taesd(16), mask


def qwen(mask=None, **config):
    net = network(core_nodes.QwenImageBlockWiseControlNet, num_layers=6, dim=64, **config)
    return QWEN, net, core_nodes.QwenImageDiffsynthControlnet(), wan_vae(), mask


INPAINT = dict(additional_in_dim=17, refiner_control=True)
MASK = torch.zeros(1, 96, 96)
MASK[:, 20:70, 30:80] = 1
CASES = {
    "Qwen-Image": lambda: qwen(),
    "Qwen-Image inpaint": lambda: qwen(MASK, additional_in_dim=4),
    "Z-Image": lambda: z_image(),
    "Z-Image 2.0": lambda: z_image(n_control_layers=15, **INPAINT),
    "Z-Image 2.0, its first release": lambda: z_image(n_control_layers=15, broken=True, **INPAINT),
    "Z-Image 2.0 inpaint": lambda: z_image(MASK, n_control_layers=3, **INPAINT),
}
"""As core's loader configures them."""

SETTINGS = CompileSettings(backend="eager")


class Patched:
    """The model of a case, and what puts the ControlNet on it."""

    def __init__(self, name):
        self.dit, net, self._node, self._vae, self._mask = CASES[name]()
        cpu = torch.device("cpu")
        self._net = comfy.model_patcher.ModelPatcher(net, load_device=cpu, offload_device=cpu)
        self.model = self.dit.load()

    @torch.no_grad()
    def on(self, model):
        image = torch.rand(1, 96, 96, 3, generator=torch.Generator().manual_seed(4))
        return self._node.diffsynth_controlnet(model, self._net, self._vae, image, 0.8, mask=self._mask)[0]


@pytest.mark.parametrize("name", thorough_except(CASES, "Qwen-Image", "Z-Image 2.0"))
def test_control_net_between_blocks_leaves_them_compiled_at_every_size(name):
    case, cache, made = Patched(name), GraphCache(), []

    def accelerated(model):
        return accelerate(model, SETTINGS, cache)

    for given in ({}, {"size": 1}, {"size": 1, "batch": 2}):
        expected = case.dit.sample(case.on(case.model), steps=2, **given)
        assert expected.isfinite().all() and not torch.equal(case.dit.sample(case.model, steps=2, **given), expected)
        for fast in (accelerated(case.on(case.model)), case.on(accelerated(case.model))):
            assert torch.equal(case.dit.sample(fast, steps=2, **given), expected)
            made.append(counters["stats"]["unique_graphs"])
    assert made[0] > 0 and len(set(made)) == 1 and fallbacks.rows() == []
    # Without it, the same graphs.
    assert torch.equal(case.dit.sample(accelerated(case.model), steps=2), case.dit.sample(case.model, steps=2))
    assert counters["stats"]["unique_graphs"] == made[0]


@pytest.mark.parametrize("name", thorough_except(CASES, "Qwen-Image", "Z-Image 2.0"))
def test_control_net_between_blocks_goes_with_deep_cache(name):
    case = Patched(name)
    plain = case.dit.sample(case.on(case.model))
    assert torch.equal(case.dit.sample(apply_deep_cache(case.on(case.model), uniform_hold(1))), plain)
    deep = case.dit.sample(apply_deep_cache(case.on(case.model), uniform_hold(2)))
    assert last_run()["skipped_steps"] == 2 and deep.isfinite().all() and not torch.equal(deep, plain)
    uncontrolled = case.dit.sample(apply_deep_cache(case.model, uniform_hold(2)))
    assert not torch.equal(deep, uncontrolled)
    both = apply_deep_cache(accelerate(case.on(case.model), SETTINGS, GraphCache()), uniform_hold(2))
    assert torch.equal(case.dit.sample(both), deep) and last_run()["skipped_steps"] == 2
    assert torch.equal(case.dit.sample(case.on(apply_deep_cache(case.model, uniform_hold(2)))), deep)
    assert torch.equal(case.dit.sample(case.on(case.model)), plain)

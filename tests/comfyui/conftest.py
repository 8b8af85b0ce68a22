"""A real ComfyUI in this process, on the CPU, and tiny models of its own classes."""

import os

import pytest
from PIL import Image

from dev.tools import synthetic
from dev.tools.comfyui import make_base, offer_checkpoint
from dev.tools.inprocess import boot
from dev.tools.server import serving

boot(cpu=True)
os.environ["ACCEL_STORE"] = "off"  # no test finds what another left; those of the store say where it is

import comfy.model_management  # noqa: E402
import torch  # noqa: E402
from kit import tiny_models  # noqa: E402
from kit.captures import CpuCapturer, capturing_cache  # noqa: E402

SLOW_TO_VALIDATE = """
import asyncio, nodes

async def take_a_moment(cls, ckpt_name):
    await asyncio.sleep(0.2)
    return True

nodes.CheckpointLoaderSimple.VALIDATE_INPUTS = classmethod(take_a_moment)
NODE_CLASS_MAPPINGS = {}
"""
"""A pack as there are some: it asks something elsewhere before it lets a checkpoint pass, and the server goes on."""


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A ComfyUI with this pack, the synthetic checkpoint and a picture, for the files that tests/conftest.py groups."""
    base = make_base(tmp_path_factory.mktemp("server"))
    (base / "custom_nodes" / "slow_to_validate.py").write_text(SLOW_TO_VALIDATE, encoding="utf-8")
    Image.linear_gradient("L").convert("RGB").resize((96, 64)).save(base / "input" / "example.png")
    flags = ["--extra-model-paths-config", str(offer_checkpoint(base, synthetic.checkpoint()))]
    with serving(base, extra_flags=flags, environment={"ACCEL_STORE": ""}) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def no_model_of_the_file_is_left():
    """Errors that are parameters keep the frames of their calls, and so a model; core then collects garbage at each
    later call of a model, which takes a second or more."""
    yield
    comfy.model_management.unload_all_models()
    comfy.model_management.current_loaded_models.clear()


@pytest.fixture
def without_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def tiny_unet():
    """A ModelPatcher of ComfyUI's own SD1.5 class, three levels, 32 channels wide."""
    return tiny_models.unet()


@pytest.fixture
def small_unet():
    """The same on two levels and without a middle, compiled in a moment: two kinds of blocks."""
    return tiny_models.small_unet()


@pytest.fixture
def sample():
    return tiny_models.sample


@pytest.fixture
def capturer():
    """Captures calls on the CPU."""
    return CpuCapturer()


@pytest.fixture
def cache(capturer):
    """A graph cache of the test's own, in which calls are captured."""
    return capturing_cache(capturer)[0]


@pytest.fixture(scope="module")
def vae():
    """Core's VAE of SD1.5's parts, 32 channels wide: one kind of block."""
    from kit import tiny_vaes  # it imports every kind of VAE that core has

    return tiny_vaes.sd15()

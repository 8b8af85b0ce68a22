"""A real ComfyUI in this process, on the CPU, and tiny models of its own classes."""

import os
import sys
from pathlib import Path

import pytest

from bench.inprocess import boot

sys.path.append(str(Path(__file__).resolve().parent.parent))
boot(cpu=True)
os.environ["ACCEL_STORE"] = "off"  # no test finds what another left; those of the store say where it is

import tiny_models  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402


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


@pytest.fixture(scope="module")
def vae():
    """Core's VAE of SD1.5's parts, 32 channels wide: one kind of block."""
    from bench import tiny_vaes  # it imports every kind of VAE that core has

    return tiny_vaes.sd15()


@pytest.fixture
def clean_counters():
    """Torch's counts, and our reasons for running uncompiled, begin anew."""
    counters.clear()
    fallbacks.clear()

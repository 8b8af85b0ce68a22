"""A VAE at many sizes in one process: what is compiled after the first, and what memory does."""

import functools

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.vae import vae_view
from comfy_accel.accel.sizing.vae import AUTO, COMPILE_DECODER, VaePolicy
from kit import tiny_vaes
from kit.compiled import graphs

from dev.bench.vae import MOST_GROWTH, SIZES, resident_mb


@pytest.fixture(scope="module")
def plain():
    """A VAE, and from a latent's size to the image that it makes of it when nothing is compiled."""
    vae = tiny_vaes.sd15()
    return vae, functools.cache(lambda height, width: vae.decode(tiny_vaes.latent(vae, height, width)))


@pytest.mark.thorough  # sizes, tiles and what auto does have quick tests in test_vae.py and test_vae_auto.py
@pytest.mark.parametrize("count", [len(SIZES), 8])
@pytest.mark.parametrize("compiled", [COMPILE_DECODER, AUTO])
@torch.inference_mode()
def test_two_sweeps_of_sizes_compile_once_and_memory_stays(compiled, count, plain):
    vae, plainly_decoded = plain
    view = vae_view(vae, VaePolicy(compiled, after=1), CompileSettings(backend="eager"), GraphCache())
    sizes = [(max(height // 64, 4), max(width // 64, 4)) for width, height in SIZES[:count]]
    counted, resident = [], []
    for _ in range(3):  # one more, since auto compiles in the second
        for height, width in sizes:
            given = tiny_vaes.latent(vae, height, width)
            assert torch.equal(view.decode(given), plainly_decoded(height, width))
            counted.append(graphs())
        resident.append(resident_mb())
    first_compiled = next(index for index, count in enumerate(counted) if count)
    assert first_compiled == (0 if compiled == COMPILE_DECODER else next(_repeated(sizes)))
    assert len(set(counted[first_compiled:])) == 1
    assert fallbacks.rows() == []
    assert resident[2] <= (1 + MOST_GROWTH) * resident[1]
    if compiled == COMPILE_DECODER:
        assert resident[1] <= (1 + MOST_GROWTH) * resident[0]


def _repeated(sizes):
    """Where a size has come before, over the sweeps."""
    seen = set()
    for index, size in enumerate(3 * list(sizes)):
        if size in seen:
            yield index
        seen.add(size)

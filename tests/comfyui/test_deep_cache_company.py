"""DeepCache beside residuals for every layer, and guidance that asks twice; the rest is in the files named alike."""

import logging

import pytest
import torch
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.step_cache.run import DeepCacheRun
from deep_cache_runs import (
    assert_close,
    cached,
    counts,
    full_and_skipped,
    residuals,
    said_of_fallbacks,
    split_chunks,
)


@pytest.fixture
def no_fallback(caplog):
    caplog.set_level(logging.WARNING)
    yield
    assert not said_of_fallbacks(caplog)


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("names", [("input",), ("middle", "output"), ("input", "middle", "output")])
def test_residuals_of_shallow_layers_are_applied_on_skipped_steps(tiny_unet, no_fallback, depth, names):
    x = torch.zeros(2, 4, 23, 31)
    full, skipped = full_and_skipped(tiny_unet, depth, 23, 31, control=lambda: residuals(x, names))
    assert torch.equal(full, skipped)
    without, _ = full_and_skipped(tiny_unet, depth, 23, 31)
    assert not torch.equal(full, without)


def test_guidance_that_asks_twice_keeps_its_answers_apart(tiny_unet, sample, no_fallback):
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    guided = PerturbedAttentionGuidance.execute(tiny_unet, 3.0).args[0]
    keys = []

    class Watched(DeepCacheRun):
        def branches(self, *args):
            keys.append(super().branches(*args))
            return keys[-1]

    host.DeepCacheRun, kept = Watched, host.DeepCacheRun
    try:
        joined = sample(cached(guided), steps=4)
    finally:
        host.DeepCacheRun = kept
    assert [[bool(key.variant[1]) for key in call] for call in keys] == [[False, False], [True]] * 4
    assert counts() == (2, 2)
    assert_close(sample(cached(split_chunks(guided)), steps=4), joined)

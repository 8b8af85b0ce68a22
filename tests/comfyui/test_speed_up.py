"""The Speed Up node: what each quality does to a model, and the line that its run leaves on it."""

import pytest
import tiny_models
import torch
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.report.headline import as_text
from comfy_accel.accel.report.run_record import records
from comfy_accel.nodes import speed_up
from comfy_accel.nodes.deep_cache import AccelDeepCache
from comfy_accel.nodes.speed_up import AccelSpeedUp
from tiny_models import sample

from bench import tiny_vaes


@pytest.fixture(autouse=True)
def with_eager_graphs(monkeypatch):
    """Graphs that are traced and not compiled give the very same image, in a moment."""
    monkeypatch.setattr(speed_up, "CompileSettings", lambda **_: CompileSettings(backend="eager"))
    monkeypatch.setattr(AccelSpeedUp, "hidden", type("Hidden", (), {"unique_id": "7"}))


def sped_up(model, quality):
    return AccelSpeedUp.execute(model, quality).args[0]


def said():
    return as_text(records.last().lines["7"])


def test_exact_is_the_same_image_and_says_what_compiling_took():
    model = tiny_models.small_unet()
    plain = sample(model, 64, 64, steps=4)
    assert torch.equal(sample(sped_up(model, "Exact"), 64, 64, steps=4), plain)
    assert "compiled once in" in said() and "steps" not in said()


def test_balanced_is_deep_cache_with_its_defaults():
    model = tiny_models.small_unet()
    by_hand = AccelDeepCache.execute(model, 3, 0).args[0]
    assert torch.equal(sample(sped_up(model, "Balanced"), 64, 64, steps=16), sample(by_hand, 64, 64, steps=16))


def test_few_steps_are_said_to_be_too_few():
    model = tiny_models.small_unet()
    plain = sample(model, 64, 64, steps=4)
    assert torch.equal(sample(sped_up(model, "Fast"), 64, 64, steps=4), plain)
    assert said().endswith("too few steps to skip any")


def test_a_vae_goes_through_and_none_is_needed():
    vae = tiny_vaes.sd15()
    model, view = AccelSpeedUp.execute(tiny_models.small_unet(), "Exact", vae).args
    latent = torch.randn(1, 4, 8, 8)
    assert torch.equal(view.decode(latent), vae.decode(latent))
    assert "Connect a VAE" in AccelSpeedUp.execute(model, "Exact").args[1].message

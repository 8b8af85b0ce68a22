"""ComfyUI samples on the made-up device: no node of ours makes the host wait for the device, once all is compiled."""

from tools.inprocess import boot

boot(cpu=False)

import comfy.samplers  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from comfy_accel.accel.cache.graph_cache import GraphCache  # noqa: E402
from comfy_accel.accel.core.compile_settings import CompileSettings  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from comfy_accel.accel.cuda_graphs import call_capture  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models import samplers  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache  # noqa: E402
from comfy_accel.accel.hosts.comfyui.server import panel, report  # noqa: E402
from comfy_accel.accel.step_cache.config import DeepCacheSettings  # noqa: E402
from comfy_accel.accel.step_cache.policies.drift import Drift  # noqa: E402
from kit import made_up_device as device  # noqa: E402
from kit import tiny_models  # noqa: E402
from kit.deep_cache import last_run  # noqa: E402
from kit.tiny_models import UNET, Family  # noqa: E402

LAYOUT = {
    "channel_mult": [1, 2],
    "num_res_blocks": [0, 1],
    "transformer_depth": [1],
    "transformer_depth_output": [0, 1, 1],
    "transformer_depth_middle": -2,
}
FAMILY = Family("small", "SD15", {**UNET, **LAYOUT}, 768)
"""Two kinds of blocks."""


@pytest.fixture(scope="module")
def model():
    return FAMILY.load(torch.float16, device=torch.device("cuda"))


@pytest.fixture(scope="module")
def cache():
    return GraphCache(max_bytes=1 << 30)


@pytest.fixture(autouse=True)
def levels_are_known(monkeypatch):
    """Nothing is computed on the device: outputs are what was in the memory, and the sampler's own levels are zero."""
    monkeypatch.setattr(call_capture, "largest_difference", lambda actual, expected: None)
    monkeypatch.setattr(comfy.samplers, "calculate_sigmas", lambda _, name, steps: torch.linspace(10, 0, steps + 1))
    monkeypatch.setattr(samplers, "is_near", lambda one, other: True)


def look():
    """What the panel and the node Report read."""
    panel.state()
    report.text()


def sample(model, steps, side=16):
    latent = torch.zeros(1, 4, side, side)
    conds = FAMILY.conditioning(77, 0), FAMILY.conditioning(77, 1)
    return tiny_models.sample_latent(model, latent, *conds, steps, callback=lambda *_: look())


def counted(model, name, *args):
    before = getattr(device.counts(), name)
    sample(model, *args)
    return getattr(device.counts(), name) - before


def waits_a_step(model):
    """Between a run of 10 steps and one of 20, once all is compiled and captured; eagerly there are none."""
    sample(model, 12)
    return (counted(model, "waits", 20) - counted(model, "waits", 10)) / 10


def test_core_itself_does_not_wait(model):
    assert waits_a_step(model) == 0


def test_compiled_blocks_wait_for_nothing_and_a_second_size_compiles_nothing(model, cache):
    ours = accelerate(model, CompileSettings(), cache, graphs=False)
    assert waits_a_step(ours) == 0
    made = cache.statistics()["compilations"]
    assert made == 2
    assert counted(ours, "modules", 2, 24) == 0
    assert cache.statistics()["compilations"] == made and fallbacks.rows() == []


def test_replays_wait_for_nothing_and_are_one_launch(model, cache):
    both = accelerate(model, CompileSettings(), cache, graphs=True)
    assert waits_a_step(both) == 0
    assert counted(both, "graph_launches", 10) == 10 and fallbacks.rows() == []


@pytest.mark.parametrize("schedule", ["uniform", "adaptive"])
@pytest.mark.parametrize("graphs", [False, True])
def test_either_schedule_of_deepcache_waits_for_nothing(model, cache, schedule, graphs):
    ours = accelerate(model, CompileSettings(), cache, graphs=graphs)
    assert waits_a_step(apply_deep_cache(ours, DeepCacheSettings(schedule=schedule))) == 0
    # How far a feature has drifted is what was in the memory, so that adaptively any step may be skipped, or none.
    assert (last_run()["skipped_steps"] > 0 or schedule == "adaptive") and fallbacks.rows() == []


def test_drift_that_has_not_come_yet_is_that_of_the_step_before():
    """The device is far behind: nothing has been computed when the host decides."""
    drift, feature = Drift(), torch.zeros(8).cuda()
    drift.measure("a", feature, 0, True)
    drift.measure("a", feature, 1, False)
    assert drift.predicted(2) is not None
    torch.cuda._sleep(10**9)
    drift.measure("a", feature, 2, False)
    before = device.counts().waits
    assert drift.predicted(3) is not None and device.counts().waits == before
    torch.cuda.synchronize()

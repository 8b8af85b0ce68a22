"""ComfyUI samples on the made-up device: no node of ours makes the host wait for the device, once all is compiled."""

from dev.tools.inprocess import boot

boot(cpu=False)

import comfy.samplers  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from comfy_accel.accel.cache.graph_cache import GraphCache  # noqa: E402
from comfy_accel.accel.core.compile_settings import CompileSettings  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models import samplers  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate  # noqa: E402
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache  # noqa: E402
from comfy_accel.accel.hosts.comfyui.server import panel, report  # noqa: E402
from comfy_accel.accel.report.run_record import records  # noqa: E402
from comfy_accel.accel.step_cache.config import DeepCacheSettings  # noqa: E402
from comfy_accel.accel.step_cache.plan import QualityPlan  # noqa: E402
from comfy_accel.accel.step_cache.sampler_facts import SamplerFacts  # noqa: E402
from kit import made_up_device as device  # noqa: E402
from kit import tiny_models  # noqa: E402
from kit.deep_cache import last_run  # noqa: E402
from kit.step_cache import every  # noqa: E402
from kit.thorough import thorough_except  # noqa: E402
from kit.tiny_models import TWO_LEVELS, UNET, Family  # noqa: E402

FAMILY = Family("small", "SD15", {**UNET, **TWO_LEVELS}, 768)
"""Two kinds of blocks."""


@pytest.fixture(scope="module")
def model():
    return FAMILY.load(torch.float16, device=torch.device("cuda"))


@pytest.fixture(scope="module")
def cache():
    return GraphCache(max_bytes=1 << 30)


@pytest.fixture(autouse=True)
def levels_are_known(monkeypatch):
    """Nothing is computed on the device: the sampler's own levels are zero."""
    monkeypatch.setattr(comfy.samplers, "calculate_sigmas", lambda _, name, steps: torch.linspace(10, 0, steps + 1))
    monkeypatch.setattr(samplers, "is_near", lambda one, other: True)


def look():
    """What the panel and the node Report read."""
    panel.state()
    report.write_report()


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


@pytest.mark.parametrize("graphs", thorough_except([False, True], True))
def test_steps_that_are_skipped_wait_for_nothing(model, cache, graphs):
    ours = accelerate(model, CompileSettings(), cache, graphs=graphs)
    assert waits_a_step(apply_deep_cache(ours, every(3))) == 0
    assert last_run()["skipped_steps"] > 0 and fallbacks.rows() == []


@pytest.mark.parametrize("graphs", thorough_except([False, True], True))
def test_deciding_what_to_skip_waits_once_a_full_step_at_most(model, cache, graphs):
    """What full steps show is what was in the memory, so any step may be skipped, or none."""
    ours = accelerate(model, CompileSettings(), cache, graphs=graphs)
    assert waits_a_step(apply_deep_cache(ours, DeepCacheSettings())) <= 1
    assert records.last().skipping.why_full is None and fallbacks.rows() == []


@pytest.mark.parametrize("behind", [0, 10**9])
def test_what_a_full_step_shows_decides_the_next_one_whether_it_has_come_or_not(behind):
    """behind: how long the device is busy with what was asked before, when the host decides. Its values are zeros."""
    plans = {where: QualityPlan(40.0) for where in ("cpu", "cuda")}
    for where, plan in plans.items():
        plan.begin(SamplerFacts(tuple(4.0 - 0.2 * step for step in range(20)) + (0.0,), False, False))
        for step in range(6):
            assert not plan.skips(step) or step > 2
            plan.note_full(step)
            if step == 5 and where == "cuda":
                torch.cuda._sleep(behind)
            plan.note_errors({step: torch.zeros(1).to(where)})
    assert [plan.skips(6) for plan in plans.values()] == [True, True]
    torch.cuda.synchronize()

"""What DeepCache does with each sampler of core: nothing when it is off, and whole steps when it is on."""

import comfy.model_sampling
import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.core.events import subscribe
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.samplers import NoiseLevels, follows_schedule
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.splits.unet import UNetSplit
from kit import tiny_models
from kit.deep_cache import cached, counts, last_run
from kit.thorough import thorough_except

ONE_CALL = "0F 1s 2s 3F 4s 5s 6F"
OWN_MIDPOINT = "0FF 1ss 2ss 3FF 4ss 5ss 6F"
"""The second call refines the step that it is made in."""
NEXT_LEVEL = "0F 1ss 2ss 3FF 4ss 5ss 6FF"
"""The second call is made at the next step's noise level, or below it, and shares that step's decision."""

STATED = {
    "dpm_2": OWN_MIDPOINT,
    "dpmpp_sde": OWN_MIDPOINT,
    "dpmpp_sde_gpu": OWN_MIDPOINT,
    "seeds_2": OWN_MIDPOINT,
    "seeds_3": "0FFF 1sss 2sss 3FFF 4sss 5sss 6F",
    "heun": NEXT_LEVEL,
    "dpm_2_ancestral": NEXT_LEVEL,
    "dpmpp_2s_ancestral": NEXT_LEVEL,
    "dpmpp_2s_ancestral_cfg_pp": NEXT_LEVEL,
    "exp_heun_2_x0": NEXT_LEVEL,  # of newer cores, and the next
    "exp_heun_2_x0_sde": NEXT_LEVEL,
    # Its second call corrects what its first predicted, at one level.
    "sa_solver_pece": NEXT_LEVEL,
    # Looks two steps ahead and comes back: a step keeps its decision.
    "heunpp2": "0F 1s 2s 1s 2s 3F 2s 3F 4s 3F 4s 5s 4s 5s 6F 5s 6FF",
    # Chooses levels of its own: none is in step 3, so step 4 is full.
    "dpm_fast": "0FF 1s 2s 4F 5ss",
}
"""For seven steps at interval 3, the calls in their order: the step of each, F in full and s skipped. Every other
sampler makes one call a step."""

# The others step in the way of one of these.
WAYS = "euler", "heun", "dpm_2", "dpmpp_2m", "dpmpp_2m_sde", "uni_pc", "sa_solver_pece", "heunpp2", "dpm_fast"
every_sampler = pytest.mark.parametrize("sampler", thorough_except(comfy.samplers.SAMPLER_NAMES, *WAYS))
of_set_levels = pytest.mark.parametrize(
    "sampler", thorough_except([name for name in comfy.samplers.SAMPLER_NAMES if name != "dpm_adaptive"], *WAYS)
)


@pytest.fixture(scope="module")
def small_unet():
    """Two levels: what a sampler does needs no more."""
    return tiny_models.unet(
        num_res_blocks=[1, 1], channel_mult=[1, 2], transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1]
    )


@pytest.fixture
def runs(monkeypatch):
    """The runs from now on, each with `told`: the step of each call, and how it ran."""
    made = []

    class Watched(DeepCacheRun):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.told = []
            made.append(self)

        def count(self, skipped):
            self.told.append((self.step, "s" if skipped else "F"))
            super().count(skipped)

    monkeypatch.setattr(host, "DeepCacheRun", Watched)
    return made


@pytest.fixture
def calls(runs):
    """The calls of the runs from now on, as in `STATED`."""

    def told():
        text, last = "", None
        for step, mark in (call for run in runs for call in run.told):
            text += mark if step == last else f" {step}{mark}"
            last = step
        return text.strip()

    return told


@every_sampler
def test_window_without_steps_is_bit_identical(small_unet, sample, sampler):
    plain = sample(small_unet, 64, 64, steps=3, sampler=sampler)
    # The first step, which is full anyway, and the threshold of noise that no other step reaches.
    in_vain = cached(small_unet, end_percent=1e-6, points=2)
    assert torch.equal(sample(in_vain, 64, 64, steps=3, sampler=sampler), plain)
    assert last_run()["skipped_steps"] == 0


def test_interval_of_one_adds_nothing_to_the_model(small_unet):
    off = cached(small_unet, 1)
    assert not any(host.KEY in by_key for by_key in off.wrappers.values())


@pytest.fixture
def as_if_seen(monkeypatch):
    """A UNet's skipped steps do not ask for noise: what is tested is which steps they are."""
    monkeypatch.setattr(UNetSplit, "sees_noise", True)


@pytest.fixture
def taken_from_schedule(monkeypatch):
    """Levels of runs from now on that were taken from the schedule, as on a GPU, and what they are."""
    seen = []

    class Watched(NoiseLevels):
        def read(self, timestep, schedule):
            level = super().read(timestep, schedule)
            if self._unchecked and self._unchecked[-1][0] == level:
                seen.append((level, timestep.max().item()))
            return level

    monkeypatch.setattr(host, "NoiseLevels", Watched)
    monkeypatch.setattr(
        host, "follows_schedule", lambda sampler, device: follows_schedule(sampler, torch.device("cuda"))
    )
    return seen


def test_levels_of_core_s_samplers_are_taken_from_the_schedule_from_the_fifth_on_and_of_others_read(
    small_unet, sample, taken_from_schedule, monkeypatch
):
    sample(cached(small_unet), 64, 64, steps=7, sampler="euler")
    assert len(taken_from_schedule) == 3
    function = comfy.samplers.k_diffusion_sampling.sample_euler
    monkeypatch.setattr(function, "__module__", "a_pack_of_samplers")
    sample(cached(small_unet), 64, 64, steps=7, sampler="euler")
    assert len(taken_from_schedule) == 3


def test_levels_are_read_again_once_one_was_wrongly_taken_from_the_schedule():
    levels, schedule = NoiseLevels(True), [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0]
    evaluated = [6.0, 5.0, 4.0, 3.0, 3.5, 3.5, 1.0, 0.5]
    read = [levels.read(torch.tensor([level]), schedule) for level in evaluated]
    assert read == [6.0, 5.0, 4.0, 3.0, 2.0, 3.5, 1.0, 0.5]


@of_set_levels
def test_steps_are_skipped_whole_and_every_third_is_full(
    small_unet, sample, calls, taken_from_schedule, as_if_seen, sampler
):
    out = sample(cached(small_unet), 64, 64, steps=7, sampler=sampler)
    assert all(level == pytest.approx(actual, rel=1e-4) for level, actual in taken_from_schedule)
    assert out.isfinite().all()
    assert calls() == STATED.get(sampler, ONE_CALL)
    steps = {group[0]: group[1].upper() for group in calls().split()}  # once each, however often it is come back to
    assert records.deep_cache().steps_taken == "".join(steps[step] for step in sorted(steps))


def test_dpm_adaptive_decides_by_the_steps_that_its_levels_fall_in(small_unet, sample, calls, as_if_seen):
    sample(cached(small_unet), 64, 64, steps=7, sampler="dpm_adaptive")
    marks = {}
    for group in calls().split():
        marks.setdefault(int(group.rstrip("Fs")), set()).update(group.lstrip("0123456789"))
    assert all(len(mark) == 1 for mark in marks.values())
    assert marks[0] == {"F"}
    assert {"s"} in marks.values()


NOISY = pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_sde", "dpmpp_2m_sde", "lcm"])


@NOISY
def test_unet_runs_in_full_where_the_sampler_adds_noise(small_unet, sample, caplog, sampler):
    caplog.set_level("INFO")
    plain = sample(small_unet, 64, 64, steps=5, sampler=sampler)
    assert torch.equal(sample(cached(small_unet), 64, 64, steps=5, sampler=sampler), plain)
    assert counts() == (5, 0) and "adds noise in its steps" in records.deep_cache().why_full
    assert "skipped none of 5 steps: this sampler adds noise" in caplog.text and "Use euler" in caplog.text


@NOISY
def test_samplers_that_add_noise_add_the_same_as_without_us(small_unet, sample, as_if_seen, sampler):
    def noise_of(model, seed):
        """The latents of a run in which the model's answers count for nothing."""
        latents = []

        def answer_nothing(executor, x, *args, **kwargs):
            latents.append(x.clone())
            return torch.zeros_like(executor(x, *args, **kwargs))

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "silence", answer_nothing)
        sample(model, 64, 64, steps=5, sampler=sampler, seed=seed)
        return torch.cat(latents)

    plain, other = (noise_of(small_unet, seed) for seed in (1, 2))
    assert torch.equal(noise_of(cached(small_unet), 1), plain)
    assert counts() == (2, 3)
    assert not torch.equal(plain[1:], other[1:])


def by_levels(model, sigmas, sampler="euler", cfg=5.0, seed=0):
    """From a latent that is no noise, along noise levels of our own."""
    latent = torch.randn(1, 4, 11, 9, generator=torch.Generator().manual_seed(0))
    conds = (tiny_models.conditioning(seed=seed) for seed in (1, 2))
    sampler = comfy.samplers.sampler_object(sampler)
    noise = torch.zeros_like(latent)
    return comfy.sample.sample_custom(model, noise, cfg, sampler, sigmas, *conds, latent, disable_pbar=True, seed=seed)


def test_unsampling_is_computed_in_full_and_says_why(small_unet):
    sigmas = torch.tensor([0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 9.0, 14.6])
    assert torch.equal(by_levels(cached(small_unet), sigmas), by_levels(small_unet, sigmas))
    assert counts() == (7, 0) and "makes noise of an image" in records.deep_cache().why_full


def test_levels_that_go_up_and_down_are_computed_in_full(small_unet, caplog):
    sigmas = torch.tensor([14.6, 7.0, 3.0, 1.5, 7.0, 3.0, 1.5, 0.5, 0.0])
    made = by_levels(cached(small_unet), sigmas, "euler_ancestral")
    assert torch.equal(made, by_levels(small_unet, sigmas, "euler_ancestral"))
    assert caplog.text.count("go up and down; every step runs in full") == 1
    assert "go up and down" in records.deep_cache().why_full


def test_guidance_of_one_is_one_stream(small_unet, calls):
    sigmas = comfy.samplers.calculate_sigmas(small_unet.get_model_object("model_sampling"), "normal", 7)
    assert by_levels(cached(small_unet), sigmas, cfg=1.0).isfinite().all()
    assert calls() == ONE_CALL


@pytest.mark.parametrize(
    "dtype, settings",
    [(torch.float16, {}), (torch.bfloat16, {"points": 2})],
)
def test_half_precision_is_as_near_to_single_as_without_us(dtype, sample, settings):
    half, single = tiny_models.unet(dtype=dtype), tiny_models.unet()
    made, expected, plain, exact = (
        sample(model, 72, 88, 2, steps=7)
        for model in (cached(half, **settings), cached(single, **settings), half, single)
    )
    assert (made - expected).abs().max() <= 4 * (plain - exact).abs().max()


def test_img2img_counts_from_its_own_first_step(small_unet, sample, calls):
    sample(cached(small_unet), steps=4, denoise=0.4, latent=torch.ones(1, 4, 9, 13))
    assert calls() == "0F 1s 2s 3F"


@pytest.mark.parametrize("flow", [False, True])
def test_run_knows_the_window_and_the_kind_of_its_noise_levels(small_unet, sample, runs, flow):
    class Flow(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
        pass

    model = small_unet.clone()
    if flow:
        model.add_object_patch("model_sampling", Flow())
    sampling = model.get_model_object("model_sampling")
    sample(cached(model, start_percent=0.25, end_percent=0.75), 64, 64, steps=4)
    (run,) = runs
    assert run._window == tuple(float(sampling.percent_to_sigma(percent)) for percent in (0.25, 0.75))
    assert run.facts.is_flow == flow and run.facts.levels[0] == pytest.approx(1.0 if flow else 14.61, abs=0.01)


def test_run_tells_what_it_did(small_unet, sample):
    events = []
    stop = subscribe(lambda name, data: events.append((name, data)))
    try:
        sample(cached(small_unet), 64, 64, steps=7)
    finally:
        stop()
    (told,) = (data for name, data in events if name == "deep_cache_run")
    assert (told["skipping"].full_steps, told["skipping"].skipped_steps) == (3, 4)
    assert len(told["began"]) == 7 and sorted(told["began"]) == list(told["began"])
    told = last_run()
    assert (told["full_steps"], told["skipped_steps"], told["target_db"]) == (3, 4, 40.0)
    assert 0 < told["skipped_work"] <= 4 / 7


LEVELS = [14.6, 9.0, 6.0, 4.0, 2.7, 1.8, 1.2, 0.8, 0.4, 0.0]


def moves_with_noise(model, sampler):
    """Whether the latent depends on the seed where the model answers the same: the noise that a step adds."""

    def answer_nothing(executor, x, *args, **kwargs):
        return torch.zeros_like(executor(x, *args, **kwargs))

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "silence", answer_nothing)
    one, other = (by_levels(model, torch.tensor(LEVELS[:-1]), sampler, seed=seed) for seed in (1, 2))
    return not torch.equal(one, other)


@of_set_levels
def test_what_a_sampler_does_is_measured(small_unet, runs, sampler):
    by_levels(cached(small_unet), torch.tensor(LEVELS), sampler)
    facts = runs[0].facts
    assert facts.levels == pytest.approx(LEVELS, abs=2e-3)
    # What cannot be measured, as of those that choose levels of their own, is taken to add noise.
    assert facts.adds_noise == (moves_with_noise(small_unet, sampler) or sampler == "dpm_fast")
    assert facts.gains or sampler == "dpm_fast" or "cfg_pp" in sampler
    euler = [1 - end / now for now, end in zip(LEVELS, LEVELS[1:], strict=False)]
    gains = [facts.gain(step) for step in range(1, facts.steps)]
    assert all(0.3 * own < gain <= 4 for own, gain in zip(euler[1:], gains, strict=True)), gains


def test_samplers_of_other_packs_are_measured_like_cores(small_unet, runs, monkeypatch):
    function = comfy.samplers.k_diffusion_sampling.sample_dpmpp_2m
    by_levels(cached(small_unet), torch.tensor(LEVELS), "dpmpp_2m")
    monkeypatch.setattr(function, "__module__", "a_pack_of_samplers")
    monkeypatch.setattr(function, "__name__", "sample_as_nobody_else")
    by_levels(cached(small_unet), torch.tensor(LEVELS), "dpmpp_2m")
    assert runs[0].facts == runs[1].facts and runs[0].facts.gains

"""What DeepCache does with each sampler of core: nothing when it is off, and whole steps when it is on."""

import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_accel.accel.hosts.comfyui.models import deep_cache as host
from comfy_accel.accel.hosts.comfyui.models.samplers import NoiseLevels, follows_schedule
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.run import DeepCacheRun
from kit import tiny_models
from kit.deep_cache import cached, calls_of, counts, last_run
from kit.step_cache import letters
from kit.thorough import thorough_except

# The others step in the way of one of these.
WAYS = "euler", "heun", "dpm_2", "dpmpp_2m", "dpmpp_2m_sde", "uni_pc", "sa_solver_pece", "heunpp2", "dpm_fast"
every_sampler = pytest.mark.parametrize("sampler", thorough_except(comfy.samplers.SAMPLER_NAMES, *WAYS))
of_set_levels = pytest.mark.parametrize(
    "sampler", thorough_except([name for name in comfy.samplers.SAMPLER_NAMES if name != "dpm_adaptive"], *WAYS)
)


@pytest.fixture
def runs(monkeypatch):
    """The runs from now on, each with `told`: the step of each evaluation, and whether it was skipped."""
    made = []

    class Watched(DeepCacheRun):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.told = []
            made.append(self)

        def count(self, is_skipped):
            self.told.append((self._step, is_skipped))
            super().count(is_skipped)

    monkeypatch.setattr(host, "DeepCacheRun", Watched)
    return made


@every_sampler
def test_window_without_steps_is_bit_identical(small_unet, sample, sampler):
    plain = sample(small_unet, 64, 64, steps=4, sampler=sampler)
    # The first step, which is full anyway, and the threshold of noise that no other step reaches.
    in_vain = cached(small_unet, end_percent=1e-6)
    assert torch.equal(sample(in_vain, 64, 64, steps=4, sampler=sampler), plain)
    assert last_run()["skipped_steps"] == 0


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


@every_sampler
def test_steps_are_skipped_whole_and_call_no_model(small_unet, sample, runs, taken_from_schedule, sampler):
    calls = calls_of(small_unet)
    for _ in range(2):
        out = sample(cached(small_unet), 64, 64, steps=7, sampler=sampler)
    assert all(level == pytest.approx(actual, rel=1e-4) for level, actual in taken_from_schedule)
    one, run = runs
    assert one.told == run.told and out.isfinite().all()
    assert len(calls) == 2 * sum(not is_skipped for _, is_skipped in run.told)
    steps = dict(run.told)
    assert all(steps[step] == is_skipped for step, is_skipped in run.told)
    taken = records.last().skipping.steps_taken
    assert taken == "".join("FS"[steps[step]] for step in sorted(steps)) and "S" in taken
    assert taken == letters(7) or sampler in ("dpm_fast", "dpm_adaptive")  # which choose levels of their own


def wandering(model, x, sigmas, extra_args, disable=None, callback=None):
    """A sampler of another pack, which leaves the schedule on its way."""
    for step, (now, end) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        level = now * (0.9 if step > 4 else 1.0)
        x = x + (x - model(x, level.expand(1), **extra_args)) / level * (end - now)
    return x


def test_sampler_that_leaves_the_schedule_is_followed(small_unet, runs):
    made = by_levels(cached(small_unet), torch.tensor(LEVELS), comfy.samplers.KSAMPLER(wandering))
    assert made.isfinite().all() and counts()[1] > 2
    assert [step for step, _ in runs[0].told] == list(range(9))


def test_samplers_that_go_by_both_predictions_get_both_in_skipped_steps(small_unet, sample):
    """CFG++; other nodes' functions after guidance are asked in full steps alone."""
    given, asked = [], []
    own = comfy.samplers.k_diffusion_sampling.sample_euler_cfg_pp
    model = small_unet.clone()
    model.set_model_sampler_post_cfg_function(lambda args: asked.append(1) or args["denoised"])

    def watched(model, x, sigmas, extra_args, **how):
        def call(x, sigma, model_options, **rest):
            options = dict(model_options)
            *others, last = options["sampler_post_cfg_function"]
            note = lambda args: given.append({name: args[name] for name in PARTS}) or last(args)  # noqa: E731
            return model(x, sigma, model_options={**options, "sampler_post_cfg_function": [*others, note]}, **rest)

        call.inner_model = model.inner_model
        return own(call, x, sigmas, extra_args, **how)

    made = by_levels(cached(model), torch.tensor(LEVELS), comfy.samplers.KSAMPLER(watched))
    assert made.isfinite().all() and counts() == (4, 5)
    steps = given[-9:]  # before them it was measured
    assert len(asked) == 4
    for step in range(1, 9):
        parts, before = ([one[name] for name in PARTS] for one in (steps[step], steps[step - 1]))
        assert not torch.equal(*parts) and not torch.equal(parts[1], before[1])


PARTS = ("cond_denoised", "uncond_denoised")
NOISY = ["euler_ancestral", "dpmpp_sde", "dpmpp_2m_sde", "lcm"]


@pytest.mark.parametrize("sampler", NOISY)
def test_samplers_that_add_noise_add_the_same_as_without_us(small_unet, sample, sampler):
    def noise_of(interval, seed):
        """The latents of a run in which predictions count for nothing."""
        latents, model = [], small_unet.clone()

        def answer_nothing(executor, x, *args, **kwargs):
            latents.append(x.clone())
            return torch.zeros_like(executor(x, *args, **kwargs))

        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "silence", answer_nothing)
        sample(cached(model, interval), 64, 64, steps=5, sampler=sampler, seed=seed)
        return torch.cat(latents)

    plain, other = (noise_of(1, seed) for seed in (1, 2))
    assert torch.equal(noise_of(3, 1), plain) and counts() == (3, 2)
    assert not torch.equal(plain[1:], other[1:])


def by_levels(model, sigmas, sampler="euler", cfg=5.0, seed=0):
    """From a latent that is no noise, along noise levels of our own."""
    latent = torch.randn(1, 4, 11, 9, generator=torch.Generator().manual_seed(0))
    conds = (tiny_models.conditioning(seed=seed) for seed in (1, 2))
    sampler = comfy.samplers.sampler_object(sampler) if isinstance(sampler, str) else sampler
    noise = torch.zeros_like(latent)
    return comfy.sample.sample_custom(model, noise, cfg, sampler, sigmas, *conds, latent, disable_pbar=True, seed=seed)


def test_unsampling_is_computed_in_full_and_says_why(small_unet):
    sigmas = torch.tensor([0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 9.0, 14.6])
    assert torch.equal(by_levels(cached(small_unet), sigmas), by_levels(small_unet, sigmas))
    assert counts() == (7, 0) and "makes noise of an image" in records.last().skipping.why_full


def test_levels_that_go_up_and_down_are_computed_in_full(small_unet, caplog):
    sigmas = torch.tensor([14.6, 7.0, 3.0, 1.5, 7.0, 3.0, 1.5, 0.5, 0.0])
    made = by_levels(cached(small_unet), sigmas, "euler_ancestral")
    assert torch.equal(made, by_levels(small_unet, sigmas, "euler_ancestral"))
    assert caplog.text.count("go up and down; every step runs in full") == 1
    assert "go up and down" in records.last().skipping.why_full


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

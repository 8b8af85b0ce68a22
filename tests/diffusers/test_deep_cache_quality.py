"""A quality target in diffusers' own pipelines: what is compared, what is reached, and where that is impossible."""

import math

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers: tests/requirements.txt")

from comfy_accel.accel.core.events import subscribe  # noqa: E402
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache  # noqa: E402
from comfy_accel.accel.hosts.diffusers.predictions import carried_by, combined, denoised  # noqa: E402
from comfy_accel.accel.hosts.diffusers.schedule import PipelineSchedule  # noqa: E402
from comfy_accel.accel.step_cache.config import DeepCacheSettings  # noqa: E402
from comfy_accel.accel.step_cache.policies.quality import QualityRefresh  # noqa: E402
from comfy_accel.accel.step_cache.step_schedule import angle  # noqa: E402
from comfy_accel.accel.store import location  # noqa: E402
from kit import deep_transformers, tiny_pipelines  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_garbage")

EXACT = 300.0
"""dB: nothing can be skipped, so that all there is are comparisons."""


def asked(quality, pipe, sample, depth=None, **arguments):
    """Latents of one call with a quality target, and what was told of it."""
    told = []
    unsubscribe = subscribe(lambda name, data: told.append(data["skipping"]) if name == "deep_cache_run" else None)
    try:
        with deep_cache(pipe, DeepCacheSettings(quality=quality, depth=depth)):
            latents = sample(pipe, **arguments)
    finally:
        unsubscribe()
    return latents, told[-1]


def reached(actual, expected):
    """PSNR in dB of the farthest of the latents, with the range of each as its peak."""
    actual, expected = actual.flatten(1), expected.flatten(1)
    peak = expected.amax(1) - expected.amin(1)
    return (20 * torch.log10(peak / (actual - expected).square().mean(1).sqrt())).min().item()


@pytest.mark.parametrize(
    "scheduler",
    [
        "DDIMScheduler",
        "EulerDiscreteScheduler",
        "DPMSolverMultistepScheduler",
        pytest.param("EulerAncestralDiscreteScheduler", marks=pytest.mark.thorough),
        pytest.param("HeunDiscreteScheduler", marks=pytest.mark.thorough),
        pytest.param("UniPCMultistepScheduler", marks=pytest.mark.thorough),
        pytest.param("PNDMScheduler", marks=pytest.mark.thorough),
    ],  # each takes seconds
)
def test_quality_is_reached_with_any_scheduler(scheduler):
    pipe = tiny_pipelines.pipeline(scheduler)
    plain = tiny_pipelines.sample(pipe, steps=30, batch=2)
    made, told = asked(40.0, pipe, tiny_pipelines.sample, steps=30, batch=2)
    assert told.skipped_steps >= 3 and told.target_db == 40.0
    assert reached(made, plain) >= 39
    letters = [letter for letter, _, _ in told.plan]
    assert told.estimated_db >= 39 and 0 <= told.probes - letters.count("C") <= letters.count("H")
    assert ("H" in letters) == (scheduler == "HeunDiscreteScheduler")


def test_later_images_of_a_pipeline_compare_once(tmp_path, monkeypatch):
    """What the first ones showed is kept in this person's own folder, for each scale of the guidance."""
    monkeypatch.delenv("ACCEL_STORE")
    monkeypatch.setattr(location, "personal_home", lambda: tmp_path)
    pipe = tiny_pipelines.pipeline("DDIMScheduler")
    told = [asked(40.0, pipe, tiny_pipelines.sample, depth=2, steps=30, seed=seed)[1] for seed in range(10)]
    assert told[0].probes >= 2 and told[-1].probes == 1
    assert told[-1].skipped_work >= told[0].skipped_work
    assert (tmp_path / "sensitivity.json").is_file()


@pytest.mark.parametrize(
    "kind",
    [
        "StableDiffusion3Pipeline",
        "FluxPipeline",
        *(pytest.param(f"{name}Pipeline", marks=pytest.mark.thorough) for name in ("Wan", "QwenImage")),
        *(pytest.param(f"{name}Pipeline", marks=pytest.mark.thorough) for name in ("Lumina2", "PixArtSigma", "LTX")),
    ],  # each takes seconds
)
def test_quality_is_reached_with_transformers(kind):
    pipe = deep_transformers.pipeline(kind)
    plain = deep_transformers.sample(pipe, steps=20)
    made, told = asked(40.0, pipe, deep_transformers.sample, steps=20)
    assert told.skipped_steps >= 3
    assert reached(made, plain) >= 39


def test_flows_of_heun_leave_out_second_evaluations():
    pipe = deep_transformers.pipeline(
        "StableDiffusion3Pipeline", scheduler=diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
    )
    plain = deep_transformers.sample(pipe, steps=20)
    made, told = asked(40.0, pipe, deep_transformers.sample, steps=20)
    assert "H" in {letter for letter, *_ in told.plan}
    assert reached(made, plain) >= 39


def test_two_transformers_share_a_quality(monkeypatch):
    """Each takes the other to add as much; what was asked is told as it was."""
    factors, begin = [], QualityRefresh.begin

    def noted(policy, carried):
        factors.append(carried.factor)
        begin(policy, carried)

    monkeypatch.setattr(QualityRefresh, "begin", noted)
    pipe = deep_transformers.pipeline(
        "WanPipeline", transformer_2=deep_transformers.transformer("Wan", 1, num_layers=9), boundary_ratio=0.6
    )
    _, told = asked(40.0, pipe, deep_transformers.sample, steps=8)
    assert factors == [pytest.approx(math.sqrt(2))] * 2
    assert told.target_db == 40.0


def test_list_of_predictions_is_compared():
    """Too wild for a forecast at random weights, so nothing is skipped."""
    pipe = deep_transformers.pipeline("ZImagePipeline")
    plain = deep_transformers.sample(pipe, steps=20)
    made, told = asked(EXACT, pipe, deep_transformers.sample, steps=20)
    assert torch.equal(made, plain)
    assert told.probes and told.why_full is None


def test_noise_that_a_scheduler_is_told_to_add_counts():
    """DDIM's eta: as an ancestral sampler, it compares nothing in the first half."""
    pipe = tiny_pipelines.pipeline("DDIMScheduler")
    plain = tiny_pipelines.sample(pipe, steps=20, eta=1.0)
    made, told = asked(40.0, pipe, tiny_pipelines.sample, steps=20, eta=1.0)
    letters = "".join(letter for letter, _, _ in told.plan)
    assert letters[:10] == "F" * 10 and "C" in letters
    assert reached(made, plain) >= 39


@pytest.mark.parametrize("scheduler", ["EulerDiscreteScheduler", "HeunDiscreteScheduler"])
def test_comparing_changes_nothing(scheduler):
    pipe = tiny_pipelines.pipeline(scheduler)
    plain = tiny_pipelines.sample(pipe, steps=20)
    made, told = asked(EXACT, pipe, tiny_pipelines.sample, steps=20)
    assert told.probes and not told.skipped_steps
    assert torch.equal(made, plain)
    assert "step" not in vars(pipe.scheduler)


def test_scheduler_that_begins_from_each_prediction_runs_in_full(caplog):
    caplog.set_level("INFO")
    pipe = tiny_pipelines.pipeline("LCMScheduler")
    plain = tiny_pipelines.sample(pipe, steps=8)
    made, told = asked(32.0, pipe, tiny_pipelines.sample, steps=8)
    assert torch.equal(made, plain) and told.probes == 0
    assert "nothing to gain at the 32 dB asked" in caplog.text


def test_unknown_scheduler_runs_in_full_and_says_so(caplog):
    pipe = tiny_pipelines.pipeline("EulerDiscreteScheduler")
    plain = tiny_pipelines.sample(pipe, steps=20)
    odd = type("OddScheduler", (), {"config": None})
    assert carried_by(odd()) is None
    pipe.scheduler.register_to_config(invert_sigmas=True)
    made, told = asked(32.0, pipe, tiny_pipelines.sample, steps=20)
    assert torch.equal(made, plain) and told.probes == 0
    assert "EulerDiscreteScheduler" in caplog.text and "every step runs in full" in caplog.text


def test_pipeline_that_does_not_ask_its_scheduler_runs_in_full_and_says_so(caplog):
    pipe = tiny_pipelines.pipeline("EulerDiscreteScheduler")
    other = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    made, told = asked(32.0, pipe, lambda pipe: stepped_elsewhere(pipe, other))
    assert told.skipped_steps == 0 and "its scheduler is not asked" in caplog.text


def stepped_elsewhere(pipe, other):
    pipe.scheduler.set_timesteps(12)
    other.set_timesteps(12)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * other.init_noise_sigma
    context = torch.zeros(1, 5, tiny_pipelines.CONTEXT_DIM)
    with pipe.progress_bar(total=12), torch.no_grad():
        for time in other.timesteps:
            out = pipe.unet(other.scale_model_input(latent, time), time, encoder_hidden_states=context).sample
            latent = other.step(out, time, latent).prev_sample
    return latent


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "DDIMScheduler"])
def test_denoised_prediction_is_the_schedulers_own(name, prediction_type):
    options = {"clip_sample": False} if name == "DDIMScheduler" else {}
    scheduler = getattr(diffusers, name)(prediction_type=prediction_type, beta_schedule="scaled_linear", **options)
    scheduler.set_timesteps(10)
    sample, output = torch.randn(2, 2, 4, 8, 8)
    place, time = 4, scheduler.timesteps[4]
    scheduler.scale_model_input(sample, time)
    level = PipelineSchedule(scheduler).level(place)
    found = denoised(scheduler, output, time, sample, angle(level))
    torch.testing.assert_close(found, scheduler.step(output, time, sample).pred_original_sample, rtol=1e-3, atol=1e-3)


def test_denoised_prediction_of_a_flow_is_where_it_leads():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    sample, output = torch.randn(2, 1, 4, 8, 8)
    level = PipelineSchedule(scheduler).level(4)
    led = scheduler.step(output, scheduler.timesteps[4], sample).prev_sample  # the last step
    torch.testing.assert_close(denoised(scheduler, output, None, sample, angle(level, True)), led)


@pytest.mark.parametrize("joined", [True, False], ids=["one call", "two calls"])
def test_forecasts_are_combined_as_the_pipeline_combines_truths(joined):
    random = torch.Generator().manual_seed(0)
    uncond, change, *errors = torch.randn(4, 2, 8, 6, 6, generator=random)
    cond, errors = uncond + 0.1 * change, [0.01 * error for error in errors]

    def guided(one, other):  # one channel in two is a variance; the second sample is rescaled, as guidance may be
        return -(one + 7.0 * (other - one))[:, :4] * torch.tensor([1.0, 0.7]).reshape(2, 1, 1, 1)

    truths, wrong = (uncond, cond), (uncond + errors[0], cond + errors[1])
    if joined:
        truths, wrong = ([torch.cat(pair)] for pair in (truths, wrong))
    found = combined([{"sample": one} for one in wrong], [(one,) for one in truths], guided(uncond, cond))
    torch.testing.assert_close(found, guided(uncond + errors[0], cond + errors[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("output", [None, torch.zeros(3, 4), torch.zeros(2, 3), [torch.zeros(4), torch.zeros(5)], ()])
def test_predictions_that_do_not_fit_are_not_combined(output):
    assert combined([output], [output], torch.zeros(2, 4)) is None


def test_noise_of_a_schedulers_own_is_told_apart():
    kept = {
        "EulerDiscreteScheduler": (1.0, 0.0),
        "EulerAncestralDiscreteScheduler": (2.0, 0.0),
        "DPMSolverMultistepScheduler": (1.0, 1.0),
        "LCMScheduler": (math.inf, 0.0),
    }
    assert {name: carried_by(getattr(diffusers, name)()) for name in kept} == kept
    assert carried_by(diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")) == (2.0, 1.0)
    assert carried_by(diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True))[0] == math.inf
    assert carried_by(diffusers.EDMEulerScheduler()) is None


def test_what_is_no_sum_of_predictions_is_not_taken_for_a_right_forecast():
    """As where a pipeline lays tokens out as an image: projections would find that nothing was missed."""
    truths = torch.randn(2, 2, 16, 4, generator=torch.Generator().manual_seed(0))
    given = truths[0] + 7.0 * (truths[1] - truths[0])
    wrong = list(truths + 0.5)
    assert combined(wrong, list(truths), given + 0.001).isfinite().all()
    given[1] = given[1].T.reshape(16, 4)
    found = combined(wrong, list(truths), given)
    assert found[0].isfinite().all() and found[1].isnan().all()

"""Which of diffusers' schedulers are corrected, and where they must not be."""

import copy

import diffusers
import pytest
import torch
from comfy_accel.accel.hosts.diffusers import deep_cache as host
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from comfy_accel.accel.hosts.diffusers.predictions import _copy_to_cpu, facts_of
from comfy_accel.accel.hosts.diffusers.schedule import PipelineSchedule
from kit import deep_transformers, tiny_pipelines
from kit.blocks import heard
from kit.step_cache import corrections_told, every
from torch._subclasses.fake_tensor import FakeTensorMode

EVERY_SECOND = every(2)


@pytest.fixture
def ended(monkeypatch):
    """Of each run that ended: whether it corrects."""
    return corrections_told(monkeypatch, host)


def cached(pipe, sample=tiny_pipelines.sample, settings=EVERY_SECOND, **arguments):
    with deep_cache(pipe, settings):
        return sample(pipe, **arguments)


def by_hand(pipe, begin=0, **told):
    """A loop that tells its scheduler's steps more than a pipeline does, from the one at `begin` on."""
    pipe.scheduler.set_timesteps(8)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * pipe.scheduler.init_noise_sigma
    context = torch.zeros(1, 5, tiny_pipelines.CONTEXT_DIM)
    with pipe.progress_bar(total=8), torch.no_grad():
        for index, time in enumerate(pipe.scheduler.timesteps):
            given = pipe.scheduler.scale_model_input(latent, time)
            out = pipe.unet(given, time, encoder_hidden_states=context).sample
            latent = pipe.scheduler.step(out, time, latent, **(told if index >= begin else {})).prev_sample
    return latent


def sd(scheduler="EulerDiscrete", *kind):
    return lambda: tiny_pipelines.pipeline(f"{scheduler}Scheduler", *kind)


def clipping(scheduler=None):
    """Predictions are clipped; or the scheduler's config says so, which was made from another scheduler's."""
    pipe = sd("DDIM")()
    pipe.scheduler.register_to_config(clip_sample=True)
    if scheduler is not None:
        pipe.scheduler = scheduler.from_config({**pipe.scheduler.config, "clip_sample": True})
        assert pipe.scheduler.config.clip_sample
    return pipe


def two_transformers():
    second = deep_transformers.transformer("Wan", 1, num_layers=9)
    return deep_transformers.pipeline("WanPipeline", transformer_2=second, boundary_ratio=0.6)


def changed(pipe, step, timestep, tensors):
    """As pipelines change the latent for a mask."""
    return {"latents": tensors["latents"] + (step == 3)}


ONCE = ("EulerDiscrete", "DPMSolverMultistep", "UniPCMultistep", "DEISMultistep", "LMSDiscrete", "DDIM")
NOISY, TWICE = ("EulerAncestralDiscrete", "LCM"), ("HeunDiscrete", "KDPM2Discrete", "PNDM")
IMAGE = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
FLOW = {"sample": deep_transformers.sample, "steps": 8}
CHANGED = {"callback_on_step_end": changed, "callback_on_step_end_tensor_inputs": ["latents"]}
RUNS = {
    **{scheduler: (sd(scheduler), {"steps": 20}, [True]) for scheduler in (*ONCE, *TWICE)},
    **{scheduler: (sd(scheduler), {"steps": 20}, [False]) for scheduler in NOISY},
    "clipped predictions": (clipping, {}, [False]),
    "another scheduler's config": (lambda: clipping(diffusers.DPMSolverMultistepScheduler), {"steps": 12}, [True]),
    "Flux": (lambda: deep_transformers.pipeline("FluxPipeline"), FLOW, [True]),
    "SD3": (lambda: deep_transformers.pipeline("StableDiffusion3Pipeline"), FLOW, [True]),
    "two transformers": (two_transformers, FLOW, [True]),
    "a latent that somebody changes": (sd(), {"steps": 8, **CHANGED}, [False]),
    "from an image": (sd("EulerDiscrete", "StableDiffusionImg2ImgPipeline"), {"image": IMAGE, "strength": 0.5}, [True]),
    "a plain step": (sd(), {"sample": by_hand}, [True]),
    "a step that is told nothing": (sd(), {"sample": by_hand, "generator": None}, [True]),
    "a step that is told more": (sd(), {"sample": by_hand, "s_noise": 1.1}, [False]),
}
"""Name → the pipeline, how it is called, and whether its runs are corrected: those that add no noise, as far as all is
known that happens to the latent."""


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_corrected_where_all_is_known_that_happens_to_the_latent(ended, name):
    make, how, are_corrected = RUNS[name]
    assert cached(make(), **how).isfinite().all()
    assert ended == are_corrected


def test_noise_that_a_scheduler_is_told_to_add_ends_correcting_and_skipping(ended):
    """DDIM's eta, from its first step on."""
    pipe, arguments = tiny_pipelines.pipeline("DDIMScheduler"), {"steps": 6, "eta": 1.0}
    made, counts = deep_transformers.sample_cached(pipe, EVERY_SECOND, tiny_pipelines.sample, **arguments)
    assert torch.equal(made, tiny_pipelines.sample(pipe, **arguments))
    assert ended == [False] and counts == [(6, 0)]


def test_noise_that_comes_after_skipped_steps_skips_nothing_more(ended, caplog):
    made = cached(tiny_pipelines.pipeline("DDIMScheduler"), by_hand, begin=4, eta=1.0)
    assert made.isfinite().all() and "told only in its steps" in caplog.text


def test_step_of_a_copied_scheduler_is_the_copys(ended):
    """As pipelines do that try a step out."""

    def copied(pipe, step, timestep, tensors):
        other, before = copy.deepcopy(pipe.scheduler), pipe.scheduler.step_index
        other.step(torch.zeros(1, 4, 8, 8), pipe.scheduler.timesteps[before], torch.zeros(1, 4, 8, 8))
        steps.append((other.step_index - before, pipe.scheduler.step_index - before))
        return {}

    steps = []
    pipe = tiny_pipelines.pipeline("DPMSolverMultistepScheduler")
    made = cached(pipe, steps=8, callback_on_step_end=lambda *given: copied(*given) if given[1] < 7 else {})
    assert steps == [(1, 0)] * 7
    assert torch.equal(made, cached(pipe, steps=8))
    assert ended == [True, True]


def test_nothing_is_foretold_across_a_change_of_guidance():
    def changed(pipe, step, timestep, tensors):
        pipe._guidance_scale = 5.0 if step >= 3 else 7.5
        return tensors

    def taken(**how):
        with heard("deep_cache_run") as told:
            cached(pipe, settings=every(9), steps=8, **how)
        return told[-1]["skipping"].steps_taken

    pipe = tiny_pipelines.pipeline("EulerDiscreteScheduler")
    assert taken() == "FFSSSSSS" and taken(callback_on_step_end=changed) == "FFSSFFSS"


def test_half_precision_stays(ended):
    pipe = tiny_pipelines.pipeline("DPMSolverMultistepScheduler")
    pipe.unet.to(torch.bfloat16)
    given, forward = set(), pipe.unet.forward

    def noted(sample, *args, **kwargs):
        given.add(sample.dtype)
        return forward(sample, *args, **kwargs)

    pipe.unet.forward = noted
    contexts = torch.randn(2, 1, 5, tiny_pipelines.CONTEXT_DIM, dtype=torch.bfloat16)
    names = ("prompt_embeds", "negative_prompt_embeds")
    with deep_cache(pipe, EVERY_SECOND):
        pipe(
            **dict(zip(names, contexts, strict=True)), num_inference_steps=8, output_type="latent", height=64, width=64
        )
    assert given == {torch.bfloat16}
    assert ended == [True]


@pytest.mark.parametrize("options", [{}, {"use_karras_sigmas": True}, {"solver_order": 3}])
def test_response_tells_where_the_scheduler_leads(options):
    """Of predictions that it has never seen; the scheduler itself and random numbers stay as they are."""
    scheduler = diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", **options)
    scheduler.set_timesteps(12)
    state, random = torch.get_rng_state(), torch.Generator().manual_seed(0)
    response = facts_of(PipelineSchedule(scheduler), 0).response
    assert scheduler.step_index is None and torch.equal(state, torch.get_rng_state())
    predictions = torch.randn(12, 4, generator=random)
    latent = torch.zeros(4)
    for time, level, prediction in zip(scheduler.timesteps, response.levels, predictions, strict=True):
        output = (latent * (1 + level**2) ** 0.5 - prediction) / level  # its latents have unit variance
        latent = scheduler.step(output, time, latent).prev_sample
    torch.testing.assert_close(torch.tensor(response.effects[-1]).float() @ predictions, latent, rtol=1e-2, atol=1e-3)


def test_scheduler_that_went_on_cannot_be_measured():
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(6)
    latent = torch.zeros(1, 4, 8, 8)
    scheduler.step(latent, scheduler.timesteps[0], scheduler.scale_model_input(latent, scheduler.timesteps[0]))
    facts = facts_of(PipelineSchedule(scheduler), 0)
    assert facts.adds_noise and not facts.gains and facts.response is None


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_copy_of_a_scheduler_is_on_the_cpu():
    """Flow matching's keeps its noise levels on the device."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    with FakeTensorMode(allow_non_fake_inputs=True):
        scheduler.set_timesteps(6, device="cuda")
        copied = _copy_to_cpu(scheduler)
        assert scheduler.sigmas.device.type == "cuda"
    assert {one.device.type for one in vars(copied).values() if isinstance(one, torch.Tensor)} == {"cpu"}


def test_flow_at_noise_levels_that_are_ratios_is_measured_like_any():
    """As Cosmos has: noise levels far above 1, and a flow that is predicted."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[80.0, 10.0, 1.0])
    facts = facts_of(PipelineSchedule(scheduler), 0)
    assert not facts.is_flow and facts.response is not None
    assert facts.gains == pytest.approx([1 - 10 / 80, 1 - 1 / 10, 1.0], rel=1e-3)


def test_levels_of_continuous_timesteps_are_the_schedulers_sigmas():
    scheduler = diffusers.EulerDiscreteScheduler(prediction_type="v_prediction", timestep_type="continuous")
    scheduler.set_timesteps(5)
    assert list(PipelineSchedule(scheduler).levels.values()) == scheduler.sigmas.tolist()[:5]

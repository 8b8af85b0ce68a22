"""DeepCache in a pipeline, without diffusers: schedules as its schedulers have them, and what may go wrong."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from comfy_accel.accel.hosts.diffusers.deep_cache import deep_cache
from comfy_accel.accel.hosts.diffusers.schedule import PipelineSchedule, noise_levels
from kit.step_cache import every

TRAINED = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0)


def scheduler(timesteps, **more):
    return SimpleNamespace(timesteps=torch.tensor(timesteps), **{"alphas_cumprod": TRAINED, **more})


class Ddim(SimpleNamespace):
    """A scheduler whose step can be measured."""

    config = SimpleNamespace(prediction_type="epsilon")

    def scale_model_input(self, sample, timestep):
        return sample

    def step(self, model_output, timestep, sample, return_dict=True):
        times = self.timesteps.tolist()
        later = times[times.index(int(timestep)) + 1 :]
        now, then = TRAINED[int(timestep)], TRAINED[later[0]] if later else torch.tensor(1.0)
        image = (sample - (1 - now).sqrt() * model_output) / now.sqrt()
        return (then.sqrt() * image + (1 - then).sqrt() * model_output,)


class UNet(torch.nn.Module):
    """called: at which timesteps."""

    def __init__(self):
        super().__init__()
        self.called = []

    def forward(self, sample, timestep):
        self.called.append(int(torch.as_tensor(timestep).max()))
        return torch.tanh(sample)


class Pipe:
    """Calls the UNet once for each timestep, under a progress bar."""

    def __init__(self, timesteps=(900, 700, 500, 300, 100)):
        self.unet, self.timesteps = UNet(), list(timesteps)
        self.scheduler = Ddim(timesteps=torch.tensor([999, 998]), alphas_cumprod=TRAINED)

    def progress_bar(self, timesteps=None, total=None):
        return nullcontext() if timesteps is None else timesteps

    def __call__(self, size=(4, 4), batched=False, iterated=False):
        """The latent, and at which timesteps the UNet was called."""
        self.unet.called.clear()
        self.scheduler.timesteps = torch.tensor(self.timesteps)
        x = torch.full((2, 1, *size), 1.5)
        with nullcontext() if iterated else self.progress_bar(total=len(self.timesteps)):
            for time in self.progress_bar(self.scheduler.timesteps) if iterated else self.scheduler.timesteps:
                x = self.scheduler.step(self.unet(x, time.expand(2) if batched else time), time, x)[0]
        return x, list(self.unet.called)


# Schedules


def test_noise_levels_are_those_of_training_and_between_them():
    at = noise_levels(scheduler([]), [0, 500, 500.5, 501, 999, 2000])
    for time, level in ((0, at[0]), (500, at[1]), (999, at[4])):
        assert math.isclose(level, ((1 - TRAINED[time]) / TRAINED[time]).sqrt(), rel_tol=1e-4)
    assert at[1] < at[2] < at[3] and math.isclose(at[2], (at[1] * at[3]) ** 0.5, rel_tol=1e-9)
    assert at[5] == at[4]


def test_scheduler_without_training_schedule_says_its_sigmas_or_counts_its_timesteps():
    told = SimpleNamespace(timesteps=torch.tensor([0.5, -0.5]), sigmas=torch.tensor([8.0, 2.0, 0.0]))
    assert PipelineSchedule(told).run_from(0) == (8.0, 2.0, 0.0)
    assert PipelineSchedule(told).level_at(0.5) == 2.0
    silent = SimpleNamespace(timesteps=torch.tensor([3.0, 1.0]))
    assert PipelineSchedule(silent).run_from(0) == (3.0, 1.0, 0.0)


def test_schedule_without_any_signal_has_a_finite_level():
    alphas = TRAINED.clone()
    alphas[-1] = 0
    assert noise_levels(scheduler([], alphas_cumprod=alphas), [999])[0] == pytest.approx(4096, rel=1e-3)


def run_of(timesteps, place=0, **more):
    """The timesteps at which steps start, by their noise levels."""
    schedule = PipelineSchedule(scheduler(timesteps, **more))
    times = {level: time for time, level in schedule.levels.items()}
    return [times.get(level, level) for level in schedule.run_from(place)]


def test_steps_are_timesteps_but_for_repeated_and_intermediate_ones():
    assert run_of([900, 600, 300]) == [900, 600, 300, 0.0]
    assert run_of([900, 600, 600, 300, 300], order=2) == [900, 600, 300, 0.0]  # Heun
    assert run_of([900, 700, 600, 400, 300], order=2) == [900, 600, 300, 0.0]  # KDPM2
    assert run_of([900, 600, 600, 300]) == [900, 600, 300, 0.0]  # PNDM
    assert run_of([900, 600, 300], place=1) == [600, 300, 0.0]
    assert run_of([100, 500, 900]) == [100, 500, 900, math.inf]


@pytest.mark.parametrize("timestep", [600, 600.0, torch.tensor(600), torch.tensor([600, 600])])
def test_timestep_is_found_as_number_or_tensor_and_others_are_nowhere(timestep):
    schedule = PipelineSchedule(scheduler([900, 600, 600, 300]))
    assert schedule.place_of(timestep) == 1
    assert schedule.place_of(601) is schedule.place_of(torch.tensor([900, 600])) is None
    assert (schedule.level_at(0.0), schedule.level_at(1.0)) == (math.inf, 0.0)
    assert schedule.level_at(0.25) == noise_levels(schedule.scheduler, [749.25])[0]


def flow(timesteps, step=None, begin=None, **config):
    """A scheduler of a rectified flow, which counts its steps."""
    times = torch.tensor(timesteps, dtype=torch.float32)
    sigmas = torch.cat([times / 1000, torch.zeros(1)])
    return SimpleNamespace(
        timesteps=times, sigmas=sigmas, step_index=step, begin_index=begin, config=SimpleNamespace(**config)
    )


def test_noise_of_a_flow_is_a_share():
    schedule = PipelineSchedule(flow([1000, 600, 200]))
    assert schedule.is_flow and schedule.run_from(1) == pytest.approx((0.6, 0.2, 0.0))
    assert schedule.level_at(0.5) == pytest.approx(0.6) and schedule.level_at(0.0) == math.inf
    trained = flow([1000, 600, 200], use_flow_sigmas=True)
    trained.alphas_cumprod = TRAINED  # as UniPC has them even so
    assert PipelineSchedule(trained).run_from(1) == pytest.approx((0.6, 0.2, 0.0))
    turned = flow([0, 400, 800], invert_sigmas=True)
    assert PipelineSchedule(turned).run_from(0) == pytest.approx((1.0, 0.6, 0.2, 0.0))
    assert not PipelineSchedule(SimpleNamespace(timesteps=torch.ones(1), sigmas=torch.tensor([80.0, 0.0]))).is_flow


LINEAR = [1000.0 - 50 * place for place in range(20)]


@pytest.mark.parametrize("step", range(20))
def test_time_is_found_however_the_model_is_told_it(step):
    time = torch.tensor(LINEAR[step])
    for counted in ({"step": step}, {"begin": step}):
        schedule = PipelineSchedule(flow(LINEAR, **counted))
        for told in (time, time / 1000, 1 - time / 1000, (1000 - time) / 1000, 1000 - time):
            assert schedule.place_of(told) == step
            assert schedule.place_of(told.to(torch.float16).expand(2)) == step
            assert schedule.place_of(told.to(torch.bfloat16).expand(2)) == step
        assert schedule.place_of((time.to(torch.bfloat16) / 1000).expand(2)) == step
        assert schedule.place_of(torch.stack([time, 0 * time, time])[None]) == step
        assert schedule.place_of(torch.stack([time, time / 2])) is None


def test_time_is_found_where_many_steps_are_close_to_one_another():
    shares = [1 - step / 100 for step in range(100)]
    times = [1000 * 8 * share / (1 + 7 * share) for share in shares]
    for step, time in enumerate(torch.tensor(times).to(torch.bfloat16)):
        assert PipelineSchedule(flow(times, step=step)).place_of(time / 1000) == step


def test_time_that_is_not_due_is_somebody_elses():
    schedule = PipelineSchedule(flow([900, 600, 300], step=1))
    assert [schedule.place_of(time) for time in (900.0, 600.0, 0.6, 0.3, 123.0)] == [None, 1, 1, None, None]
    schedule.scheduler.step_index = 3
    assert [schedule.place_of(time) for time in (900.0, 300.0)] == [None, None]
    schedule.scheduler.step_index = None  # nothing is counted yet, and where it begins is not said
    assert [schedule.place_of(time) for time in (900.0, 600.0, 0.3)] == [0, 1, 2]


# Runs


@pytest.mark.parametrize("iterated", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_every_image_is_a_run_whose_skipped_steps_call_no_model(counts, batched, iterated):
    pipe = Pipe()
    plain, _ = pipe()
    with deep_cache(pipe, every(2)):
        image, called = pipe(batched=batched, iterated=iterated)
        assert counts == [(3, 2)] and called == [900, 700, 300]
        assert not torch.equal(image, plain)
        pipe(size=(6, 3), iterated=iterated)
    assert counts == [(3, 2), (3, 2)]
    assert torch.equal(pipe()[0], plain)


def test_schedule_that_goes_back_starts_a_run(counts):
    pipe = Pipe()
    with deep_cache(pipe, every(5)), pipe.progress_bar(total=6):
        for _ in range(2):
            assert pipe()[1] == [900, 700]
    assert counts == [(2, 3), (2, 3)]


def test_call_outside_the_schedule_or_of_a_pipeline_without_one_is_plain(counts):
    pipe = Pipe()
    with deep_cache(pipe, every(3)):
        for time in pipe.progress_bar([123] * 4):
            pipe.unet(torch.ones(1, 1, 4, 4), time)
    del pipe.scheduler
    with deep_cache(pipe, every(2)):
        for _ in pipe.progress_bar([1] * 4):
            pipe.unet(torch.ones(1, 1, 4, 4), 900)
    assert counts == [] and len(pipe.unet.called) == 8


# What may go wrong


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sigmas": torch.tensor([8.0])}, "has a schedule that it does not understand"),
        ({"sigmas": torch.tensor([8.0, 2.0, 4.0, 1.0, 0.5])}, "go up and down"),
        ({"step_index": 4}, "DeepCache: a model of Pipe is called at other timesteps than its scheduler's"),
    ],
)
def test_schedule_that_is_not_understood_is_computed_in_full(change, said, counts, caplog):
    pipe = Pipe()
    pipe.scheduler = Ddim(timesteps=None, **change)
    if "step_index" in change:
        pipe.timesteps = [900, 700, 500, 300]  # one too few for what it has counted
    plain, _ = pipe()
    with deep_cache(pipe, every(2)):
        assert torch.equal(pipe()[0], plain)
    assert said in caplog.text and caplog.text.count("every step r") == 1
    assert sum(skipped for _, skipped in counts) == 0


def test_pipeline_without_a_denoiser_is_left_alone(caplog):
    pipe = SimpleNamespace()
    with deep_cache(pipe, every(3)):
        assert vars(pipe) == {}
    assert "SimpleNamespace has none of unet, transformer" in caplog.text

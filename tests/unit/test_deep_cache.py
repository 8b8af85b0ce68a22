"""DeepCache without a host: which step is full, and which stream gets which feature."""

import pytest
import torch
from comfy_accel.accel.deep_cache import DeepCacheRun, DeepCacheSettings, refresh_of, step_of

SCHEDULE = (14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)


# The decision


@pytest.mark.parametrize("step", range(6))
def test_level_of_a_step_belongs_to_it(step):
    sigma = SCHEDULE[step]
    assert step_of(sigma, SCHEDULE) == step
    assert step_of(sigma * (1 + 1e-6), SCHEDULE) == step
    assert step_of(sigma * (1 - 1e-6), SCHEDULE) == step


@pytest.mark.parametrize("step", range(5))
def test_midpoint_belongs_to_the_step_that_it_refines(step):
    assert step_of((SCHEDULE[step] * SCHEDULE[step + 1]) ** 0.5, SCHEDULE) == step


@pytest.mark.parametrize("sigma, step", [(0.0, 5), (1e-3, 5), (100.0, 0)])
def test_level_outside_the_schedule_belongs_to_its_nearest_end(sigma, step):
    assert step_of(sigma, SCHEDULE) == step


@pytest.mark.parametrize("sigma, step", [(0.0, 0), (0.3, 0), (0.5, 1), (7.9, 4), (8.0, 5), (14.6, 5)])
def test_rising_schedule_is_read_upwards(sigma, step):
    assert step_of(sigma, SCHEDULE[::-1]) == step


def test_neighbours_of_a_thousand_step_schedule_stay_apart():
    schedule = [14.6 * (0.03 / 14.6) ** (i / 999) for i in range(1000)] + [0.0]
    assert [step_of(sigma, schedule) for sigma in schedule[:-1]] == list(range(1000))


@pytest.mark.parametrize(
    "interval, expected", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 0, 2, 2, 4, 4]), (3, [0, 0, 0, 3, 3, 3]), (100, [0] * 6)]
)
def test_every_interval_th_step_refreshes(interval, expected):
    assert [refresh_of(step, interval) for step in range(6)] == expected


@pytest.mark.parametrize("settings", [{"interval": 0}, {"interval": -3}, {"depth": -1}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="below"):
        DeepCacheSettings(**settings)


def test_depth_zero_means_by_model():
    assert DeepCacheSettings(3, 0).depth is None


# Streams


class Sampler:
    """Drives a run with a 'model' whose fresh feature is the sigma that it is computed at."""

    def __init__(self, interval=3, schedule=SCHEDULE):
        self.run = DeepCacheRun(DeepCacheSettings(interval))
        self.run.schedule = schedule

    def evaluate(self, sigma, *calls):
        """The features, one list a call, that the shallow part gets; a call is a string of uuids."""
        self.run.begin_evaluation(sigma)
        return [self.call(sigma, uuids) for uuids in calls]

    def call(self, sigma, uuids, batch=2, size=8, window=None, conds=None):
        x = torch.zeros(batch * len(uuids), 4, size, size)
        keys = self.run.streams(x, list(uuids), conds or list(range(len(uuids))), window)
        if keys is None:
            return None
        if self.run.can_skip(keys):
            feature = self.run.gather(keys)
            self.run.count(skipped=True)
        else:
            feature = self.run.exchange(keys, torch.full((batch * len(uuids), 3, size, size), float(sigma)))
            self.run.count(skipped=False)
        return [chunk.mean().item() for chunk in feature.chunk(len(uuids))]


def test_steps_between_reuse_the_last_full_step():
    sampler = Sampler()
    got = [sampler.evaluate(sigma, "ab")[0] for sigma in SCHEDULE[:-1]]
    first, second = pytest.approx([14.6] * 2), pytest.approx([2.0] * 2)
    assert got == [first, first, first, second, second, second]
    assert (sampler.run.full_steps, sampler.run.skipped_steps) == (2, 4)


@pytest.mark.parametrize("splits", [(False, True), (True, False)])
def test_joined_and_split_calls_share_their_streams(splits):
    sampler = Sampler()
    seen = []
    for sigma, split in zip(SCHEDULE, splits, strict=False):
        sampler.run.begin_evaluation(sigma)
        if split:
            seen.append([sampler.call(sigma, "b", conds=[1])[0], sampler.call(sigma, "a", conds=[0])[0]][::-1])
        else:
            seen.append(sampler.call(sigma, "ab"))
    assert seen[1] == pytest.approx([14.6, 14.6])
    assert sampler.run.skipped_steps == 1


def test_new_stream_recomputes_and_the_old_one_in_its_batch_does_not():
    sampler = Sampler()
    sampler.evaluate(14.6, "a")
    assert sampler.evaluate(8.0, "ab") == [pytest.approx([14.6, 8.0])]
    assert sampler.evaluate(4.0, "ab") == [pytest.approx([14.6, 8.0])]


def test_feature_of_an_earlier_cycle_is_never_used():
    sampler = Sampler()
    sampler.evaluate(14.6, "a")
    assert sampler.evaluate(1.0, "a") == [[1.0]]  # step 4, and the full step 3 was never evaluated
    assert sampler.evaluate(8.0, "a") == [[8.0]]  # back up, as restarting samplers do


def test_second_call_of_one_evaluation_is_a_stream_of_its_own():
    sampler = Sampler()
    sampler.run.begin_evaluation(14.6)
    assert sampler.call(1.0, "a") == [1.0]
    assert sampler.call(2.0, "a") == [2.0]
    sampler.run.begin_evaluation(8.0)
    assert sampler.call(0.0, "a") == [1.0]
    assert sampler.call(0.0, "a") == [2.0]


@pytest.mark.parametrize("other", [{"size": 6}, {"batch": 1}, {"window": (0, 1)}, {"conds": [1]}])
def test_another_shape_window_or_condition_is_another_stream(other):
    sampler = Sampler()
    sampler.evaluate(14.6, "a")
    sampler.run.begin_evaluation(8.0)
    assert sampler.call(8.0, "a", **other) == [8.0]


def test_features_are_copies_both_ways():
    run = Sampler().run
    run.begin_evaluation(14.6)
    keys = run.streams(torch.zeros(1, 4, 8, 8), ["a"], [0], None)
    feature = torch.ones(1, 3, 8, 8)
    run.exchange(keys, feature)
    feature.zero_()
    run.gather(keys).zero_()
    assert run.gather(keys).mean() == 1


def test_call_without_evaluation_schedule_or_uuids_is_plain():
    run = DeepCacheRun(DeepCacheSettings())
    x = torch.zeros(2, 4, 8, 8)
    assert run.streams(x, ["a"], [0], None) is None
    run.begin_evaluation(1.0)
    assert run.streams(x, ["a"], [0], None) is None
    run.schedule = SCHEDULE
    run.begin_evaluation(1.0)
    assert run.streams(x, ["a"], [0], None) is not None
    assert run.streams(x, None, [0], None) is None
    assert run.streams(x, ["a"], [], None) is None
    assert run.streams(x[:1], ["a", "b"], [0, 1], None) is None
    run.failed = True
    assert run.streams(x, ["a"], [0], None) is None


def test_second_evaluation_of_a_step_counts_no_step():
    sampler = Sampler()
    for sigma in (14.6, 8.0, 8.0, 4.0, 4.0, 2.0, 2.0):
        sampler.evaluate(sigma, "a", "b")
    assert (sampler.run.full_steps, sampler.run.skipped_steps) == (2, 2)


def test_closed_run_holds_nothing():
    sampler = Sampler()
    sampler.evaluate(14.6, "ab")
    sampler.run.close()
    assert not sampler.run._features
    assert sampler.run.boundary is None
    assert sampler.call(1.0, "a") is None

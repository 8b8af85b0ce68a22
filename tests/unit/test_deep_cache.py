"""DeepCache without a host: which step is full, and which CFG branch gets which feature."""

import pytest
import torch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit.step_cache import SCHEDULE, Sampler, every, features_of

# Settings


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"start_percent": -0.1}, "start_percent -0.1 is outside 0.0 to 1.0."),
        ({"end_percent": 1.5}, "end_percent 1.5 is outside 0.0 to 1.0."),
        ({"end_percent": float("nan")}, "end_percent nan is outside 0.0 to 1.0."),
        (
            {"start_percent": 0.8, "end_percent": 0.2},
            "start_percent (0.8) must not be above end_percent (0.2).",
        ),
        ({"quality": 0.0}, "quality 0.0 is not a number of dB above 0."),
        ({"quality": float("nan")}, "quality nan is not a number of dB above 0."),
    ],
)
def test_settings_out_of_range_are_refused_with_the_range(settings, said):
    with pytest.raises(ValueError) as error:
        DeepCacheSettings(**settings)
    assert str(error.value) == f"DeepCache: {said}"


# CFG branches


def test_steps_between_reuse_the_last_full_step():
    sampler = Sampler()
    got = [sampler.evaluate(sigma, "ab")[0] for sigma in SCHEDULE[:-1]]
    first, second = pytest.approx([14.6] * 2), pytest.approx([2.0] * 2)
    assert got == [first, first, first, second, second, second]
    assert (sampler.run.full_steps, sampler.run.skipped_steps) == (2, 4)


@pytest.mark.parametrize("splits", [(False, True), (True, False)])
def test_joined_and_split_calls_share_their_branches(splits):
    sampler = Sampler()
    seen = []
    for sigma, split in zip(SCHEDULE, splits, strict=False):
        sampler.run.begin(sigma)
        if split:
            seen.append([sampler.call(sigma, "b", conds=[1])[0], sampler.call(sigma, "a", conds=[0])[0]][::-1])
        else:
            seen.append(sampler.call(sigma, "ab"))
    assert seen[1] == pytest.approx([14.6, 14.6])
    assert sampler.run.skipped_steps == 1


def test_new_branch_recomputes_and_the_old_one_in_its_batch_does_not():
    sampler = Sampler()
    sampler.evaluate(14.6, "a")
    assert sampler.evaluate(8.0, "ab") == [pytest.approx([14.6, 8.0])]
    assert sampler.evaluate(4.0, "ab") == [pytest.approx([14.6, 8.0])]


def test_feature_of_an_earlier_cycle_is_never_used():
    sampler = Sampler()
    sampler.evaluate(14.6, "a")
    assert sampler.evaluate(1.0, "a") == [[1.0]]  # step 4, and the full step 3 was never evaluated
    assert sampler.evaluate(8.0, "a") == [[8.0]]  # back up, as restarting samplers do


def test_second_call_of_one_evaluation_is_a_branch_of_its_own():
    sampler = Sampler()
    sampler.run.begin(14.6)
    assert sampler.call(1.0, "a") == [1.0]
    assert sampler.call(2.0, "a") == [2.0]
    sampler.run.begin(8.0)
    assert sampler.call(0.0, "a") == [1.0]
    assert sampler.call(0.0, "a") == [2.0]


@pytest.mark.parametrize("other", [{"size": 6}, {"batch": 1}, {"window": (0, 1)}, {"conds": [1]}])
def test_another_shape_window_or_condition_is_another_stream(other):
    sampler = Sampler()
    sampler.evaluate(14.6, "a")
    sampler.run.begin(8.0)
    assert sampler.call(8.0, "a", **other) == [8.0]


def test_features_are_copies_both_ways():
    sampler = Sampler()
    sampler.run.begin(14.6)
    features, feature = sampler.features, torch.ones(1, 3, 8, 8)
    keys = features.branches(torch.zeros(1, 4, 8, 8), ["a"], [0], None)
    features.exchange(keys, feature)
    feature.zero_()
    features.gather(keys).zero_()
    assert features.gather(keys).mean() == 1


def test_call_without_evaluation_schedule_or_uuids_is_plain():
    x = torch.zeros(2, 4, 8, 8)
    for levels, begins in ((SCHEDULE, False), ((), True), ((1.0,), True)):
        features = features_of(torch.nn.Identity(), levels=levels)
        if begins:
            features.run.begin(1.0)
        assert features.branches(x, ["a"], [0], None) is None
    features = features_of(torch.nn.Identity())
    features.run.begin(1.0)
    assert features.branches(x, ["a"], [0], None) is not None
    assert features.branches(x, None, [0], None) is None
    assert features.branches(x, ["a"], [], None) is None
    assert features.branches(x[:1], ["a", "b"], [0, 1], None) is None
    features.run.run_in_full("a test says so")
    assert features.branches(x, ["a"], [0], None) is None


def test_second_evaluation_of_a_step_counts_no_step():
    sampler = Sampler()
    for sigma in (14.6, 8.0, 8.0, 4.0, 4.0, 2.0, 2.0):
        sampler.evaluate(sigma, "a", "b")
    assert (sampler.run.full_steps, sampler.run.skipped_steps) == (2, 2)


def test_closed_run_holds_nothing():
    sampler = Sampler()
    sampler.evaluate(14.6, "ab")
    assert sampler.features.bytes
    sampler.run.close()
    assert not sampler.features.bytes and not sampler.run._models
    assert sampler.call(1.0, "a") is None


def test_going_back_up_recomputes_though_the_interval_is_long():
    sampler = Sampler(settings=every(5))
    assert sampler.full_sigmas(14.6, 8.0, 4.0, 2.0, 1.0, 0.5) == [14.6, 0.5]
    # 8.0 is four steps before the last full one: nothing of the future is used, and counting begins anew.
    assert sampler.evaluate(8.0, "a") == [[8.0]]
    assert sampler.evaluate(4.0, "a") == [[8.0]]


def test_branch_keeps_its_feature_only_where_it_fits():
    features = features_of(torch.nn.Identity())
    x = torch.zeros(2, 4, 8, 8)
    for sigma, uuids, size in ((14.6, "ab", 4), (8.0, "ac", 6), (4.0, "ac", 6)):
        features.run.begin(sigma)
        keys = features.branches(x, list(uuids), [0, 1], None)
        if sigma == 4.0:
            assert features.can_skip(keys)
        else:
            fresh = torch.full((2, 3, size, size), sigma)
            assert torch.equal(features.exchange(keys, fresh), fresh)
    assert (features.gather(keys) == 8.0).all()


def test_branches_are_told_apart_by_their_variant():
    sampler = Sampler()
    sampler.run.begin(14.6)
    sampler.call(14.6, "a", window="plain")
    sampler.run.begin(8.0)
    assert sampler.call(8.0, "a", window="without block 3") == [8.0]
    assert sampler.call(8.0, "a", window="plain") == pytest.approx([14.6])


def test_steps_outside_the_window_are_full():
    sampler = Sampler(window=(4.0, 1.0))
    assert sampler.full_sigmas(*SCHEDULE[:-1]) == [14.6, 8.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "run, why",
    [
        ({"levels": SCHEDULE[::-1]}, "this run makes noise of an image"),
        ({"levels": (14.6, 4.0, 8.0, 0.0)}, "the noise levels of this run go up and down"),
        ({"why_full": "a test says so"}, "a test says so"),
    ],
)
def test_runs_that_may_skip_nothing_store_nothing_and_say_why(run, why):
    sampler = Sampler(**run)
    for sigma in sampler.run.facts.levels[:-1]:
        assert sampler.evaluate(sigma, "a") == [None]
    assert sampler.run.why_full == why and not sampler.features.bytes


def test_clones_on_several_devices_share_what_is_skipped_and_keep_features_of_their_own():
    sampler, other = Sampler(), torch.nn.Identity()
    beside = sampler.run.of(other)
    assert beside is not sampler.features and sampler.run.of(other) is beside
    assert sampler.run.of(torch.nn.ReLU()) is None
    x = torch.zeros(1, 4, 8, 8)
    for sigma in SCHEDULE[:2]:
        sampler.run.begin(sigma)
        for features, value in ((sampler.features, 1.0), (beside, 2.0)):
            keys = features.branches(x, ["a"], [0], None)
            if features.can_skip(keys):
                assert features.gather(keys).mean() == value
            else:
                features.exchange(keys, torch.full((1, 3), value))
            features.run.count(not features.run.is_full)
    assert sampler.run.letters == "FS"


def test_another_caches_answers_end_corrections_and_comparisons(monkeypatch):
    sampler = Sampler(settings=every(3, points=2))
    shown = []
    monkeypatch.setattr(sampler.run.plan, "note_shown", lambda step, what: shown.append(step))
    latent = torch.rand(1, 4, 8, 8)
    for sigma in SCHEDULE[:-1]:
        sampler.evaluate(sigma, "a", *("b" * (sigma == 8.0)))
        sampler.run.end(latent, sigma, latent / 2)
    assert sampler.run.letters == "FSSFSS"

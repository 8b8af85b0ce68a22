"""The quality target without a host: what a skipped step may cost, how it reaches the final latent, when to compare."""

import math

import pytest
import torch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.policies import quality
from comfy_accel.accel.step_cache.policies.quality import Carried
from comfy_accel.accel.step_cache.refresh import Step
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.step_schedule import angle

LEVELS = (4.0, 2.0, 1.0, 0.5, 0.0)
ANGLES = tuple(map(angle, LEVELS))


def test_error_counts_by_the_share_of_the_prediction_that_its_step_takes_and_the_last_in_full():
    carried = Carried(ANGLES)
    assert [carried.at_end(step) for step in range(4)] == pytest.approx([0.5, 0.5, 0.5, 1])
    assert Carried(ANGLES, kept=2.0, factor=1.5).at_end(1) == pytest.approx(1.5 * 0.75)
    assert Carried(ANGLES, passed_on=0.5).at_end(1) == pytest.approx(0.25)
    assert Carried((ANGLES[0], ANGLES[1], ANGLES[1], 0.0)).at_end(1) == 0, "levels that stay are no step"
    ahead = [Carried(ANGLES, beyond=1.0, passed_on=passed_on).at_end(1) for passed_on in (0.5, 1.0)]
    assert ahead[0] == ahead[1], "later steps take nothing back of what is extrapolated"
    corrected = Carried(ANGLES, is_corrected=True)
    shares = [corrected.at_end(step) / carried.at_end(step) for step in range(4)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1), "full steps correct what came early"


def test_long_step_after_a_short_one_enlarges_its_error_and_those_before_where_the_sampler_extrapolates():
    angles = tuple(map(angle, (4.0, 2.0, 1.0, 0.125, 0.0)))
    even, long = Carried(ANGLES, beyond=1.0), Carried(angles, beyond=1.0)
    enlarged = 0.875 * 2.5
    ratios = [long.at_end(step) / even.at_end(step) for step in range(4)]
    assert ratios == pytest.approx([enlarged, enlarged, 2 * 0.875 * enlarged, 1])
    assert Carried(angles).at_end(2) == pytest.approx(0.875), "a sampler that does not extrapolate"


def test_sampler_that_begins_anew_from_each_prediction_passes_all_of_its_error_on():
    assert [Carried(ANGLES, kept=math.inf).at_end(step) for step in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("quality", [0.0, -1.0, math.inf, math.nan])
def test_quality_that_is_no_number_of_decibels_is_refused(quality):
    with pytest.raises(ValueError, match="quality"):
        DeepCacheSettings(quality=quality)


def run_of(target, errors, levels):
    """Which of the steps are full, where a forecast is off by `errors` of the latent's range for each tenth of a radian
    from the last full one."""
    policy = DeepCacheSettings(quality=target).policy()
    angles = list(map(angle, levels))
    policy.begin(Carried(tuple(angles)))
    letters, last = "", None
    for index in range(len(levels) - 1):
        step = Step(index, index - last if last is not None else 0, *map(angle, levels[index : index + 2]))
        if last is not None and not policy.should_refresh(step, None):
            policy.note_skipped(index)
            letters += "S"
            continue
        off = errors * (angles[last] - angles[index]) / 0.1 if last is not None else 0.0
        if last is not None:
            policy.note_feature(index, torch.tensor([off**2], dtype=torch.float64))
        if policy.wants_probe(index):
            policy.probes += 1
            truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)
            direction = torch.randn(truth.shape, generator=torch.Generator().manual_seed(index))
            policy.compare(index, truth + off * direction, truth)
        policy.note_full(index)
        last, letters = index, letters + "F"
    return policy, letters


EVEN = tuple(2.0 * 0.8**step for step in range(19)) + (0.0,)
ANGLES_OF_EVEN = tuple(map(angle, EVEN))


def test_lower_target_and_smaller_errors_skip_more():
    skipped = [run_of(target, error, EVEN)[1].count("S") for target, error in ((50, 0.02), (40, 0.02), (40, 0.002))]
    assert skipped[0] < skipped[1] < skipped[2]


def test_step_that_a_sampler_comes_back_to_counts_once():
    run, told = DeepCacheRun(DeepCacheSettings(quality=40.0)), []
    run.set_schedule(EVEN)
    run.target.should_refresh = lambda step, drift: step.index == 3
    run.target.note_skipped = run.target.note_full = told.append
    for step in (0, 1, 2, 1, 2, 3, 2, 3, 4):  # as Heun++2
        run.begin_evaluation(EVEN[step])
    assert told == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("adds_noise", [False, True])
def test_run_notes_how_far_on_samplers_evaluate_where_no_layer_follows_the_latent(adds_noise):
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.adds_noise = adds_noise
    run.set_schedule(EVEN)
    for step in range(3):
        run.begin_evaluation(EVEN[step])
        run.begin_evaluation((EVEN[step] * EVEN[step + 1]) ** 0.5)
    assert (run.target._reach > 0.4) is not adds_noise


def test_flow_that_begins_above_a_noise_level_of_1_is_judged_too():
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.is_flow, run.carries = True, (1.0, 1.0)
    run.set_schedule((1.05, 1.02, 0.9, 0.7, 0.4, 0.0))
    for level in run.schedule[:-1]:
        run.begin_evaluation(level)
    assert run.full_steps == 0 and not run.failed
    assert all(0 <= run.target.carried.at_end(step) < math.inf for step in range(5))


def test_step_that_cannot_be_judged_is_full_and_so_are_the_rest(monkeypatch):
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.set_schedule(EVEN)
    run.begin_evaluation(EVEN[0])
    monkeypatch.setattr(run.target, "should_refresh", lambda *_: 1 / 0)
    run.begin_evaluation(EVEN[1])
    assert run.is_full and run.failed and "cannot be judged (ZeroDivisionError" in run.why_full


def test_no_skip_takes_all_that_the_steps_left_may_add():
    """Early skips cost most; later ones could not be paid for."""
    policy = DeepCacheSettings(quality=30.0).policy()
    policy.begin(Carried(tuple(map(angle, EVEN))))
    truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)
    for step in range(3):
        if step:
            policy.note_feature(step, torch.tensor(1.0))
        if step == 1:
            policy.compare(step, truth + 0.1, truth)
        policy.note_full(step)
    assert policy.should_refresh(Step(3, 1, *ANGLES_OF_EVEN[3:5]), None)
    assert -20 * math.log10(policy.estimates[3]) > 30


def test_estimate_keeps_to_the_target():
    for target in (30, 40, 50):
        policy, letters = run_of(target, 0.005, EVEN)
        assert "S" in letters
        assert policy.estimated_db() >= target - 1  # what is learnt later counts too


def test_newest_comparison_is_read_a_step_late_where_the_device_would_be_waited_for(monkeypatch):
    class Later:
        is_later = True

        def __init__(self, tensor):
            self.tensor, self.made = tensor, now[0]

        def read(self):
            waits.append((self.made, now[0], self.tensor.dtype is torch.float32))
            return self.tensor

    now, waits = [0], []
    monkeypatch.setattr(quality, "HostCopy", Later)
    asked = quality.QualityRefresh.should_refresh

    def should_refresh(policy, step, drift):
        now[0] = step.index
        return asked(policy, step, drift)

    monkeypatch.setattr(quality.QualityRefresh, "should_refresh", should_refresh)
    policy, letters = run_of(40, 0.01, EVEN)
    first = waits[0][1]
    assert "S" in letters
    assert policy.probes >= 3
    # A comparison at step i is asked about at step i + 1, and read from i + 2 on; the first alone is waited for. The
    # error of a feature sets out for the host at step i + 1.
    assert all(read >= made + (2 if is_comparison else 1) for made, read, is_comparison in waits if read != first)
    assert policy.estimated_db() >= 38


def test_error_of_the_feature_tells_what_a_step_costs_between_comparisons():
    def estimate(grown):
        policy = DeepCacheSettings(quality=30.0).policy()
        policy.begin(Carried(tuple(map(angle, EVEN))))
        truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)
        for step in range(6):
            if step:
                policy.note_feature(step, torch.tensor(1.0 if step < 5 else grown**2))
            if step == 3:
                policy.compare(step, truth + 0.01, truth)
            policy.note_full(step)
        policy.note_skipped(6)
        return policy.estimated_db()

    assert estimate(1.0) - estimate(2.0) == pytest.approx(20 * math.log10(2))


def test_skipped_steps_that_were_never_compared_count():
    policy, _ = run_of(40, 0.01, EVEN)
    before = policy.estimated_db()
    policy.note_skipped(17)
    assert policy.estimated_db() < before
    known = policy.estimated_db()
    policy.note_full(18)
    assert policy.estimated_db() == pytest.approx(known, abs=0.5)


def test_sampler_that_begins_each_step_anew_is_not_compared():
    policy = DeepCacheSettings(quality=30.0).policy()
    policy.begin(Carried(tuple(map(angle, EVEN)), math.inf))
    policy.note_full(0)
    assert not policy.wants_probe(1)


def test_prediction_of_another_size_is_not_compared():
    policy = DeepCacheSettings(quality=30.0).policy()
    policy.begin(Carried(tuple(map(angle, EVEN))))
    for step, size in enumerate((8, 4), 1):
        policy.note_full(step - 1)
        policy.compare(step, torch.zeros(1, 1, size), torch.linspace(0, 1, size).reshape(1, 1, size))
    assert policy._compared == 1


class Split:
    depth = 1

    def __init__(self, share):
        self.shallow_share = share


def run_with_probes(steps, share, error, calls=(True,), kept=1.0, window=(math.inf, 0.0)):
    """A run whose calls are skipped in a probe as `calls` says; the forecast is off by `error` of the range."""
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.split, run.carries, run.window = Split(share), (kept, 0.0), window
    levels = [2.0 * 0.8**step for step in range(steps)] + [0.0]
    run.set_schedule(levels)
    truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)

    def evaluate(is_probe):
        for skipped in calls if is_probe else [False for _ in calls]:
            run.count(skipped)
        return (truth, truth + error * is_probe)

    for level in levels[:-1]:
        run.begin_evaluation(level)
        if level < levels[0] and (run.is_full or run.is_probing):
            run.target.note_feature(levels.index(level), torch.tensor(error**2))
        if run.is_probing:
            assert torch.equal(run.probed(evaluate, lambda error: True), truth)
        else:
            run.count(not run.is_full)
    return run


@pytest.mark.parametrize("steps", [4, 8, 12, 50])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("error", [0.001, 0.02, 10.0])
def test_comparing_never_costs_more_than_its_share_of_the_run(steps, share, error):
    run = run_with_probes(steps, share, error, kept=2.0)
    assert run.quality_facts()["skipped_work"] >= -quality.OVERHEAD - 1e-9


def test_what_another_cache_answered_is_not_taken_for_a_right_forecast():
    assert run_with_probes(20, 0.1, 0.0, calls=(True, True)).skipped_steps
    for answered in ((), (True, False)):
        run = run_with_probes(20, 0.1, 0.0, calls=answered)
        assert run.target.probes and not run.skipped_steps


@pytest.mark.parametrize("answered", [(True,), (True, False)])
def test_every_full_step_compares_while_that_runs_no_block(answered):
    run = run_with_probes(20, 0.0, 0.3, calls=answered)
    assert run.target.probes > 15 if all(answered) else run.target.probes <= 3


def test_nothing_is_compared_where_nothing_could_be_skipped():
    policy, letters = run_of(50, 10.0, EVEN)
    assert letters == "F" * 19
    assert policy.probes <= 3


def test_error_that_is_not_a_number_skips_nothing():
    assert run_of(30, math.nan, EVEN)[1] == "F" * 19


def test_plan_tells_of_each_step_what_was_decided_and_by_which_estimate():
    run = run_with_probes(20, 0.1, 0.01)
    plan = run.quality_facts()["plan"]
    letters = "".join(letter for letter, _, _ in plan)
    assert letters.replace("C", "F") == run.letters and letters.count("C") == run.target.probes > 0
    assert [level for _, level, _ in plan] == pytest.approx(run.schedule[:-1], rel=0.01)
    decided = [(letter, decibels) for letter, _, decibels in plan if decibels is not None]
    assert {letter for letter, _ in decided} >= {"S"} and len(decided) < len(plan)
    assert min(decibels for letter, decibels in decided if letter == "S") >= 40
    assert plan[0] == ("F", 2.0, None)


def test_feature_that_is_not_a_number_skips_nothing():
    policy = DeepCacheSettings(quality=30.0).policy()
    policy.begin(Carried(ANGLES_OF_EVEN))
    truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)
    for step, feature in enumerate((None, 1.0, math.nan)):
        if feature is not None:
            policy.note_feature(step, torch.tensor(feature))
        if step == 1:
            policy.compare(step, truth + 1e-4, truth)
        policy.note_full(step)
        if step:
            step = Step(step + 1, 1, *ANGLES_OF_EVEN[step + 1 : step + 3])
            assert policy.should_refresh(step, None) == (feature != 1.0)


@pytest.mark.parametrize(
    "levels, said",
    [(sorted(EVEN), "makes noise of one"), ((*EVEN[:10], *EVEN[4:]), "go up and down")],
    ids=["rising", "up and down"],
)
def test_levels_that_do_not_fall_are_computed_in_full(caplog, levels, said):
    """A step upwards would seem to cost nothing."""
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.split = Split(0.1)
    run.set_schedule(levels)
    for level in levels[:-1]:
        run.begin_evaluation(level)
        assert run.is_full and not run.is_probing
    assert said in caplog.text
    assert run.quality_facts()["estimated_db"] is None


def test_nothing_is_compared_outside_the_part_that_may_be_skipped():
    run = run_with_probes(20, 0.1, 0.01, window=(EVEN[6], EVEN[10]))
    assert run.skipped_steps
    assert run._compared and run._compared <= set(range(5, 10))


def test_run_whose_model_is_never_called_goes_on():
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.learnt = object()
    run.set_schedule(EVEN)
    for level in EVEN[:-1]:
        run.begin_evaluation(level)
        assert run.is_full or run.is_probing
    run.close()


def test_models_on_other_devices_know_of_a_probe():
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))

    def found(model):
        split = Split(0.1)
        split.model = model
        return split

    one, other = torch.nn.Identity(), torch.nn.Identity()
    assert run.of(one, found) is run
    run.set_schedule(EVEN)
    run.begin_evaluation(EVEN[0])
    sibling = run.of(other, found)
    run.begin_evaluation(EVEN[1])
    assert run.is_probing and sibling.is_probing and not sibling.is_full
    run.probed(lambda is_probe: (torch.zeros(1, 4), torch.zeros(1, 4)), lambda error: True)
    assert not sibling.is_probing and sibling.is_full


def reusing(squares, pairs=2, angles=ANGLES_OF_EVEN):
    """A policy that knows what reusing features costs: a mean squared error of the feature of `squares`."""
    policy = DeepCacheSettings(quality=40.0).policy()
    policy.begin(Carried(angles))
    truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)
    policy.note_full(0)
    for step in (1, 2):
        policy.note_feature(step, torch.tensor([1e-6]))
        policy.compare(step, truth + 1e-3, truth)
        policy.note_full(step)
        if step > 2 - pairs:
            policy.note_reuse(step, torch.tensor([squares]))
    return policy


def test_features_are_reused_where_that_is_known_to_cost_little():
    assert reusing(1e-8).may_reuse(3)
    assert not reusing(1e-2).may_reuse(3) and not reusing(math.nan).may_reuse(3)


def test_features_are_not_reused_where_estimates_are_unsure():
    assert not reusing(1e-8, pairs=1).may_reuse(3), "the first pair says little"
    short, noisy = ANGLES_OF_EVEN[-6:], tuple(map(angle, (level * 3.3 for level in EVEN)))
    assert reusing(1e-12, angles=short[:1] + short).may_reuse(3)
    assert not reusing(1e-12, angles=short).may_reuse(3), "the last two steps"
    assert not reusing(1e-12, angles=noisy).may_reuse(3) and reusing(1e-12, angles=noisy).may_reuse(4)


def test_what_reusing_cost_is_part_of_the_estimate():
    policy = reusing(1e-6)
    assert policy.estimated_db() == math.inf and policy.may_reuse(3)
    once = policy.estimated_db()
    assert 40 < once < math.inf and policy.may_reuse(4) and policy.estimated_db() < once


def evaluated(run, steps):
    """Whether each evaluation was full, of the steps in this order, at noise levels as exact as exp_heun_2_x0's."""
    fulls = []
    for place, step in enumerate(steps):
        run.begin_evaluation(EVEN[step] * (1 + place % 2 * 1e-7))
        fulls.append(run.is_full)
        run.count(not run.is_full)
    return fulls


@pytest.mark.parametrize(
    ("carries", "adds_noise", "reused"),
    [((1.0, 0.0), False, {6, 8}), ((1.0, 0.0), True, ()), ((1.0, 1.0), False, ()), ((2.0, 0.0), True, ())],
)
def test_second_evaluation_of_a_level_reuses_the_features_of_the_first(carries, adds_noise, reused):
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.split, run.carries, run.adds_noise = Split(0.0), carries, adds_noise
    run.set_schedule(EVEN)
    run.target.wants_probe = lambda *_: False
    run.target.may_reuse = lambda step: step > 2
    heun = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)
    assert evaluated(run, heun) == [place not in reused for place in range(10)]
    assert (run.full_steps, run.skipped_steps, run.has_skipped) == (6 - len(reused), 0, bool(reused))
    assert run.letters == ("FFFHHF" if reused else "FFFFFF") == "".join(letter for letter, _, _ in run.plan)
    facts = run.quality_facts()
    assert facts["skipped_work"] == pytest.approx(len(reused) / 10) and run.log_quality(facts) == bool(reused)


def test_evaluation_that_ran_after_all_is_not_counted_as_skipped():
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.split, run.adds_noise = Split(0.0), False
    run.set_schedule(EVEN)
    run.target.wants_probe, run.target.may_reuse = lambda *_: False, lambda step: True
    for step in (0, 1, 1):
        run.begin_evaluation(EVEN[step])
        run.count(False)
    assert run.letters == "FF" and not run.has_skipped and run.quality_facts()["estimated_db"] is None


def test_samples_that_become_fewer_count_as_the_farthest():
    """As frames in a last context window."""
    policy = DeepCacheSettings(quality=30.0).policy()
    policy.begin(Carried(ANGLES_OF_EVEN))
    truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)
    for step, features in enumerate(((), ([1.0, 4.0], [2.0]), ([1.0, 1.0, 9.0],), ([4.0, 1.0],))):
        for squares in features:
            policy.note_feature(step, torch.tensor(squares))
        if step == 1:
            policy.compare(step, truth + 0.1, truth)
        policy.note_full(step)
    assert policy.should_refresh(Step(4, 1, *ANGLES_OF_EVEN[4:6]), None)
    assert [policy._features[step].read().tolist() for step in (1, 2, 3)] == [[3.0, 6.0], [9.0], [4.0, 1.0]]

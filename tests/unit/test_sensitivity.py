"""What a quality learns from earlier images: between which noise levels it holds, when it is enough, what is kept."""

import json
import math

import pytest
import torch
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from comfy_accel.accel.step_cache.policies import sensitivity
from comfy_accel.accel.step_cache.policies.quality import OWN
from comfy_accel.accel.step_cache.policies.sensitivity import ENOUGH, NEAR, Learnt, Sensitivity, key_of
from comfy_accel.accel.step_cache.run import DeepCacheRun
from comfy_accel.accel.step_cache.step_schedule import angle


def test_ratio_is_between_those_known_and_below_them_the_lowest():
    known = Sensitivity({5: (1, math.log(0.1)), 10: (1, math.log(0.4))})
    assert [known.at(place) for place in (0.2, 0.5, 0.75, 1.0)] == pytest.approx([0.1, 0.1, 0.2, 0.4])


def test_nothing_is_known_above_the_highest_noise_level_that_was_compared():
    known = Sensitivity({10: (1, 0.0)})
    assert known.at(1.0 + NEAR * sensitivity.BIN) == 1 and known.at(1.0 + (NEAR + 1) * sensitivity.BIN) is None
    assert Sensitivity().at(1.0) is None


def test_mean_of_earlier_images_is_moved_to_where_the_image_at_hand_is():
    known = Sensitivity({5: (ENOUGH, math.log(0.1)), 10: (ENOUGH, math.log(0.4))})
    known.learn(1.0, 0.8)
    assert [known.at(place) for place in (0.5, 1.0)] == pytest.approx([0.2, 0.8])
    known.learn(0.5, 0.1)
    assert [known.at(place) for place in (0.5, 1.0)] == pytest.approx([0.1, 0.4])


@pytest.mark.parametrize("above", [1.9, 2.1, 2.4, 2.5, 2.6])
def test_where_enough_is_known_a_comparison_is_never_too_far(above):
    known, at = Sensitivity({4: (ENOUGH, 0.0)}), (4 + above) * sensitivity.BIN
    assert known.is_sure(at) == (known.at(at) is not None)
    known.learn(at, 0.5)
    assert known.at(at) == pytest.approx(0.5)


def test_image_after_what_is_known_leaves_the_file_alone(tmp_path):
    learnt = Learnt(tmp_path / "file.json")
    learnt.add("one", [(1.0, 0.5)] * ENOUGH)
    before = (tmp_path / "file.json").stat().st_mtime_ns
    learnt.add("one", [(1.0, 0.7)])
    learnt.add("one", [])
    assert (tmp_path / "file.json").stat().st_mtime_ns == before


def test_enough_comparisons_change_nothing_for_later_images():
    known = Sensitivity()
    for ratio in (0.1, 0.2, 0.4, 0.8):
        assert not known.is_sure(1.0)
        known.learn(1.0, ratio)
    assert known.is_sure(1.0) and known.is_sure(1.0 - NEAR * sensitivity.BIN) and not known.is_sure(0.5)
    before = known.as_known()
    known.learn(1.1, 100.0)
    assert known.as_known() == before == {10: (4, pytest.approx(math.log(0.1 * 0.2 * 0.4 * 0.8) / 4))}


def test_what_is_learnt_outlives_the_process(tmp_path):
    Learnt(tmp_path / "new" / "file.json").add("one", [(1.0, 0.5)])
    other = Learnt(tmp_path / "new" / "file.json")
    assert other.of("one").at(1.0) == pytest.approx(0.5)
    assert not other.of("two")


def test_processes_that_learn_at_once_keep_what_the_other_did(tmp_path):
    one, other = (Learnt(tmp_path / "file.json") for _ in range(2))
    assert not one.of("one") and not other.of("two")
    one.add("one", [(1.0, 0.5)])
    other.add("two", [(1.0, 0.5)])
    assert Learnt(tmp_path / "file.json").of("one") and Learnt(tmp_path / "file.json").of("two")


def test_models_that_were_not_used_for_long_are_forgotten_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "_MOST_KEYS", 2)
    learnt = Learnt(tmp_path / "file.json")
    for key in ("one", "two", "one", "three"):
        learnt.add(key, [(1.0, 0.5)])
    assert [bool(learnt.of(key)) for key in ("one", "two", "three")] == [True, False, True]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"one": 3}',
        '{"one": {"ten": [1, 2]}}',
        '{"one": {"10": [1]}}',
        '{"one": {"10": [1e999, 0]}}',
        '{"one": {"10": [-1, 0]}}',
        '{"one": {"1' + "0" * 400 + '": [1, 0]}}',
    ],
    ids=range(10),
)
def test_damaged_file_is_as_none(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    learnt = Learnt(tmp_path / "file.json")
    assert not learnt.of("one")
    learnt.add("one", [(1.0, 0.5)])
    assert Learnt(tmp_path / "file.json").of("one")


def test_ratio_that_is_no_number_is_left_out(tmp_path):
    (tmp_path / "file.json").write_text(json.dumps({"one": {"10": [1, math.nan], "5": [1, 0.0]}}))
    assert Learnt(tmp_path / "file.json").of("one").as_known() == {5: (1, 0.0)}


def test_without_a_place_to_write_the_process_still_learns(tmp_path):
    (tmp_path / "folder").write_text("a file")
    learnt = Learnt(tmp_path / "folder" / "file.json")
    learnt.add("one", [(1.0, 0.5)])
    learnt.add("one", [(0.5, 0.5)])
    assert learnt.of("one").at(0.5) == pytest.approx(0.5)


def test_models_of_a_class_with_other_weights_are_other_models():
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.nn.init.ones_(one.bias), torch.nn.init.zeros_(other.bias)
    same = torch.nn.Linear(2, 2)
    same.load_state_dict(one.state_dict())
    assert key_of(one, 1.0) == key_of(same, 1.0) != key_of(other, 1.0)
    assert key_of(one, 1.0) != key_of(one, 2.0)
    for odd in (torch.nn.Linear(2, 2, device="meta"), torch.nn.LazyLinear(2), torch.nn.Identity()):
        assert key_of(odd, "x" * 10_000) and len(key_of(odd, "x" * 10_000)) < 100


class Split:
    shallow_share, depth, layout = 0.1, 2, ("transformer", 2)

    def __init__(self, model):
        self.model = model


LEVELS = tuple(4.0 * 0.85**step for step in range(30)) + (0.0,)


def image(learnt, model, ratio=0.01, feature=1.0, guided_by=""):
    """A run whose forecasts are off by `feature`, and its predictions by `ratio` of that."""
    run = DeepCacheRun(DeepCacheSettings(quality=40.0))
    run.split, run.learnt, run.guided_by = Split(model), learnt, guided_by
    run.set_schedule(LEVELS)
    truth = torch.linspace(0, 1, 64).reshape(1, 1, 64)

    def evaluate(is_probe):
        run.count(is_probe)
        return truth, truth + ratio * feature * is_probe

    for step, level in enumerate(LEVELS[:-1]):
        run.begin_evaluation(level)
        if step and (run.is_full or run.is_probing):
            run.target.note_feature(step, torch.tensor([feature**2]))
        if run.is_probing:
            run.probed(evaluate, lambda error: True)
        else:
            run.count(not run.is_full)
    facts = run.quality_facts()
    run.close()
    return facts


def test_tenth_image_compares_once_and_skips_more_than_the_first(tmp_path):
    learnt, model = Learnt(tmp_path / "file.json"), torch.nn.Linear(2, 2)
    images = [image(learnt, model) for _ in range(10)]
    probes = [facts["probes"] for facts in images]
    assert probes[0] >= 3 and probes[-1] == 1
    compared = [level for letter, level, _ in images[-1]["plan"] if letter == "C"]
    assert angle(compared[0]) <= OWN < angle(compared[0] / 0.85**2)
    assert images[-1]["skipped_work"] > images[0]["skipped_work"]
    assert images[-1] == images[-2], "what was learnt still changes"
    assert image(Learnt(tmp_path / "file.json"), model) == images[-1], "another process"


def test_other_models_samplers_and_guidance_learn_for_themselves(tmp_path):
    learnt, model = Learnt(tmp_path / "file.json"), torch.nn.Linear(2, 2)
    first = image(learnt, model)
    for _ in range(9):
        image(learnt, model)
    assert image(learnt, torch.nn.Linear(2, 2)) == image(learnt, model, guided_by="CFG 9") == first


def test_image_that_is_more_sensitive_than_those_before_skips_less(tmp_path):
    learnt, model = Learnt(tmp_path / "file.json"), torch.nn.Linear(2, 2)
    for _ in range(8):
        usual = image(learnt, model)
    sensitive = image(learnt, model, ratio=0.05)
    assert sensitive["probes"] == 1 and sensitive["skipped_work"] < usual["skipped_work"]

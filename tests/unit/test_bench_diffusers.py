"""What `bench diffusers` makes of its rows, and when it has failed."""

from dev.bench import BENCHES, WITH_DIFFUSERS, diffusers
from dev.bench.session_plan import totals

STEPS = diffusers.STEPS[:3]


def rows(contender=diffusers.OURS, compilations=(4, 0, 0), **changes):
    made = []
    for step, count, seconds in zip(STEPS, compilations, (30.0, 2.0, 5.0), strict=True):
        row = {"model": "m", "contender": contender, "step": step.name, "batch": 2, "compilations": count}
        row |= {"uncompiled": 0, "gave_up": False, "first_image_s": seconds, "warm_s": 0.5, "relative_diff": 1e-6}
        made.append({**row, "dtype": "fp32", **changes})
    return made


def test_totals_are_per_model_and_contender():
    ours, whole = totals([*rows(), *rows(diffusers.WHOLE, (1, 1, 0))], "warm_s")
    assert (ours["first_image"], ours["later"], ours["stalls"], ours["gave_up_at"]) == (4, 0, 1, None)
    assert (ours["first_image_s"], ours["session_s"], ours["worst_stall_s"], ours["warm_s"]) == (30.0, 37.0, 5.0, 1.5)
    assert ours["worst_diff"] == "1.0e-06"
    assert (whole["first_image"], whole["later"], whole["stalls"]) == (1, 1, 2)


def test_giving_up_is_named_by_the_image_at_which_it_was():
    given_up = rows(diffusers.WHOLE)
    for row in given_up[1:]:
        row["gave_up"] = True
    assert totals(given_up)[0]["gave_up_at"] == STEPS[1].name


def test_measurements_with_more_requirements_are_measurements():
    assert set(WITH_DIFFUSERS) <= set(BENCHES)

"""What `bench restart` says of its rows."""

import pytest

from dev.bench import restart


def rows(**changes):
    made = [
        {"model": "m", "mode": mode, "first_image_s": seconds, "compilations": compiled, "loaded": loaded}
        | {"import_ms": 90.0, "uncompiled": 0, "relative_diff": 1e-6}
        for mode, seconds, compiled, loaded in [
            ("eager", 1.0, 0, 0),
            ("cold", 40.0, 5, 0),
            ("warm_process", 1.0, 0, 0),
            ("store", 3.0, 0, 5),
            ("torch_cache", 20.0, 5, 0),
        ]
    ]
    for row in made:
        row |= changes.get(row["mode"], {})
    return made


def missed(**changes):
    """The sentences about goals that are missed."""
    return [sentence for sentence, reached in restart.verdicts(rows(**changes)) if not reached]


def test_goals_are_reached_or_missed():
    assert missed() == []
    assert all(sentence.endswith(": reached.") for sentence, _ in restart.verdicts(rows()))
    slow = missed(store={"first_image_s": 4.1})
    assert len(slow) == 2 and all(sentence.endswith(": missed.") for sentence in slow)
    assert "3.30 s with saved graphs; goal 1.2 x eager + 2 s = 3.20 s" in missed(store={"first_image_s": 3.3})[0]
    assert "9.8 times as fast as cold" in missed(store={"first_image_s": 3.1}, cold={"first_image_s": 30.5})[0]
    assert "1 graphs compiled" in missed(store={"compilations": 1})[0]
    slow_import = {mode: {"import_ms": 160.0} for mode in restart.MODES}
    assert missed(**slow_import) == ["importing the pack takes 160 ms; goal 150 ms: missed."]
    assert missed(eager={"import_ms": 900.0}) == []  # the first process may have to write bytecode


def test_rows_as_they_should_be_are_a_result():
    assert restart.failure(rows()) is None


@pytest.mark.parametrize(
    ("mode", "change", "said"),
    [
        ("store", {"compilations": 1}, "none should be"),
        ("warm_process", {"compilations": 1}, "none should be"),
        ("eager", {"compilations": 1}, "none should be"),
        ("torch_cache", {"compilations": 0}, "nothing was compiled"),
        ("store", {"loaded": 0}, "nothing was loaded"),
        ("cold", {"uncompiled": 3}, "ran uncompiled"),
        ("store", {"relative_diff": 0.5}, "is off by"),
        ("store", {"relative_diff": float("nan")}, "is off by"),
    ],
)
def test_rows_that_show_something_else_are_no_result(mode, change, said):
    assert said in restart.failure(rows(**{mode: change}))

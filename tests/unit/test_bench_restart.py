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

"""What the measurement of a fleet's faults takes for a failure."""

import pytest

from bench import fleet_faults

PUBLISHED = dict(prompts=4, answered=4, images=4, half_published=0)


@pytest.mark.parametrize(
    ("row", "left", "sentence"),
    [
        ({"fault": "comfyui", **PUBLISHED, "run_again": 2}, 0, None),
        ({"fault": "comfyui", **PUBLISHED, "run_again": 4}, 0, "4 prompts ran again"),
        ({"fault": "comfyui", **PUBLISHED, "run_again": 1, "answered": 3}, 0, "3 of 4 prompts"),
        ({"fault": "comfyui", **PUBLISHED, "run_again": 1, "half_published": 1}, 0, "4 of 4 prompts"),
        ({"fault": "shutdown", **PUBLISHED, "seconds": 5}, 0, None),
        ({"fault": "shutdown", **PUBLISHED, "seconds": fleet_faults.DRAIN_S}, 0, "it took"),
        ({"fault": "shutdown", **PUBLISHED, "seconds": 5}, 2, "2 processes were left behind"),
    ],
)
def test_measurement_fails_where_something_was_lost_or_waited_for_in_vain(row, left, sentence):
    said = fleet_faults.failure([row], left)
    assert said is None if sentence is None else sentence in said

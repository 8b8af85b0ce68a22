"""Parameters of a test of which every change is tested with some only."""

import os
from collections.abc import Sequence

import pytest


def thorough_except(values, *quick) -> list:
    """The values as parameters; all but the `quick` ones are thorough."""
    return tuples_except([(value,) for value in values], *((value,) for value in quick))


def tuples_except(tuples, *quick) -> list:
    """The same of tuples, each for several parameters."""
    return [pytest.param(*each, marks=() if each in quick else pytest.mark.thorough) for each in tuples]


def todays(values: Sequence, count: int) -> list:
    """So many of the values, from all over them; others tomorrow, until each has had its turn."""
    day = int(os.environ["ACCEL_TEST_DAY"])
    return [values[(day + number * len(values) // count) % len(values)] for number in range(count)]

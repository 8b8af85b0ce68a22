"""Parameters of a test of which every change is tested with some only."""

import pytest


def thorough_except(values, *quick) -> list:
    """The values as parameters; all but the `quick` ones are thorough."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.thorough) for value in values]

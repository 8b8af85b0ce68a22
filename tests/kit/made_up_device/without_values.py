"""A plugin of pytest for the made-up device, whose values are zeros: comparisons there see all but values.

    pytest -p kit.made_up_device.without_values ...

Where a tensor on a CUDA device is compared, shapes, dtypes and devices must agree; all else is compared as usual.
"""

from unittest import mock

import pytest
import torch

_equal, _assert_close = torch.equal, torch.testing.assert_close


def _kinds(*values):
    return [(value.shape, value.dtype, value.device) for value in values]


def _equal_but_for_values(one, other):
    if not (one.is_cuda or other.is_cuda):
        return _equal(one, other)
    first, second = _kinds(one, other)
    return first == second


def _close_but_for_values(actual, expected, **options):
    if not (isinstance(actual, torch.Tensor) and (actual.is_cuda or expected.is_cuda)):
        return _assert_close(actual, expected, **options)
    first, second = _kinds(actual, expected)
    assert first == second
    return None


@pytest.fixture(autouse=True)
def no_values_are_compared():
    from kit import made_up_device  # conftest.py has put it on the path by now

    assert made_up_device.is_here(), "on a real device values are compared"
    with (
        mock.patch.object(torch, "equal", _equal_but_for_values),
        mock.patch.object(torch.testing, "assert_close", _close_but_for_values),
    ):
        yield

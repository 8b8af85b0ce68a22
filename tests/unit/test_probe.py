"""The probe: a graph that does not pay, or is wrong, is given up; the output is right either way."""

import time

import pytest
import torch
from comfy_accel.accel.probe import ROUNDS, Probe, largest_difference

CPU = torch.device("cpu")
VALUE = torch.linspace(-1, 1, 64)


def takes(seconds, value=VALUE):
    def run():
        time.sleep(seconds)
        return value

    return run


def run_all(probe, compiled, eager):
    outs = []
    while not probe.done:
        outs.append(probe.call(compiled, eager, CPU))
    return outs


def test_faster_graph_stays():
    probe = Probe()
    outs = run_all(probe, takes(0.001), takes(0.02))
    assert probe.verdict is None
    assert len(outs) == ROUNDS


def test_slower_graph_is_given_up_with_both_times():
    probe = Probe()
    run_all(probe, takes(0.02), takes(0.001))
    assert "ms a call and eagerly" in probe.verdict


def test_wrong_graph_is_given_up_at_once_and_the_eager_output_goes_on():
    probe = Probe()
    outs = run_all(probe, takes(0, VALUE + 0.5), takes(0))
    assert len(outs) == 1 and torch.equal(outs[0], VALUE)
    assert "differs" in probe.verdict


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_count_as_different(bad):
    assert largest_difference(torch.full((4,), bad), torch.ones(4)) == float("inf")


def test_nothing_is_said_of_a_graph_where_the_model_itself_overflows():
    assert largest_difference(torch.ones(4), torch.full((4,), float("inf"))) is None


def test_rounding_is_no_difference():
    assert largest_difference(VALUE * (1 + 1e-4), VALUE) is None
    assert largest_difference((VALUE, [VALUE.half()]), (VALUE, [(VALUE * 1.005).half()])) is None
    assert largest_difference((VALUE, VALUE + 1), (VALUE, VALUE)) > 0.4

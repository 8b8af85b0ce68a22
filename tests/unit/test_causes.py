"""What led to an exception is found, however it was wrapped."""

import pytest
from comfy_accel.accel.core.errors import cause_among, pass_on
from kit.blocks import Stop


class Wrapper(RuntimeError):
    def __init__(self, inner):
        super().__init__("wrapped")
        self.inner_exception = inner


def raised(wrap):
    try:
        try:
            raise Stop
        except Stop as stop:
            wrap(stop)
    except Exception as error:
        return error


def from_it(stop):
    raise RuntimeError from stop


def from_none(stop):
    raise RuntimeError from None


@pytest.mark.parametrize("wrap", [from_it, from_none])
def test_wrapped_exception_is_found(wrap):
    error = raised(wrap)
    assert type(cause_among(error, (Stop,))) is Stop
    assert cause_among(error, (KeyError,)) is None


def test_exception_that_a_wrapper_carries_is_found():
    stop = Stop()
    assert cause_among(Wrapper(Wrapper(stop)), (Stop,)) is stop


def test_chain_that_leads_back_to_itself_ends():
    one, two = RuntimeError(), RuntimeError()
    one.__cause__, two.__cause__ = two, one
    assert cause_among(one, (Stop,)) is None


def test_only_what_must_pass_is_raised():
    error = raised(from_none)
    pass_on(error, (KeyError,))
    pass_on(error, ())
    with pytest.raises(Stop):
        pass_on(error, (KeyError, Stop))

"""What led to an exception is found, however it was wrapped."""

import pytest
from comfy_accel.accel.core.errors import cause_among, one_line, pass_on
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


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "no message"),
        ("g++ was not found\nand much more", "g++ was not found"),
        (
            'at 1:0:\ndef triton_():\n^\nValueError("type fp8e4nv not supported")',
            'ValueError("type fp8e4nv not supported")',
        ),
        ("An exception occurred in a subprocess:\n\n  File x\nOSError: no room\n", "OSError: no room"),
    ],
)
def test_reason_is_the_line_that_has_the_cause(message, line):
    assert one_line(Wrapper(RuntimeError(message))) == f"RuntimeError: {line}"

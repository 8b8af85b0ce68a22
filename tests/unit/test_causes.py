"""What led to an exception is found, however it was wrapped."""

import pytest
from comfy_accel.accel.core.errors import cause_among, one_line, pass_on
from kit.blocks import Stop


class Wrapper(RuntimeError):
    def __init__(self, inner):
        super().__init__("wrapped")
        self.inner_exception = inner


def chained(error, **links):
    """The error with these attributes, as `raise ... from` sets them."""
    for name, other in links.items():
        setattr(error, name, other)
    return error


STOP, ONE, TWO = Stop(), RuntimeError(), RuntimeError()
ENDLESS = chained(ONE, __cause__=chained(TWO, __cause__=ONE))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (chained(RuntimeError(), __cause__=STOP), STOP),
        (chained(RuntimeError(), __context__=STOP, __suppress_context__=True), STOP),  # raised "from None"
        (Wrapper(Wrapper(STOP)), STOP),
        (ENDLESS, None),
    ],
)
def test_what_must_pass_is_found_however_it_was_wrapped(error, found):
    assert cause_among(error, (Stop,)) is found and cause_among(error, (KeyError,)) is None
    pass_on(error, (KeyError,))
    pass_on(error, ())
    if found is not None:
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

"""Why an exception came to be: compilers wrap what stopped them, and the wrapping says little."""

from __future__ import annotations

from typing import NamedTuple

import torch


def cause_among(error: BaseException, classes: tuple[type[BaseException], ...]) -> BaseException | None:
    """The error itself, or the nearest of those that led to it, that is of one of the classes.

    Torch raises its wrappers "from None" and keeps what they wrap as `inner_exception`.
    """
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop(0)
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        if isinstance(error, classes):
            return error
        seen.add(id(error))
        waiting += [error.__cause__, getattr(error, "inner_exception", None), error.__context__]
    return None


def pass_on(error: BaseException, classes: tuple[type[BaseException], ...]) -> None:
    """Raise what led to the error, where that is of one of the classes; nothing else happens.

    classes: of exceptions that mean "stop the run": they must not end as a reason for something else.
    """
    cause = cause_among(error, classes)
    if cause is not None:
        raise cause


def one_line(error: BaseException) -> str:
    """An exception as one line for log and report: its type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


class Failure(NamedTuple):
    """Why something failed, without the tensors that the exception itself would keep.

    is_shortage: for want of memory.
    """

    error: str
    is_shortage: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(one_line(error), isinstance(error, torch.OutOfMemoryError))

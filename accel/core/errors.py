"""What caused an exception: compilers wrap it in one that says little."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

AnyError = TypeVar("AnyError", bound=BaseException)


def cause_among(error: BaseException, classes: tuple[type[BaseException], ...]) -> BaseException | None:
    """The error or the nearest cause of it that is an instance of `classes`; None without one.

    Torch raises its wrappers "from None" and keeps the cause as `inner_exception`.
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
    """Raise the cause of the error that is an instance of `classes`, if there is one.

    classes: exceptions that mean "stop the run" and must not end up as a reason for something else.
    """
    cause = cause_among(error, classes)
    if cause is not None:
        raise cause


def one_line(error: BaseException) -> str:
    """The type and first line of an exception, or of the one that torch's compiler wrapped; at most 300 characters.

    A first line that ends with a colon only says where ("at 1:0:" of Triton's): then it is the last.
    """
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[-1] if lines[0].endswith(':') else lines[0]}"[:300]


def without_frames(error: AnyError) -> AnyError:
    """The exception, to be kept: without its traceback and those of what it was raised from.

    Their frames reference tensors, and all that the callers have: only the garbage collector would free these.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class Failure(NamedTuple):
    """Why something failed, without the tensors that the exception's traceback references.

    is_shortage: whether memory ran out.
    """

    error: str
    is_shortage: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(one_line(error), isinstance(error, torch.OutOfMemoryError))

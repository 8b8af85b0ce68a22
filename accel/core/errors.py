"""What caused an exception: compilers wrap it in one that says little."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch

_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
"""In messages of CUDA's own libraries, and of torch on the CPU."""

AnyError = TypeVar("AnyError", bound=BaseException)


def cause_among(error: BaseException, classes: tuple[type[BaseException], ...]) -> BaseException | None:
    """The error or its nearest cause that is an instance of `classes`; None without one. Torch raises its wrappers
    "from None" and keeps the cause as `inner_exception`."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
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
    """Raise the nearest cause that is one of these classes: they mean "stop the run", and must not become a reason."""
    if (cause := cause_among(error, classes)) is not None:
        raise cause


def one_line(error: BaseException) -> str:
    """The type and first line of an exception, or of the one that torch's compiler wrapped; at most 300 characters.
    Where the first line only says where and ends with a colon ("at 1:0:" of Triton's), the last."""
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[-1] if lines[0].endswith(':') else lines[0]}"[:300]


def strip_frames(error: AnyError) -> AnyError:
    """The exception without its traceback and those of what it was raised from, whose frames reference tensors and all
    that the callers have: only the garbage collector would free these."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class Failure(NamedTuple):
    """Why something failed, without the tensors that the exception's traceback references. is_shortage: whether memory
    ran out. is_own: whether what failed is to blame, and not what runs within it."""

    error: str
    is_shortage: bool
    is_own: bool = True

    @classmethod
    def from_error(cls, error: Exception, is_own: bool = True) -> Failure:
        return cls(one_line(error), is_shortage(error), is_own)


def is_shortage(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a device or in the process."""
    if cause_among(error, (torch.OutOfMemoryError, MemoryError)) is not None:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_MEMORY)

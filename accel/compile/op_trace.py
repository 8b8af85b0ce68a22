"""What a block does, told without values: which calls of torch it makes, and which inputs it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.errors import pass_on

_TOLD = (bool, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Path:
    """One run of a block over tensors without values.

    calls: every function of torch that gave tensors, with its plain arguments but for whole numbers,
        which may be sizes. shapes: of what each call gave.
    changed: the inputs that it writes to, by index.
    """

    calls: tuple[tuple, ...]
    shapes: tuple[torch.Size, ...]
    changed: tuple[int, ...]


class _Record(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        shapes = [tensor.shape for tensor in _tensors(out)]
        if shapes:
            told = (repr(item) for item in (*args, *sorted(kwargs.items(), key=str)) if type(item) in _TOLD)
            self.calls.append((getattr(function, "__name__", repr(function)), len(shapes), *told))
            self.shapes.extend(shapes)
        return out


def path_of(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    interrupts: tuple[type[BaseException], ...] = (),
) -> Path | None:
    """The path that `function(*inputs)` takes through its code; None where it cannot be told without values.

    inputs: of any device; nothing is computed, and they stay as they are.
    interrupts: exceptions that mean "stop the run", and are never swallowed.
    """
    record = _Record()
    with torch.inference_mode(False), torch.no_grad():
        # Fresh tensors count their own changes, wherever this is called.
        given = [torch.empty_strided(i.shape, i.stride(), dtype=i.dtype, device="meta") for i in inputs]
        before = [tensor._version for tensor in given]
        try:
            with record:
                function(*given)
        except Exception as error:
            pass_on(error, interrupts)
            return None
        changed = tuple(index for index, tensor in enumerate(given) if tensor._version != before[index])
    return Path(tuple(record.calls), tuple(record.shapes), changed)


def same_path(paths: Sequence[Path | None]) -> bool:
    """Whether three runs, at 1, 2 and 3 of something, are one path whose sizes grow evenly.

    A size that stops growing (a slice of two rows at most) is another path.
    """
    one, two, three = paths
    if one is None or two is None or three is None or not one.calls == two.calls == three.calls:
        return False
    return all(
        len(a) == len(b) == len(c) and all(y - x == z - y for x, y, z in zip(a, b, c, strict=True))
        for a, b, c in zip(one.shapes, two.shapes, three.shapes, strict=True)
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

"""A dry run of a call, operator by operator: finds what a captured graph would not repeat, or not on the right tensors.

What happens between operators, in Python, is not seen here; `model_guard` looks for that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.reasons import Reason
from ..signature.tensors import tensors_in

_SYNCHRONIZES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Ended(BaseException):
    """Ends a dry run at the first obstacle, past whoever catches exceptions: what follows might leave a trace."""


class DryRun(TorchDispatchMode):
    """A mode to make the call in; afterwards `reason` says why it cannot be captured, None where it can.

    It raises `Ended` before an operator that draws random numbers, waits for a value, or reads or writes what it must
    not, and leaves Python's random numbers as they were.

    own: the weights and the inputs. The call may read these and what it makes, and write to what it makes only.
    device: where all of it must be, but for what is made on the CPU of numbers alone (`host_constants`).
    """

    def __init__(self, own: Iterable[torch.Tensor], device: torch.device):
        super().__init__()
        self._own = {_storage(tensor) for tensor in own}
        self._made: set[int] = set()
        self._device = device
        self._random = random.getstate()
        self.reason: Reason | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if random.getstate() != self._random:
            random.setstate(self._random)
            self.reason = self.reason or Reason("python_random")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.reason = self._obstacle(func, args, kwargs)
        if self.reason is not None:
            raise Ended
        out = func(*args, **kwargs)
        made = tensors_in(out)
        # Beside a result, attention hands out the state of a random draw that it did not make, outside captures on the
        # CPU (`_scaled_dot_product_efficient_attention`, not in inference mode). Whoever takes that is refused.
        is_elsewhere = made and all(tensor.device != self._device for tensor in made)
        if is_elsewhere and (made[0].device.type != "cpu" or self._takes(args, kwargs)):
            there = str(made[0].device)
            self.reason = Reason("moves_tensor", here=str(self._device), there=there, operator=str(func))
            raise Ended
        for tensor in made:
            storage = _storage(tensor)
            if storage not in self._own:
                self._made.add(storage)
        return out

    def _takes(self, args: tuple, kwargs: dict) -> bool:
        """Whether the operator reads a tensor on the device."""
        return any(tensor.device == self._device and tensor.numel() for tensor in tensors_in((args, kwargs)))

    def _obstacle(self, func: Any, args: tuple, kwargs: dict) -> Reason | None:
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_inert(func, args, kwargs):
            return Reason("random", operator=str(func))
        if any(tag in func.tags for tag in _SYNCHRONIZES):
            return Reason("waits", operator=str(func))
        if "lift_fresh" in func.name():
            # Made on the device it has been copied there already, unseen by any mode. A number that is assigned to an
            # index is one too where the device is the CPU.
            is_copied = args[0].device == self._device and (args[0].ndim or self._device.type != "cpu")
            return Reason("makes_constant", operator=str(func)) if is_copied else None
        for tensor in tensors_in((args, kwargs)):
            if tensor.device != self._device and tensor.numel() and _storage(tensor) not in self._made:
                return Reason("takes_from_device", device=str(tensor.device), operator=str(func))
            if tensor.numel() and _storage(tensor) not in self._own and _storage(tensor) not in self._made:
                return Reason("reads_foreign", operator=str(func))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                if any(_storage(tensor) in self._own for tensor in tensors_in(value)):
                    return Reason("writes_own", operator=str(func))
        return None


def _is_inert(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator that may draw random numbers draws none: not training, or a dropout of 0."""
    names = [argument.name for argument in func._schema.arguments]
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given.update(zip(names, args, strict=False))
    given.update(kwargs)
    if given.get("train") is False or given.get("training") is False:
        return True
    return any(name in given and not given[name] for name in ("dropout_p", "dropout", "p"))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

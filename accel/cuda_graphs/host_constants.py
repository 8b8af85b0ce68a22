"""Tensors that a model's code makes on the CPU in every call and moves to the device, as positions and frequencies.

A capture may not copy from the CPU's memory. What is made there of nothing but numbers is the same in every call of a
key, so the captured graph reads a copy that is made before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.reasons import Reason
from ..signature.tensors import tensors_in
from .conditions import CaptureFailed

_TO = "aten::to"

_MOVES = (_TO, "aten::_to_copy", "aten::copy_")
"""Other operators read a tensor on the CPU that has no dimensions as a number."""


class HostConstants(TorchDispatchMode):
    """A mode in which operators on the device read the device's copies of tensors on the CPU.

    To be entered for a dry run, which makes the copies, then for captures, which find them by their values; then kept
    as long as the captured graphs.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_complete = False
        """Set after the dry run: captures raise CaptureFailed where a copy is missing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
        if named:  # the result, as far as that shows before
            is_on_device = named[0].type == self._device.type
        else:
            is_on_device = any(tensor.device == self._device for tensor in tensors_in((args, kwargs)))
        if self._device.type == "cpu" or not is_on_device:
            return func(*args, **kwargs)
        args = self._copy_to_device(args, func)
        kwargs = {name: self._copy_to_device(value, func) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        # Others may write to what `to` returns.
        return out.clone() if out is args[0] and _plain_name(func) == _TO else out

    def _copy_to_device(self, value: Any, func: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._copy_to_device(part, func) for part in value)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel():
            return value
        if not value.ndim and _plain_name(func) not in _MOVES:
            return value
        for known, copy in self._copies:
            if known.dtype == value.dtype and torch.equal(known, value):
                return copy
        if self.is_complete:
            raise CaptureFailed(Reason("host_values", operator=str(func)))
        self._copies.append((value.clone(), value.to(self._device)))
        return self._copies[-1][1]


def _plain_name(func: Any) -> str:
    return func.name().partition(".")[0]

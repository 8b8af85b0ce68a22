"""Operators of torch of our own, which a compiler calls and does not look into: `torch.ops.accel`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_libraries: list[torch.library.Library] = []
_defining = threading.Lock()


def define(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register the operator `torch.ops.accel.NAME`, once in the process, however many copies of the engine there are.

    signature: of its arguments and result, as torch writes it: "(Tensor x) -> Tensor". fake: gives a result without
    values. Not to be called at import: it takes torch a tenth of a second, which a program that compiles nothing should
    not pay.

    Raises RuntimeError: torch cannot read the signature.
    """
    with _defining:
        if hasattr(torch.ops.accel, name):
            return
        library = torch.library.Library("accel", "FRAGMENT")
        library.define(name + signature)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"accel::{name}", fake, lib=library)
        _libraries.append(library)  # its operators vanish with it
        getattr(torch.ops.accel, name)  # is there to be read from now on, and not from its first call on

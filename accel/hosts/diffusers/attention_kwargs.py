"""The dict that diffusers hands on to attention: an empty one is as good as none.

A pipeline that is called with a LoRA scale in it gives its blocks an empty dict, and None without. Blocks
of diffusers take the one for the other, so one graph is right for both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from ...fingerprint.survey import Region

_NAMES = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")


def simplifier(region: Region) -> Callable[[dict], dict] | None:
    """For a block of diffusers' own: puts an empty dict where such an argument is None; else None."""
    cls = type(region.block)
    taken = inspect.signature(cls.forward).parameters
    name = next((name for name in _NAMES if name in taken), None)
    if name is None or cls.__module__.partition(".")[0] != "diffusers":
        return None

    def simplify(options: dict) -> dict:
        return {**options, name: {}} if options.get(name, options) is None else options

    return simplify

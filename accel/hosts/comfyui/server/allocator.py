"""Torch's allocator: whether CUDA graphs can be captured with it, and who chose it.

ComfyUI has torch allocate with cudaMallocAsync on most NVIDIA cards, and no CUDA graph can keep such memory. The pack's
`prestartup_script.py` has torch use its own allocator instead, where somebody has turned on CUDA graphs: it is the
process's, so never unasked, and only from the next start on.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ....core.reasons import Reason
from ....core.settings import ASK, OFF, ON
from .. import preferences

VARIABLE = "ACCEL_CUDA_GRAPHS"
"""Set to "on" or "off", or a word for these, it counts in place of the setting; `prestartup_script.py` has them too."""
_CHOICES = {**dict.fromkeys((ON, "1", "true", "yes"), ON), **dict.fromkeys((OFF, "0", "false", "no"), OFF)}


def read_environment() -> str | None:
    """The choice in the environment: ON, OFF, or None."""
    return _CHOICES.get(os.environ.get(VARIABLE, "").strip().lower())


def state() -> Reason:
    """Whether CUDA graphs can be captured, who chose that, and what to do about it."""
    args = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    if not torch.cuda.is_available() or torch.version.hip is not None or getattr(args, "cpu", False):
        return Reason("graphs_nowhere")
    if args is None:  # not in ComfyUI's process
        return Reason("graphs_unknown")
    is_wanted = _read_choice() == ON
    script_said = getattr(args, "accel_allocator", None)
    if torch.cuda.get_allocator_backend() == "native":
        if script_said != "native":
            return Reason("graphs_given")
        return Reason("graphs_on") if is_wanted else Reason("graphs_restart")
    if script_said is not None:
        return Reason("graphs_blocked")
    return Reason("graphs_restart") if is_wanted else Reason("graphs_off")


def is_offered() -> bool:
    """Whether nobody has chosen yet, and there is something to choose."""
    return _read_choice() == ASK and state().code == "graphs_off"


def to_json() -> dict[str, Any]:
    """`state` for the page. choice: the one that counts. by_environment: it does not come from the settings."""
    return {"choice": _read_choice(), "by_environment": read_environment() is not None, **state().to_json()}


def _read_choice() -> str:
    return read_environment() or preferences.current().cuda_graphs

"""What all that stands before a ModelPatcher's model goes by: how it is called, what must end a call, what is captured.

Apart from `capture`, which is imported where calls are captured alone: importing the pack is to stay quick.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP

INTERRUPTS = (comfy.model_management.InterruptProcessingException,)
"""What means "stop the run", and is never swallowed."""

CAPTURE = "accel.capture"
"""Under which the run's recordings stand in its transformer_options, and our callbacks on a patcher."""


def asks_wrappers(model: torch.nn.Module) -> bool:
    """Whether the model's forward runs the wrappers for DIFFUSION_MODEL; SD3's and some others' does not."""
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and "DIFFUSION_MODEL" in code.co_names


def is_captured(model: Any) -> bool:
    """Whether calls of the patcher's model may be recorded."""
    return CAPTURE in model.callbacks.get(CallbacksMP.ON_DETACH, {})

"""What a person could change that this pack does not do: attention of another package, and a model in fewer bits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import torch

from ...core.reasons import Reason
from ...signature.tensors import PLAIN_TENSORS
from . import attention

LARGE = 4 << 30  # bytes of weights; smaller models are seldom offered in fewer bits
_OF_TORCH = {"attention_pytorch", "attention_split", "attention_sub_quad", "attention_basic"}  # core's own choice


def find_hints() -> Iterator[tuple[str, Reason]]:
    """What could be faster here, each with what it is called; nothing where that does not apply or is not known."""
    args = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None and not getattr(args, "cpu", False)
    if not is_nvidia or sys.platform not in ("linux", "win32"):
        return
    capability, core = torch.cuda.get_device_capability(), sys.modules.get("comfy.ldm.modules.attention")
    name = getattr(getattr(core, "optimized_attention", None), "__name__", None)
    if name in _OF_TORCH and not attention.overrides and capability >= (8, 0):
        if importlib.util.find_spec("sageattention") is not None:
            yield "Faster attention", Reason("sage_unused")
        elif importlib.util.find_spec("flash_attn") is not None:
            yield "Faster attention", Reason("flash_unused")
        else:
            yield "Faster attention", Reason("sage_missing", python=sys.executable)
    if capability >= (8, 9) and (model := _find_large_model()) is not None:
        yield "Fewer bits", Reason("bits_fp8", model=model) if capability < (10,) else Reason("bits_fp4", model=model)


def _find_large_model() -> str | None:
    """The class of a loaded model with large weights, all of 16 bits; None without one."""
    for entry in list(getattr(sys.modules.get("comfy.model_management"), "current_loaded_models", ())):
        network = getattr(getattr(entry.model, "model", None), "diffusion_model", None)
        weights = list(network.parameters()) if isinstance(network, torch.nn.Module) else []
        is_whole = all(type(weight) in PLAIN_TENSORS and weight.element_size() == 2 for weight in weights)
        if is_whole and sum(weight.nbytes for weight in weights) >= LARGE:
            return type(network).__name__
    return None

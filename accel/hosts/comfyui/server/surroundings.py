"""The facts about ComfyUI and the machine for a diagnosis. Nothing here waits or loads anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....compile.registry import DEFAULT, backend_named
from ....core import toolchain
from ....core.events import log
from ....report.run import Run
from ..versions import OLDEST, comfyui_version, running_prompt, streams_weights
from .diagnosis import NO_RUN, Facts, nodes_of


def facts(run: Run | None, cache: dict[str, Any], prompt: Any = None) -> Facts:
    """The facts for a diagnosis. run, cache: as in `Facts`. prompt: the workflow in API format, if known."""
    device = _or_none(_device)
    total, free, ours = _or_none(lambda: _memory(device)) or (None, None, None)
    return Facts(
        run=run or NO_RUN,
        cache=cache,
        nodes=nodes_of(prompt),
        prompt=_or_none(running_prompt),
        device="cpu" if device is None else device.type,
        torch=torch.__version__,
        comfyui=_or_none(comfyui_version),
        oldest_comfyui=OLDEST,
        compiles=backend_named(DEFAULT).missing() is None,
        tool_missing=_or_none(lambda: _tool_missing(device)),
        low_vram=_or_none(_low_vram),
        streams_weights=bool(_or_none(streams_weights)),
        memory_total=total,
        memory_free=free,
        memory_ours=ours,
    )


def _or_none(ask: Callable[[], Any]) -> Any:
    """What core or torch answers, or None: a report must not fail a prompt."""
    try:
        return ask()
    except Exception as error:
        log.debug("a fact for the report is not known: %s", error)
        return None


def _device() -> torch.device:
    from comfy.model_management import get_torch_device

    return torch.device(get_torch_device())


def _tool_missing(device: torch.device | None) -> str | None:
    lacking = toolchain.lacking("cpu" if device is None else device.type)
    return None if lacking is None else str(lacking)


def _memory(device: torch.device | None) -> tuple[int, int, int] | None:
    """(total, free, reserved by this process) bytes of a CUDA device; None for others."""
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total, free, torch.cuda.memory_reserved(device)


def _low_vram() -> str | None:
    from comfy.model_management import VRAMState, vram_state

    return {VRAMState.LOW_VRAM: "lowvram", VRAMState.NO_VRAM: "novram"}.get(vram_state)

"""The report of the Accel Report node and of the page's command, and the facts about ComfyUI and the machine in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....cache.graph_cache import shared
from ....compile.registry import DEFAULT, backend_named
from ....core import toolchain
from ....core.events import log
from ....report import chart as report_chart
from ....report import text as report
from ....report.run import Run
from ....report.run_record import records
from .. import preferences
from ..versions import OLDEST, comfyui_version, running_prompt, streams_weights
from . import panel
from .diagnosis import NO_RUN, Facts, diagnose, nodes_of

_ROWS = 20
"""Rows of the cache's table that are enough for a report."""


class Report(NamedTuple):
    """The report as text, and its chart as an IMAGE [1, H, W, 3]."""

    text: str
    chart: torch.Tensor


def make(image: torch.Tensor | None = None, reference: torch.Tensor | None = None, prompt: Any = None) -> Report:
    """The report now. image, reference: compared where both are given, [B, H, W, C]. prompt: the report's workflow."""
    run, cache, store = _known()
    decibels = comparison = None
    if (image is None) != (reference is None):
        missing = "image" if image is None else "reference"
        comparison = f"Not compared: connect `{missing}` too."
    if image is not None and reference is not None:
        decibels = psnr(image, reference)
        comparison = _unlike(image, reference) if decibels is None else report.comparison(decibels)
    words = report.text(run, cache, store, diagnose(_facts(run, cache, prompt)), comparison) + _of_machine()
    chart = report_chart.draw(run, cache, decibels)
    data = torch.frombuffer(bytearray(chart.tobytes()), dtype=torch.uint8)
    return Report(words, data.reshape(1, chart.height, chart.width, 3).float() / 255)


def text() -> str:
    """Only the text of the report."""
    run, cache, store = _known()
    return report.text(run, cache, store, diagnose(_facts(run, cache))) + _of_machine()


def _of_machine() -> str:
    return "\n".join(["\n\nThis machine:", *(f"  {line}" for line in panel.machine())])


def facts_as_json() -> dict[str, Any]:
    """What the report is made from, as JSON: {"state", "diagnosis"}."""
    run, cache, _ = _known()
    return {"state": panel.state(rows=_ROWS), "diagnosis": diagnose(_facts(run, cache))}


def _known() -> tuple[Run | None, dict[str, Any], dict[str, Any] | None]:
    """The last run, and the statistics of the cache and of its store."""
    preferences.current()  # puts the cache's limits into force
    return records.last(), shared.statistics(rows=0), shared.store and shared.store.statistics()


def _facts(run: Run | None, cache: dict[str, Any], prompt: Any = None) -> Facts:
    """The facts for a diagnosis; gathering them waits for nothing and loads nothing.

    run, cache: see `Facts`. prompt: the workflow in API format, if known.
    """
    device = _or_none(_device)
    total, others = _or_none(lambda: _memory(device)) or (None, None)
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
        memory_of_others=others,
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


def _memory(device: torch.device | None) -> tuple[int, int] | None:
    """Bytes of a CUDA device, and those that other programs hold; None for other devices."""
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free - torch.cuda.memory_reserved(device)


def _low_vram() -> str | None:
    from comfy.model_management import VRAMState, vram_state

    return {VRAMState.LOW_VRAM: "lowvram", VRAMState.NO_VRAM: "novram"}.get(vram_state)


def psnr(image: torch.Tensor, reference: torch.Tensor) -> float | None:
    """PSNR of two IMAGEs [B, H, W, C] of values in 0..1, in dB, averaged over the batch; 100 where they are equal.

    None where their shapes differ: a report is no reason to fail a prompt.
    """
    if image.shape != reference.shape:
        return None
    error = (image.double() - reference.double().to(image.device)).square().flatten(1).mean(1)
    return float((-10 * error.log10()).clamp(max=100.0).mean())


def _unlike(image: torch.Tensor, reference: torch.Tensor) -> str:
    one, two = (f"{shape[2]}x{shape[1]} ({shape[0]})" for shape in (image.shape, reference.shape))
    return f"Not compared: the image is {one} and the reference {two}; size and number must be the same."

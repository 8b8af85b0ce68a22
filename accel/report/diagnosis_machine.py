"""What of the machine stands in the way of a gain: versions, tools, memory. Pure: facts in, a sentence or None out."""

from __future__ import annotations

import re

from .diagnosis_facts import Facts

OLDEST_COMFYUI = (0, 3, 75)
"""The oldest that this pack is tested with."""

_GIB = 1 << 30


def torch_too_old(facts: Facts) -> str | None:
    if facts.ahead_of_time or not (facts.compiling or facts.nodes.get("AccelModel")):
        return None
    return (
        f"PyTorch {facts.torch} cannot compile ahead of time, so every block runs uncompiled: update it to 2.11 or "
        "later. DeepCache works with any."
    )


def triton_missing(facts: Facts) -> str | None:
    if facts.device not in ("cuda", "xpu") or facts.triton or facts.compiling.get("backend") != "inductor":
        return None
    return (
        "Triton is not installed, and without it nothing is compiled for the GPU: install the version that belongs to "
        f"PyTorch {facts.torch} (on Windows the package triton-windows)."
    )


def cpp_compiler_missing(facts: Facts) -> str | None:
    if facts.device != "cpu" or facts.cpp_compiler or facts.compiling.get("backend") != "inductor":
        return None
    return "There is no C++ compiler, and without one nothing is compiled for the CPU: install one (g++ on Linux)."


def comfyui_too_old(facts: Facts) -> str | None:
    parts = re.findall(r"\d+", facts.comfyui or "")[:3]
    if not parts or tuple(map(int, parts)) >= OLDEST_COMFYUI:
        return None
    oldest = ".".join(map(str, OLDEST_COMFYUI))
    return f"ComfyUI {facts.comfyui} is older than {oldest}, the oldest that this pack is tested with: update it."


def no_gpu(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return None
    return (
        "Models run on the CPU, where compiled blocks are hardly faster than plain ones; skipping steps pays anywhere."
    )


def partly_loaded(facts: Facts) -> str | None:
    share = (facts.run or {}).get("loaded_share")
    if share is None or share >= 0.98 or facts.device == "cpu":
        return None
    return (
        f"Only {share:.0%} of the model's weights fit into the GPU's memory: the others are copied at every step, "
        "which takes longer than compiling saves, and their blocks run uncompiled. A smaller or quantized model, a "
        "smaller batch, or closing other programs helps most."
    )


def saves_memory(facts: Facts) -> str | None:
    if facts.low_vram is None or partly_loaded(facts):
        return None
    return (
        f"ComfyUI runs in its mode {facts.low_vram}, which moves weights at every step: without it images are faster."
    )


def weights_are_streamed(facts: Facts) -> str | None:
    if not facts.streams_weights or not facts.compiling:
        return None
    return (
        "ComfyUI streams weights here (dynamic VRAM). Accelerate Model loads a copy of the model that stays in place; "
        "where it does not fit, its blocks run uncompiled."
    )


def gpu_is_shared(facts: Facts) -> str | None:
    if not facts.memory_total or facts.memory_free is None or facts.memory_ours is None:
        return None
    others = facts.memory_total - facts.memory_free - facts.memory_ours
    if others < max(0.2 * facts.memory_total, 2 * _GIB):
        return None
    return (
        f"Other programs hold {others / _GIB:.1f} of the GPU's {facts.memory_total / _GIB:.0f} GB, and perhaps its "
        "time as well: close what is not needed."
    )

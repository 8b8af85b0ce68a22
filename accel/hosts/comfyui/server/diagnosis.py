"""Why there is little or no gain, and what to change first. Pure: facts in, sentences out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.sentences import counted
from ....report.headline import why_none_skipped
from ....report.run import Run
from ....step_cache.config import QUALITIES
from ....step_cache.run import HALF, SKIPPED
from ..words import none_skipped

_CACHE_FULL = ("cache_entries_full", "cache_bytes_full")
_PATCHES = ("patched", "attention_replaced", "attention_override")
"""Codes of reasons (`core.reasons`)."""

_GIB = 1 << 30

NO_RUN = Run()

Nodes = Mapping[str, Sequence[Mapping[str, Any]]]
"""The inputs of a workflow's nodes, by node class."""


@dataclass(frozen=True)
class Facts:
    """What a diagnosis is made from; None, or empty, where it is unknown.

    run: the last one; `NO_RUN` where there is none. cache: totals of the graph cache (`GraphCache.statistics`).
    nodes: of the workflow that contains the report. prompt: its id.
    device: torch's type of the device that models run on.
    oldest_comfyui: that this pack is tested with.
    tool_missing: what torch does not find for compiling (`toolchain.lacking`).
    low_vram: ComfyUI's memory-saving mode, if it is in one. streams_weights: whether it streams weights (dynamic VRAM).
    memory_total, memory_free, memory_ours: bytes of the device; ours is what this process has reserved.
    """

    run: Run = NO_RUN
    cache: Mapping[str, Any] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=dict)
    prompt: str | None = None
    device: str = "cpu"
    torch: str = ""
    comfyui: str | None = None
    oldest_comfyui: tuple[int, ...] = ()
    compiles: bool = True
    tool_missing: str | None = None
    low_vram: str | None = None
    streams_weights: bool = False
    memory_total: int | None = None
    memory_free: int | None = None
    memory_ours: int | None = None

    @property
    def compiling(self) -> Mapping[str, Any]:
        """The settings of Accelerate Model in the last run; empty without it."""
        return self.run.compiling or {}

    @property
    def is_of_this_prompt(self) -> bool:
        """Whether the run was of the prompt that contains the report, and not of one before."""
        return self.prompt is not None and self.run.prompt == self.prompt

    @property
    def has_compiling_node(self) -> bool:
        """Whether a node that compiles the model is in the workflow."""
        return bool(self.nodes.get("AccelModel") or self.nodes.get("AccelSpeedUp"))

    @property
    def has_skipping_node(self) -> bool:
        """Whether a node that skips steps is in the workflow."""
        speeds_up = self.nodes.get("AccelSpeedUp", ())
        return bool(self.nodes.get("AccelDeepCache")) or any(QUALITIES.get(one.get("quality")) for one in speeds_up)

    @property
    def caching(self) -> Mapping[str, Any]:
        """The settings of DeepCache in the last run; empty without it."""
        return self.run.caching or {}


def nodes_of(prompt: Any) -> Nodes:
    """The nodes of a workflow in ComfyUI's API format, without inputs that are links; empty for anything else."""
    found: dict[str, list[dict[str, Any]]] = {}
    for node in prompt.values() if isinstance(prompt, Mapping) else ():
        if not isinstance(node, Mapping):
            continue
        inputs = node.get("inputs")
        values = inputs.items() if isinstance(inputs, Mapping) else ()
        plain = {name: value for name, value in values if not isinstance(value, list)}
        found.setdefault(str(node.get("class_type")), []).append(plain)
    return found


def no_run(facts: Facts) -> str | None:
    if facts.run is not NO_RUN:
        return None
    if facts.has_compiling_node or facts.has_skipping_node:
        return (
            "No image was made with these nodes yet: connect the image to `anything` of this node, so that it reports "
            "after the image."
        )
    return (
        "No image was made with Speed Up, Accelerate Model or DeepCache since ComfyUI started: put Speed Up between "
        "the loaders and the sampler."
    )


def run_failed(facts: Facts) -> str | None:
    if not facts.run.failed:
        return None
    return "The last run ended with an error or was stopped: its figures are not those of a whole image."


def no_compiling_node(facts: Facts) -> str | None:
    if facts.run is NO_RUN or not facts.nodes or facts.is_of_this_prompt:
        return None
    if facts.has_compiling_node or facts.has_skipping_node:
        return None
    return (
        "Nothing in this workflow speeds the model up: put Speed Up between the loaders and the sampler. The figures "
        "are of an earlier workflow."
    )


def whole_model_compiled_too(facts: Facts) -> str | None:
    if not facts.nodes.get("TorchCompileModel") or not (facts.has_compiling_node or facts.caching):
        return None
    return "TorchCompileModel is in this workflow too: it recompiles the whole model for new sizes. Take it out."


def backend_compiles_nothing(facts: Facts) -> str | None:
    if facts.compiling.get("backend") != "eager":
        return None
    return "The backend is eager, which only traces blocks and is no faster: choose inductor."


def cache_is_off(facts: Facts) -> str | None:
    if not facts.compiling or 0 not in (facts.cache.get("max_bytes"), facts.cache.get("max_entries")):
        return None
    return "The graph cache is set to 0, so nothing is compiled: raise its limits in the settings, under Accel."


def cache_too_small(facts: Facts) -> str | None:
    if cache_is_off(facts) or not facts.compiling:
        return None
    refused = any(why.code in _CACHE_FULL for why in facts.run.why_uncompiled())
    evicted = facts.run.totals.evicted if facts.run.compilations else 0
    if not refused and not evicted:
        return None
    dropped = f"dropped {counted(evicted, 'graph')} in this run to make room"
    what = "did not hold all graphs of this run" if refused else dropped
    return (
        f"The graph cache ({facts.cache.get('max_bytes', 0) / (1 << 20):.0f} MB, {facts.cache.get('max_entries', 0)} "
        f"block types) {what}: raise its limits in the settings, under Accel."
    )


def sizes_were_cold(facts: Facts) -> str | None:
    run = facts.run
    if not run.compilations:
        return None
    text = (
        f"This run compiled {counted(run.compilations, 'graph')}, which took {run.compile_seconds:.1f} of its "
        f"{run.seconds:.1f} s."
    )
    if facts.compiling.get("shapes") == "exact size":
        return f"{text} With exact size each new size, batch and prompt length compiles again: choose any size."
    return f"{text} The next image compiles nothing, whatever its size: judge by that one, or use Warm Up Graphs."


def exact_size(facts: Facts) -> str | None:
    if facts.compiling.get("shapes") != "exact size" or sizes_were_cold(facts):
        return None
    return "shapes is exact size: each new size, batch and prompt length compiles again. With any size none does."


def loading_took_long(facts: Facts) -> str | None:
    run = facts.run
    if not run.loaded or run.load_seconds < 0.1 * run.seconds:
        return None
    return (
        f"This run loaded {counted(run.loaded, 'graph')} from disk ({run.load_seconds:.1f} of its {run.seconds:.1f} "
        "s), once after a restart: the next image has them in memory."
    )


def blocks_fell_back(facts: Facts) -> str | None:
    told, reasons = facts.run.totals, facts.run.why_uncompiled()
    if not told.eager_calls or not reasons or not facts.compiling:
        return None
    code, total = reasons[0].code, told.eager_calls + told.compiled_calls
    text = f"{told.eager_calls} of {total} block calls ran uncompiled, mostly because: {str(reasons[0]).rstrip('.')}."
    if code in _PATCHES:
        return f"{text} Without that patch (an IP-Adapter, say) they run compiled."
    if code == "slower":
        return f"{text} Expected: on this machine these blocks run faster uncompiled."
    if code in ("gradients", "autocast"):
        return f"{text} Such calls always run uncompiled."
    return text


def not_captured(facts: Facts) -> str | None:
    told, reasons = facts.run.totals, facts.run.why_not_captured()
    if 2 * told.replays >= told.model_calls:
        return None
    text = f"{told.model_calls - told.replays} of {told.model_calls} model calls did not replay a CUDA graph"
    if reasons:
        text = f"{text}, mostly because: {str(reasons[0]).rstrip('.')}."
        return f"{text} Their blocks ran compiled all the same." if told.compiled_calls else text
    return f"{text}, because a new size is captured at its third call or later: the next image of this size replays."


def blocks_left_out(facts: Facts) -> str | None:
    left = facts.run.left_eager
    if not left or not facts.compiling:
        return None
    why, blocks = max(left.items(), key=lambda row: row[1])
    return f"{blocks} of {blocks + facts.run.blocks} blocks cannot be compiled: {str(why).rstrip('.')}."


def nothing_measured(facts: Facts) -> str | None:
    if facts.compiling.get("backend") != "inductor" or facts.compiling.get("check_gain", True):
        return None
    return "check_gain is off, so what compiling gains is not measured: turn it on."


def gain_is_small(facts: Facts) -> str | None:
    run = facts.run
    saved = run.totals.by_compiling.seconds
    if saved is None or sizes_were_cold(facts) or saved > 0.05 * run.seconds:
        return None
    return (
        f"Compiling saved only {max(saved, 0):.2f} of {run.seconds + max(saved, 0):.2f} s: most of the time goes "
        "into work that it cannot shorten, such as large matrix products."
    )


def deep_cache_is_off(facts: Facts) -> str | None:
    for inputs in facts.nodes.get("AccelDeepCache", ()):
        if inputs.get("interval") == 1:
            return "DeepCache's interval is 1, which turns it off: 3 is the default."
        if inputs.get("start_percent", 0.0) == inputs.get("end_percent", 1.0):
            return "DeepCache's start_percent equals its end_percent, which leaves no step to skip."
        is_free = inputs.get("quality", "off") == "off"
        if is_free and inputs.get("schedule") == "adaptive" and inputs.get("threshold") == 0:
            return "DeepCache's threshold is 0, so it skips nothing: 0.05 is the default."
    return None


def deep_cache_found_no_place(facts: Facts) -> str | None:
    if not facts.is_of_this_prompt or not facts.has_skipping_node or facts.caching or deep_cache_is_off(facts):
        return None
    return "DeepCache did nothing in the last run: it cannot split this model, and the log says why."


def deep_cache_skipped_nothing(facts: Facts) -> str | None:
    run = facts.run
    if not facts.caching or {SKIPPED, HALF} & set(run.skipping.steps_taken) or deep_cache_is_off(facts):
        return None
    steps = run.steps or len(run.skipping.steps_taken)
    return none_skipped(why_none_skipped(run.skipping, steps, run.samplings), steps, run.sampler)


def torch_cannot_compile(facts: Facts) -> str | None:
    if facts.compiles or not (facts.compiling or facts.has_compiling_node):
        return None
    return (
        f"PyTorch {facts.torch} cannot compile blocks for every size: install 2.11 or later (at least 2.7). DeepCache "
        "works with any version."
    )


def tool_missing(facts: Facts) -> str | None:
    if facts.tool_missing is None or facts.compiling.get("backend") != "inductor":
        return None
    return f"Nothing is compiled: {facts.tool_missing}."


def comfyui_too_old(facts: Facts) -> str | None:
    parts = re.findall(r"\d+", facts.comfyui or "")[:3]
    if not parts or tuple(map(int, parts)) >= facts.oldest_comfyui:
        return None
    oldest = ".".join(map(str, facts.oldest_comfyui))
    return f"ComfyUI {facts.comfyui} is older than {oldest}, the oldest tested with this pack: update it."


def no_gpu(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return None
    return (
        "Models run on the CPU, where compiling gains little; skipping steps (Balanced, Fast, DeepCache) pays anywhere."
    )


def partly_loaded(facts: Facts) -> str | None:
    share = facts.run.loaded_share
    if share is None or share >= 0.98 or facts.device == "cpu":
        return None
    return (
        f"Only {share:.0%} of the model fits into the GPU's memory: the rest is copied at every step, which takes "
        "longer than compiling saves. A smaller or quantized model, a smaller batch, or closing other programs helps "
        "most."
    )


def saves_memory(facts: Facts) -> str | None:
    if facts.low_vram is None or partly_loaded(facts):
        return None
    return (
        f"ComfyUI runs in its mode {facts.low_vram}, which moves weights at every step: images are faster without it."
    )


def weights_are_streamed(facts: Facts) -> str | None:
    if not facts.streams_weights or not facts.compiling:
        return None
    return (
        "ComfyUI streams weights here (dynamic VRAM): what does not fit into the GPU's memory is copied in each step, "
        "and compiling does not speed that up. A smaller or quantized model does."
    )


def gpu_is_shared(facts: Facts) -> str | None:
    if not facts.memory_total or facts.memory_free is None or facts.memory_ours is None:
        return None
    others = facts.memory_total - facts.memory_free - facts.memory_ours
    if others < max(0.2 * facts.memory_total, 2 * _GIB):
        return None
    return (
        f"Other programs hold {others / _GIB:.1f} of the GPU's {facts.memory_total / _GIB:.0f} GB and may slow it "
        "down: close what you don't need."
    )


CAUSES: tuple[Callable[[Facts], str | None], ...] = (
    *(no_run, run_failed, torch_cannot_compile, tool_missing, backend_compiles_nothing),
    *(cache_is_off, partly_loaded, cache_too_small, sizes_were_cold, whole_model_compiled_too),
    *(deep_cache_is_off, deep_cache_found_no_place, deep_cache_skipped_nothing, blocks_fell_back, blocks_left_out),
    *(not_captured, exact_size, loading_took_long, gpu_is_shared, saves_memory, no_gpu),
    *(weights_are_streamed, nothing_measured, gain_is_small, comfyui_too_old),
)
"""Whatever reduces the gain; what costs most, or is easiest to change, comes first."""


def diagnose(facts: Facts) -> list[str]:
    """One or two sentences for each thing that reduces the gain, in the order to change them; where the workflow gains
    nothing, that alone."""
    idle = no_compiling_node(facts)
    if idle is not None:
        return [idle]
    return [sentence for sentence in (cause(facts) for cause in CAUSES) if sentence is not None]

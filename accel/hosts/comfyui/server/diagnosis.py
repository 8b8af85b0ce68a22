"""Why there is little or no gain, and what to change first. Pure: facts in, sentences out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.sentences import EXPECTED, counted
from ....report.headline import why_none_skipped
from ....report.run import Run
from ....step_cache.config import QUALITIES
from ....step_cache.run import SKIPPED
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
    oldest_comfyui: the oldest that this pack is tested with.
    tool_missing: what torch does not find for compiling (`toolchain.lacking`).
    low_vram: ComfyUI's memory-saving mode, if it is in one. streams_weights: whether it streams weights (dynamic VRAM).
    memory_total, memory_of_others: bytes of the device, and those that other programs hold.
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
    memory_of_others: int | None = None

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
    def has_our_node(self) -> bool:
        return self.has_compiling_node or self.has_skipping_node

    @property
    def is_cache_off(self) -> bool:
        return 0 in (self.cache.get("max_bytes"), self.cache.get("max_entries"))

    @property
    def is_partly_loaded(self) -> bool:
        """Whether some weights of the model stay off the GPU."""
        share = self.run.loaded_share
        return share is not None and share < 0.98 and self.device != "cpu"


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


def nothing_whole_ran(facts: Facts) -> Iterator[str]:
    """No image, or only part of one, is there to judge by."""
    if facts.run is NO_RUN and facts.has_our_node:
        yield (
            "No image was made with these nodes yet: connect the image to `anything` of this node, so that it reports "
            "after the image."
        )
    elif facts.run is NO_RUN:
        yield (
            "No image was made with Speed Up, Accelerate Model or DeepCache since ComfyUI started: put Speed Up "
            "between the loaders and the sampler."
        )
    if facts.run.failed:
        yield "The last run ended with an error or was stopped: its figures are not those of a whole image."


def nothing_compiles(facts: Facts) -> Iterator[str]:
    backend = facts.compiling.get("backend")
    if not facts.compiles and (facts.compiling or facts.has_compiling_node):
        yield (
            f"PyTorch {facts.torch} cannot compile blocks for every size: install 2.11 or later (at least 2.7). "
            "DeepCache works with any version."
        )
    if facts.tool_missing is not None and backend == "inductor":
        yield f"Nothing is compiled: {facts.tool_missing}."
    if backend == "eager":
        yield "The backend is eager, which only traces blocks and is no faster: choose inductor."
    if facts.compiling and facts.is_cache_off:
        yield "The graph cache is set to 0, so nothing is compiled: raise its limits in the settings, under Accel."


def much_is_lost(facts: Facts) -> Iterator[str]:
    """Weights are copied in each step, or graphs are compiled again."""
    run, cache = facts.run, facts.cache
    if facts.is_partly_loaded:
        yield (
            f"Only {run.loaded_share:.0%} of the model fits into the GPU's memory: the rest is copied at every step, "
            "which takes longer than compiling saves. A smaller or quantized model, a smaller batch, or closing other "
            "programs helps most."
        )
    refused = any(why.code in _CACHE_FULL for why in run.why_uncompiled())
    evicted = run.totals.evicted if run.compilations else 0
    if facts.compiling and not facts.is_cache_off and (refused or evicted):
        dropped = f"dropped {counted(evicted, 'graph')} in this run to make room"
        what = "did not hold all graphs of this run" if refused else dropped
        yield (
            f"The graph cache ({cache.get('max_bytes', 0) / (1 << 20):.0f} MB, {cache.get('max_entries', 0)} block "
            f"types) {what}: raise its limits in the settings, under Accel."
        )
    if run.compilations:
        advice = "The next image compiles nothing, whatever its size: judge by that one, or use Warm Up Graphs."
        if facts.compiling.get("shapes") == "exact size":
            advice = "With exact size each new size, batch and prompt length compiles again: choose any size."
        yield (
            f"This run compiled {counted(run.compilations, 'graph')}, which took {run.compile_seconds:.1f} of its "
            f"{run.seconds:.1f} s. {advice}"
        )
    if facts.nodes.get("TorchCompileModel") and (facts.has_compiling_node or run.caching):
        yield "TorchCompileModel is in this workflow too: it recompiles the whole model for new sizes. Take it out."


def nothing_is_skipped(facts: Facts) -> Iterator[str]:
    run, off = facts.run, _why_off(facts.nodes)
    if off is not None:
        yield off
    elif not run.caching and facts.is_of_this_prompt and facts.has_skipping_node:
        yield "DeepCache did nothing in the last run: it cannot split this model, and the log says why."
    elif run.caching and SKIPPED not in run.skipping.steps_taken:
        steps = run.steps or len(run.skipping.steps_taken)
        yield none_skipped(why_none_skipped(run.skipping, steps, run.samplings), steps, run.sampler)


def _why_off(nodes: Nodes) -> str | None:
    """The input of DeepCache that turns it off."""
    for inputs in nodes.get("AccelDeepCache", ()):
        if inputs.get("start_percent", 0.0) == inputs.get("end_percent", 1.0):
            return "DeepCache's start_percent equals its end_percent, which leaves no step to skip."
    return None


def some_ran_uncompiled(facts: Facts) -> Iterator[str]:
    run, totals = facts.run, facts.run.totals
    reasons = run.why_uncompiled()
    if totals.eager_calls and reasons and facts.compiling:
        code, total = reasons[0].code, totals.eager_calls + totals.compiled_calls
        text = f"{totals.eager_calls} of {total} block calls ran uncompiled, mostly because: {_clause(reasons[0])}."
        if code in _PATCHES:
            text += " Without that patch they run compiled."
        elif code == "slower":
            text += " Expected: on this machine these blocks run faster uncompiled."
        elif code in ("gradients", "transformed", "autocast"):
            text += " Such calls always run uncompiled."
        yield text
    if run.left_eager and facts.compiling:
        why, blocks = max(run.left_eager.items(), key=lambda row: row[1])
        yield f"{blocks} of {blocks + run.blocks} blocks cannot be compiled: {_clause(why)}."
    because = run.why_not_captured()
    if 2 * totals.replays < totals.model_calls and not (because and because[0].code in EXPECTED):
        text = f"{totals.model_calls - totals.replays} of {totals.model_calls} model calls did not replay a CUDA graph"
        if not because:
            text += ", because a new size is captured at its third call or later: the next image of this size replays."
        else:
            text += f", mostly because: {_clause(because[0])}."
            text += " Their blocks ran compiled all the same." if totals.compiled_calls else ""
        yield text


def _clause(reason: Any) -> str:
    return str(reason).rstrip(".")


def little_is_lost(facts: Facts) -> Iterator[str]:
    """Costs of a single image, or of the machine, which are rarely worth a change."""
    run = facts.run
    if facts.compiling.get("shapes") == "exact size" and not run.compilations:
        yield "shapes is exact size: each new size, batch and prompt length compiles again. With any size none does."
    if run.loaded and run.load_seconds >= 0.1 * run.seconds:
        yield (
            f"This run loaded {counted(run.loaded, 'graph')} from disk ({run.load_seconds:.1f} of its "
            f"{run.seconds:.1f} s), once after a restart: the next image has them in memory."
        )
    total, others = facts.memory_total, facts.memory_of_others
    if total and others is not None and others >= max(0.2 * total, 2 * _GIB):
        yield (
            f"Other programs hold {others / _GIB:.1f} of the GPU's {total / _GIB:.0f} GB and may slow it down: close "
            "what you don't need."
        )
    if facts.low_vram is not None and not facts.is_partly_loaded:
        yield (
            f"ComfyUI runs in its mode {facts.low_vram}, which moves weights at every step: images are faster without "
            "it."
        )
    if facts.device == "cpu":
        yield (
            "Models run on the CPU, where compiling gains little; skipping steps (Balanced, Fast, DeepCache) pays "
            "anywhere."
        )
    if facts.streams_weights and facts.compiling:
        yield (
            "ComfyUI streams weights here (dynamic VRAM): what does not fit into the GPU's memory is copied in each "
            "step, and compiling does not speed that up. A smaller or quantized model does."
        )


def gain_is_small_or_unknown(facts: Facts) -> Iterator[str]:
    run, saved = facts.run, facts.run.totals.by_compiling.seconds
    if facts.compiling.get("backend") == "inductor" and not facts.compiling.get("check_gain", True):
        yield "check_gain is off, so what compiling gains is not measured: turn it on."
    if saved is not None and not run.compilations and saved <= 0.05 * run.seconds:
        yield (
            f"Compiling saved only {max(saved, 0):.2f} of {run.seconds + max(saved, 0):.2f} s: most of the time goes "
            "into work that it cannot shorten, such as large matrix products."
        )
    parts = re.findall(r"\d+", facts.comfyui or "")[:3]
    if parts and tuple(map(int, parts)) < facts.oldest_comfyui:
        oldest = ".".join(map(str, facts.oldest_comfyui))
        yield f"ComfyUI {facts.comfyui} is older than {oldest}, the oldest tested with this pack: update it."


CAUSES: tuple[Callable[[Facts], Iterator[str]], ...] = (
    *(nothing_whole_ran, nothing_compiles, much_is_lost, nothing_is_skipped),
    *(some_ran_uncompiled, little_is_lost, gain_is_small_or_unknown),
)
"""Whatever reduces the gain; what costs most, or is easiest to change, comes first."""


def diagnose(facts: Facts) -> list[str]:
    """One or two sentences for each thing that reduces the gain, in the order to change them; where the workflow gains
    nothing, that alone."""
    if facts.run is not NO_RUN and facts.nodes and not facts.is_of_this_prompt and not facts.has_our_node:
        return [
            "Nothing in this workflow speeds the model up: put Speed Up between the loaders and the sampler. The "
            "figures are of an earlier workflow."
        ]
    return [sentence for cause in CAUSES for sentence in cause(facts)]

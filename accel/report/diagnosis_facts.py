"""What a diagnosis goes by: the last run, the workflow, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Nodes = Mapping[str, Sequence[Mapping[str, Any]]]
"""The inputs of a workflow's nodes, by class."""


@dataclass(frozen=True)
class Facts:
    """What a diagnosis goes by. None, and an empty workflow, where it is not known.

    run: the last one, `run_record.Run.as_json`. cache: the graph cache's totals (`GraphCache.statistics`).
    nodes: those of the workflow that the report is part of.
    device: where models run, as torch calls its type. low_vram: ComfyUI's mode, where it is one that saves memory.
    streams_weights: core's dynamic VRAM.
    memory_total, memory_free, memory_ours: of the device, bytes; ours is what this process has taken of it.
    """

    run: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=dict)
    device: str = "cpu"
    torch: str = ""
    comfyui: str | None = None
    ahead_of_time: bool = True
    triton: str | None = None
    cpp_compiler: str | None = None
    low_vram: str | None = None
    streams_weights: bool = False
    memory_total: int | None = None
    memory_free: int | None = None
    memory_ours: int | None = None

    @property
    def compiling(self) -> Mapping[str, Any]:
        """The settings of Accelerate Model in the last run; empty without it."""
        return (self.run or {}).get("compiling") or {}

    @property
    def caching(self) -> Mapping[str, Any]:
        """The settings of DeepCache in the last run; empty without it."""
        return (self.run or {}).get("caching") or {}

    def reasons(self) -> list[Mapping[str, Any]]:
        """Why blocks of the last run were called uncompiled (rows of `Reason.as_json`), the most frequent first."""
        return [row for row in self._fallbacks() if row["code"] != "not_captured"]

    def reasons_not_captured(self) -> list[Mapping[str, Any]]:
        """Why calls of the whole model were not captured, the most frequent first."""
        return [row["fields"]["why"] for row in self._fallbacks() if row["code"] == "not_captured"]

    def left_eager(self) -> list[Mapping[str, Any]]:
        """Why blocks of the last run were left alone, with their number."""
        return (self.run or {}).get("left_eager_reasons", [])

    def _fallbacks(self) -> list[Mapping[str, Any]]:
        return sorted((self.run or {}).get("fallbacks", ()), key=lambda row: -row["calls"])


def nodes_of(prompt: Any) -> Nodes:
    """From a workflow in ComfyUI's API format, the nodes that a diagnosis looks at; empty for anything else.

    An input that is a link has no value here, and is left out.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for node in prompt.values() if isinstance(prompt, Mapping) else ():
        if not isinstance(node, Mapping):
            continue
        inputs = node.get("inputs")
        values = inputs.items() if isinstance(inputs, Mapping) else ()
        plain = {name: value for name, value in values if not isinstance(value, list)}
        found.setdefault(str(node.get("class_type")), []).append(plain)
    return found

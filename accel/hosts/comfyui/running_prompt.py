"""The prompt that core runs in this thread: its nodes, how far they are, and progress of compiling on a node's bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comfy_execution.graph_utils import is_link

from ...beside import making
from ...compile.generated_code import BESIDE, STAGES, TRACE
from ...core.events import emit, subscribe

_ONE_THING = frozenset({"MODEL", "VAE", "CLIP", "CONDITIONING", "CONTROL_NET", "LATENT", "IMAGE", "MASK"})
"""Types of links that carry nothing but what they are called after; others (GUIDER, packs' pipes) may hold a model."""


def find_upstream_node(class_type: str | None, through: str, **input_values: Any) -> str | None:
    """The id of the nearest node of this class on the way of the running node's "MODEL", "CLIP" or whatever `through`
    names; None outside of a prompt, and where none is.

    input_values: of that node's inputs, by name; one that comes from another node may be any.

    Asked while it runs: core hands what a node made to every later node of its class with equal inputs, in whatever
    prompt, so what was made cannot know whose it is.
    """
    prompt = _find_prompt()
    if prompt is None or class_type is None:
        return None
    for node_id in walk_upstream(prompt, _get_executing_context().node_id, through):
        node = prompt.get_node(node_id)
        given = ((node["inputs"].get(name), value) for name, value in input_values.items())
        if node["class_type"] == class_type and all(is_link(found) or found == value for found, value in given):
            return prompt.get_display_node_id(node_id)
    return None


def walk_upstream(prompt: Any, node_id: str, through: str) -> Iterator[str]:
    """A node's id, then those of all that it may have its `through` from, the nearest first."""
    import nodes  # core's

    waiting = [node_id]
    for current in waiting:  # grows meanwhile
        yield current
        for source, output in filter(is_link, prompt.get_node(current)["inputs"].values()):
            if source in waiting or not prompt.has_node(source):
                continue
            made_by = nodes.NODE_CLASS_MAPPINGS.get(prompt.get_node(source)["class_type"])
            types = getattr(made_by, "RETURN_TYPES", ())
            kind = types[output] if output < len(types) else None
            # A list of choices is a type, too, and cannot be looked up.
            if not isinstance(kind, str) or kind == through or kind not in _ONE_THING:
                waiting.append(source)


def is_missing_input(name: str, used_output: int) -> bool:
    """Whether the running node lacks this input though another reads this output; False outside of a prompt."""
    prompt = _find_prompt()
    if prompt is None:
        return False
    node_id = _get_executing_context().node_id
    readers = (prompt.get_node(other)["inputs"].values() for other in prompt.all_node_ids())
    return name not in prompt.get_node(node_id)["inputs"] and any([node_id, used_output] in links for links in readers)


def get_prompt_id() -> str | None:
    """The id of the prompt that this thread runs a node of; None outside of a prompt."""
    return getattr(_get_executing_context(), "prompt_id", None)


def steps_shown() -> int | None:
    """How far the bar of the running node is, of a sampler its steps; None outside of a prompt, or without a bar."""
    bar = getattr(_progress_registry(), "nodes", {}).get(getattr(_get_executing_context(), "node_id", None))
    return None if bar is None else int(bar["value"])


def _get_executing_context() -> Any:
    """What core says of the node that this thread runs; None outside of a prompt."""
    return getattr(sys.modules.get("comfy_execution.utils"), "get_executing_context", lambda: None)()


def _progress_registry() -> Any:
    """Core's progress of nodes, of the prompt that runs or ran last; None where there is none."""
    return getattr(sys.modules.get("comfy_execution.progress"), "global_progress_registry", None)


def _find_prompt() -> Any:
    """The prompt that this thread runs a node of, with its nodes; None outside of a prompt."""
    running, prompt = _get_executing_context(), getattr(_progress_registry(), "dynprompt", None)
    return prompt if None not in (running, prompt) and prompt.has_node(running.node_id) else None


class CompileProgress:
    """Reports which of how many kinds is being compiled, and how far: by the event "compiling", and on a node's bar."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._name = ""
        self._compiled = self._loaded = self._kinds = 0
        self._beside = making.progress()

    @contextmanager
    def report_call(self, kinds: int, node_id: str | None) -> Iterator[None]:
        """Report what this thread compiles in a call of a model with so many kinds. node_id: of the bar's node."""
        self._kinds, self._node_id = kinds, node_id
        done, thread = self._compiled, threading.get_ident()

        def listen(name: str, data: dict[str, Any]) -> None:
            if threading.get_ident() != thread:
                return
            if name == "graph_loaded":
                self._loaded += 1
            elif name == "compile_start":
                self._name = data["name"]
                self._tell(TRACE)
            elif name == "compile_stage":
                self._tell(data["stage"])
            elif name == "compile_end":
                self._compiled += 1
                self._show(self._compiled + self._loaded)

        stop = subscribe(listen)
        try:
            yield
        finally:
            stop()
            if self._beside != making.progress():  # how far the code is that no image waits for
                self._beside = ready, of = making.progress()
                left, name = making.estimate_seconds(ready, of - ready), "compiling" if ready < of else "code_ready"
                emit(name, name="", number=ready + 1, of=of, stage=BESIDE, node=node_id, left=left)
            registry = self._find_registry()
            if self._compiled > done and registry is not None:
                registry.finish_progress(node_id)

    def _tell(self, stage: str) -> None:
        done = self._compiled + self._loaded
        of = max(self._kinds, done + 1)
        emit("compiling", name=self._name, number=done + 1, of=of, stage=stage, node=self._node_id)
        self._show(done, STAGES.index(stage))

    def _show(self, done: int, stages: int = 0) -> None:
        """done: kinds. stages: of the next one."""
        registry, value = self._find_registry(), done * len(STAGES) + stages
        if registry is not None:
            registry.update_progress(self._node_id, value, max(value, self._kinds * len(STAGES), 1))

    def _find_registry(self) -> Any:
        """Core's progress, if the running prompt has the node with the bar."""
        registry = _progress_registry()
        has_node = getattr(getattr(registry, "dynprompt", None), "has_node", lambda node_id: False)
        return registry if self._node_id is not None and has_node(self._node_id) else None

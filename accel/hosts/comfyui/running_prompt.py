"""The prompt that core runs in this thread: its nodes, how far they are, and progress of compiling on a node's bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...beside import making
from ...compile.generated_code import BESIDE, STAGES, TRACE
from ...core.events import emit, subscribe


def steps_shown() -> int | None:
    """How far the bar of the running node is, of a sampler its steps; None outside of a prompt, or without a bar."""
    context, registry = _executing(), _progress_registry()
    shown = None if context is None else getattr(registry, "nodes", {}).get(context.node_id)
    return None if shown is None else int(shown["value"])


def _progress_of(node_id: str | None) -> Any:
    """Core's registry of progress per node, if the running prompt has this node."""
    registry = _progress_registry()
    has_node = getattr(getattr(registry, "dynprompt", None), "has_node", None)
    return registry if node_id is not None and has_node is not None and has_node(node_id) else None


def _progress_registry() -> Any:
    """Core's, of the prompt that runs or ran last; None where there is none."""
    return getattr(sys.modules.get("comfy_execution.progress"), "global_progress_registry", None)


def running_prompt() -> str | None:
    """The id of the prompt that this thread runs a node of; None outside of a prompt."""
    context = _executing()
    return None if context is None else context.prompt_id


_ONE_THING = frozenset({"MODEL", "VAE", "CLIP", "CONDITIONING", "CONTROL_NET", "LATENT", "IMAGE", "MASK"})
"""Types of links that carry nothing but what they are called after; others (GUIDER, packs' pipes) may hold a model."""


def leading_node(class_type: str | None, carried: str, **choices: Any) -> str | None:
    """The id of the node of this class that the running node has its `carried` ("MODEL", "VAE") from, the nearest if
    several are on the way; None outside of a prompt, and where none is.

    choices: values of inputs that it has; one that comes from another node may be any.

    Asked while it runs: core hands what a node made to every later node of its class with equal inputs, in whatever
    prompt, so what was made cannot know whose it is.
    """
    context, registry = _executing(), _progress_registry()
    prompt = getattr(registry, "dynprompt", None)
    if context is None or prompt is None or class_type is None:
        return None
    from comfy_execution.graph_utils import is_link

    import nodes

    waiting, seen = [context.node_id], set()
    for node_id in waiting:
        if node_id in seen or not prompt.has_node(node_id):
            continue
        seen.add(node_id)
        node = prompt.get_node(node_id)
        given = ((node["inputs"].get(name), choice) for name, choice in choices.items())
        if node["class_type"] == class_type and all(value == choice or is_link(value) for value, choice in given):
            return prompt.get_display_node_id(node_id)
        for link in filter(is_link, node["inputs"].values()):
            source, output = link
            made = prompt.get_node(source)["class_type"] if prompt.has_node(source) else None
            types = getattr(nodes.NODE_CLASS_MAPPINGS.get(made), "RETURN_TYPES", ())
            kind = types[output] if output < len(types) else None
            is_name = isinstance(kind, str)  # a list of choices is a type, too
            if not is_name or kind == carried or kind not in _ONE_THING:
                waiting.append(source)
    return None


def is_missing_input(name: str, used_output: int) -> bool:
    """Whether the running node has no such input though another node reads this output of it; False outside of a
    prompt."""
    context, prompt = _executing(), getattr(_progress_registry(), "dynprompt", None)
    if context is None or prompt is None:
        return False
    given = [node["inputs"] for node in map(prompt.get_node, prompt.all_node_ids())]
    is_given = name in prompt.get_node(context.node_id)["inputs"]
    return not is_given and any([context.node_id, used_output] in inputs.values() for inputs in given)


def _executing() -> Any:
    asked = getattr(sys.modules.get("comfy_execution.utils"), "get_executing_context", None)
    return None if asked is None else asked()


class CompileProgress:
    """Reports which of how many kinds is being compiled, and how far: by the event "compiling", and on a node's bar."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._name = ""
        self._compiled = self._loaded = self._kinds = 0
        self._beside = making.progress()

    @contextmanager
    def during_call(self, kinds: int, node_id: str | None) -> Iterator[None]:
        """Report what this thread compiles during one call of a model with this many kinds of blocks.

        node_id: of the node with the bar; None (a node outside of a graph, a library call) shows it nowhere.
        """
        self._kinds, self._node_id = kinds, node_id
        done, thread = self._compiled, threading.get_ident()

        def listen(name: str, data: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                self._report(name, data)

        stop = subscribe(listen)
        try:
            yield
        finally:
            stop()
            self._tell_beside()
            registry = _progress_of(node_id)
            if self._compiled > done and registry is not None:
                registry.finish_progress(node_id)

    def _report(self, name: str, data: dict[str, Any]) -> None:
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

    def _tell(self, stage: str) -> None:
        done = self._compiled + self._loaded
        of = max(self._kinds, done + 1)
        emit("compiling", name=self._name, number=done + 1, of=of, stage=stage, node=self._node_id)
        self._show(done, STAGES.index(stage))

    def _tell_beside(self) -> None:
        """Say how far the code is that no image waits for, where that is news."""
        if self._beside != making.progress():
            self._beside = done, of = making.progress()
            emit("compiling", name="", number=min(done + 1, of), of=of, stage=BESIDE, node=self._node_id)

    def _show(self, done: int, stages: int = 0) -> None:
        """done: kinds. stages: of the next one."""
        registry, value = _progress_of(self._node_id), done * len(STAGES) + stages
        if registry is not None:
            registry.update_progress(self._node_id, value, max(value, self._kinds * len(STAGES), 1))

"""Differences between versions of ComfyUI, all in this file.

Supported: 0.3.75 to today's. Features are probed for, version numbers are not compared.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from comfy_api.latest import io

NO_RESULT_DEPENDS_ON = frozenset({("comfy.model_management", "MAX_PINNED_MEMORY")})
"""Globals that the code of blocks looks at in some versions (0.33.0), and that differ between machines: how much
memory may be pinned goes by how much there is."""


def schema(**fields: Any) -> io.Schema:
    """An `io.Schema` of the fields that this core knows; it raises TypeError on any other.

    Later additions: `search_aliases` (0.11.0).
    """
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})


def make_input(kind: type, /, input_id: str, **options: Any) -> Any:
    """`kind.Input(input_id, ...)` with the options that this core knows.

    `kind` is an io type such as `io.Int`. Later additions: `advanced` (0.10.0).
    """
    known = inspect.signature(kind.Input.__init__).parameters
    return kind.Input(input_id, **{name: value for name, value in options.items() if name in known})


def check_options(**chosen: tuple[Any, Sequence[str]]) -> bool | str:
    """For `validate_inputs`: True, or one sentence about the first value that is not among its options.

    chosen: input name → (value, options); a value of None is a link's, not known yet. Cores such as
    0.3.75 do not check the options of V3 nodes, and an unknown one would reach `execute`.
    """
    for name, (value, options) in chosen.items():
        if value is not None and value not in options:
            return f"{name} is {value!r}; it must be one of: {', '.join(options)}."
    return True


def clone_for_compiling(model: Any) -> Any:
    """A clone of a ModelPatcher whose weights stay where they are between calls.

    Cores from 0.15.1 on may stream weights ("dynamic VRAM"); compiled blocks need them in place.
    """
    if "disable_dynamic" in inspect.signature(model.clone).parameters:
        return model.clone(disable_dynamic=True)
    return model.clone()


def is_dynamic(model: Any) -> bool:
    """Whether a ModelPatcher streams its weights; cores from 0.15.1 on may."""
    asked = getattr(model, "is_dynamic", None)
    return asked is not None and asked()


def is_split_over_devices(options: dict) -> bool:
    """Whether a call with this per-call dict is one of several that run at once, on a device each; newer cores may."""
    return "multigpu_thread_device" in options


def streams_weights() -> bool:
    """Whether core streams weights to the device as they are needed ("dynamic VRAM", from 0.15.1 on)."""
    return bool(getattr(sys.modules.get("comfy.memory_management"), "aimdo_enabled", False))


def comfyui_version() -> str | None:
    """As the release calls itself, "0.3.75"; None for a tree that does not say."""
    try:
        from comfyui_version import __version__
    except ImportError:
        return None
    return __version__


def show_node_progress(node_id: str, value: int, of: int) -> None:
    """Fill a node's own bar in the page to `value` of `of`; the running node's bar is another entry, and stays.

    Nothing happens outside of a prompt, or where core keeps no progress by node.
    """
    registry = _progress_of(node_id)
    if registry is not None:
        registry.update_progress(node_id, value, of)


def finish_node_progress(node_id: str) -> None:
    """Take the node's own bar away: it is as it was, done."""
    registry = _progress_of(node_id)
    if registry is not None:
        registry.finish_progress(node_id)


def _progress_of(node_id: str) -> Any:
    """Core's registry of the nodes' progress, where the prompt that runs has this node; else None."""
    registry = getattr(sys.modules.get("comfy_execution.progress"), "global_progress_registry", None)
    has_node = getattr(getattr(registry, "dynprompt", None), "has_node", None)
    return registry if has_node is not None and has_node(node_id) else None


async def queue_prompt(
    server: Any, graph: dict, client_id: str | None, last_check: Callable[[], None] = lambda: None
) -> tuple[str, str | None]:
    """Queue a prompt as `POST /prompt` does: its id, and the reason where it is not valid.

    last_check: called right before the prompt enters the queue; no other request is served between them.
        What it raises passes through, and nothing is queued.

    The queue's items have had a sixth part, for secrets, since before 0.3.75.
    """
    import time
    import uuid

    import execution

    prompt_id = str(uuid.uuid4())
    valid, error, outputs, node_errors = await execution.validate_prompt(prompt_id, graph, None)
    if not valid:
        reasons = [reason["message"] for node in node_errors.values() for reason in node["errors"]]
        return prompt_id, "; ".join(reasons) or error.get("message", "the prompt is not valid")
    extra = {"create_time": int(time.time() * 1000)}
    if client_id is not None:
        extra["client_id"] = client_id
    last_check()
    number = server.number
    server.number += 1
    server.prompt_queue.put((number, prompt_id, graph, extra, outputs, {}))
    return prompt_id, None

"""All differences between versions of ComfyUI, 0.3.75 and later.

Features are probed; version numbers are not compared.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from comfy_api.latest import io

from ...core.reasons import Reason, RunEagerly
from . import attention, kitchen_kernels

OLDEST = (0, 3, 75)
"""The oldest ComfyUI that this pack is tested with."""

NO_RESULT_DEPENDS_ON = attention.Ignored(
    {
        ("comfy.model_management", "MAX_PINNED_MEMORY"),
        ("comfy.memory_management", "RAM_CACHE_HEADROOM"),
        ("comfy.memory_management", "extra_ram_release_callback"),
    }
)
"""Globals that blocks' code reads in some versions (0.33.0) and that no result depends on: limits that follow from the
installed memory, and what core calls during a prompt to have its cache of outputs give memory back."""


_LATENT_SCALES = {
    "ChromaRadiance": 1,
    "SC_B": 4,
    "SD_X4": 4,
    "Flux2": 16,
    "HunyuanImage21Refiner": 16,
    "HunyuanVideo15": 16,
    "Wan22": 16,
    "HunyuanImage21": 32,
    "LTXV": 32,
}
"""Scales other than 8 by latent format, for cores whose formats do not have `spacial_downscale_ratio`.

From the empty-latent nodes and VAEs of 0.3.75.
"""


def schema(**fields: Any) -> io.Schema:
    """An `io.Schema` of the fields that this core knows; core raises TypeError for any other.

    Added later: `search_aliases` (0.11.0).
    """
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})


class _ListedCombo(io.Combo.Input):
    """A combo whose type is the list of its options, as nodes of the first version declare it."""

    def get_io_type(self) -> Any:
        return list(self.options)


def make_input(kind: type, /, input_id: str, **options: Any) -> Any:
    """`kind.Input(input_id, ...)` with the options that this core knows.

    kind: an io type such as `io.Int`. Added later: `advanced` (0.10.0). Cores such as 0.3.75 compare a combo's value
    with its options only where these are its type.
    """
    known = inspect.signature(kind.Input.__init__).parameters
    made = _ListedCombo if kind is io.Combo and "advanced" not in known else kind.Input
    declared = made(input_id, **{name: value for name, value in options.items() if name in known})
    if kind is io.String:  # core checks these for every kind, and declares them for numbers alone
        declared.extra_dict = {name: options[name] for name in ("min", "max") if name in options}
    return declared


def latent_scale(latent_format: Any) -> int:
    """Pixels a side per element of a latent format."""
    given = getattr(latent_format, "spacial_downscale_ratio", None)
    return int(given or _LATENT_SCALES.get(type(latent_format).__name__, 8))


def clone_in_place(model: Any) -> Any:
    """A clone of a ModelPatcher whose weights stay in place between calls, although core streams them (from 0.15.1 on).

    Raises Exception: the model cannot be loaded once more: it is not from a file, or its loader cannot do it.
    """
    return model.clone(disable_dynamic=True)


def takes_streamed_weights() -> bool:
    """Whether core can load the streamed weights of several layers at once (from about 0.22 on)."""
    needed = {
        "cast_modules_with_vbar": "comfy_modules dtype device bias_dtype non_blocking",
        "resolve_cast_module_with_vbar": "s dtype device bias_dtype compute_dtype want_requant",
    }
    for name, parameters in needed.items():
        function = getattr(sys.modules.get("comfy.ops"), name, None)
        if function is None:
            return False
        names = list(inspect.signature(function).parameters)
        if names[: len(parameters.split())] != parameters.split():
            return False
    beside = {
        "comfy.memory_management": "tensors_to_geometries",
        "comfy.model_management": "get_total_memory current_stream sync_stream",
    }
    return all(hasattr(sys.modules.get(module), name) for module, names in beside.items() for name in names.split())


def stored_forms(weights: Sequence[torch.Tensor | None]) -> list[Any]:
    """The form in which core loads these streamed weights: each has `shape` and `dtype`; None for None.

    A quantised weight is its own form. Only for cores of `takes_streamed_weights`.
    """
    from comfy.memory_management import tensors_to_geometries

    return tensors_to_geometries(weights)


_CASTS = ("cast_bias_weight", "uncast_bias_weight", "cast_modules_with_vbar", "resolve_cast_module_with_vbar")
_replaced: dict[tuple[Any, str], Callable] = {}
_HIDDEN = "_torchdynamo_orig_callable"
_threads_tracing = 0
_tracing_lock = threading.Lock()


@contextmanager
def traceable(traces: bool = False) -> Iterator[None]:
    """Restore core's own casting functions, and replace kernels by operators of torch, in all threads while it lasts.

    traces: code is traced or called without values, so attention that cannot be traced is replaced too.

    KJNodes hides the casting functions from torch's compiler (`patch_aimdo_for_compile`), process-wide and for good;
    a block could then not be traced in one piece.
    """
    import comfy.ops

    global _threads_tracing
    with _tracing_lock:
        _threads_tracing += 1
        casts = [(comfy.ops, name, getattr(vars(comfy.ops).get(name), _HIDDEN, None)) for name in _CASTS]
        for module, name, function in (
            *casts,
            *kitchen_kernels.stand_ins(),
            *(attention.stand_ins() if traces else ()),
        ):
            if function is not None and (module, name) not in _replaced:
                _replaced[module, name] = getattr(module, name)
                setattr(module, name, function)
    try:
        yield
    finally:
        with _tracing_lock:
            _threads_tracing -= 1
            while _replaced and not _threads_tracing:  # another device's thread may be tracing still
                (module, name), function = _replaced.popitem()
                setattr(module, name, function)


def is_dynamic(model: Any) -> bool:
    """Whether a ModelPatcher or a VAE streams its weights (from 0.15.1 on)."""
    asked = getattr(model, "is_dynamic", None)
    return asked is not None and asked()


def is_split_over_devices(options: dict) -> bool:
    """Whether the call with this per-call dict is one of several that run at once, one per device (newer cores)."""
    return "multigpu_thread_device" in options


# Comfy Compiler, from 0.34 on: around the blocks of some models, core records what is allocated and freed in one call,
# and hands out the same addresses in the next. What outlives its scope leaks, and a recorded tensor that is freed in
# another scope, or while recording is paused, ends the process. `comfy.model_prefetch`; the rules are comfy-aimdo's.


def unrecorded_context() -> Callable[[], AbstractContextManager] | None:
    """A factory of contexts in which core does not record this thread's memory; None for a core that never does.

    The contexts do not nest. Making one raises `RunEagerly` while core captures a CUDA graph around the call.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")
    return _unrecorded if hasattr(prefetch, "pause_malloc_graph") or _recordings(prefetch) is not None else None


def records_memory() -> bool:
    """Whether core has recorded any memory since it last dropped its records, as it does at the end of a run."""
    return bool(getattr(sys.modules.get("comfy.model_prefetch"), "MALLOC_GRAPH_USED", False))


def _recordings(prefetch: Any) -> dict[int, Any] | None:
    """Core's recording of each thread, by thread; None where this core makes none."""
    found = getattr(prefetch, "MALLOC_GRAPHS", None)
    return getattr(prefetch, "ACTIVE_MALLOC_GRAPHS", None) if found is None else found


def _unrecorded() -> AbstractContextManager:
    prefetch = sys.modules["comfy.model_prefetch"]
    recordings = _recordings(prefetch)
    recording = None if recordings is None else recordings.get(threading.get_ident())
    if recordings is not None and (recording is None or not getattr(recording, "_comfy_active", True)):
        return _NOTHING
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RunEagerly(Reason("captured_around"))
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return _Paused(_paused(recording) if pause is None else pause())


_NOTHING = nullcontext()


class _Paused:
    """Core's pause, in which no garbage is collected either, as it may hold recorded tensors."""

    __slots__ = ("_collects", "_pause")

    def __init__(self, pause: AbstractContextManager):
        self._pause = pause

    def __enter__(self) -> None:
        self._pause.__enter__()
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        try:
            self._pause.__exit__(*error)
        finally:
            if self._collects:
                gc.enable()


@contextmanager
def _paused(recording: Any) -> Iterator[None]:
    """Core's `pause_malloc_graph`, for cores that do not have it yet."""
    recording.pause()
    try:
        yield
    finally:
        recording.resume()


def show_node_progress(node_id: str, value: int, of: int) -> None:
    """Fill a node's own progress bar to `value` of `of`; the bar of the running node is a separate one.

    Does nothing outside of a prompt, or if core has no progress per node.
    """
    registry = _progress_of(node_id)
    if registry is not None:
        registry.update_progress(node_id, value, of)


def finish_node_progress(node_id: str) -> None:
    """Remove the node's own bar: the node is done."""
    registry = _progress_of(node_id)
    if registry is not None:
        registry.finish_progress(node_id)


def steps_shown() -> int | None:
    """How far the bar of the running node is, of a sampler its steps; None outside of a prompt, or without a bar."""
    context, registry = _executing(), _progress_registry()
    shown = None if context is None else getattr(registry, "nodes", {}).get(context.node_id)
    return None if shown is None else int(shown["value"])


def _progress_of(node_id: str) -> Any:
    """Core's registry of progress per node, if the running prompt has this node."""
    registry = _progress_registry()
    has_node = getattr(getattr(registry, "dynprompt", None), "has_node", None)
    return registry if has_node is not None and has_node(node_id) else None


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


def lacks(needed: str, output: int) -> bool:
    """Whether the running node has no input `needed` though another reads its output; False outside of a prompt."""
    context, prompt = _executing(), getattr(_progress_registry(), "dynprompt", None)
    if context is None or prompt is None:
        return False
    given = [node["inputs"] for node in map(prompt.get_node, prompt.all_node_ids())]
    is_given = needed in prompt.get_node(context.node_id)["inputs"]
    return not is_given and any([context.node_id, output] in inputs.values() for inputs in given)


def forget_prefetched(model: torch.nn.Module) -> None:
    """Drop what a call that failed has brought of streamed weights: the next one would take it for whole."""
    clean_up = getattr(sys.modules.get("comfy.model_prefetch"), "cleanup_prefetched_modules", None)
    for part in model.modules() if clean_up is not None else ():
        if not vars(part).keys().isdisjoint(("_prefetch", "_v_block_faulted")):
            clean_up(part, [part])


def _executing() -> Any:
    asked = getattr(sys.modules.get("comfy_execution.utils"), "get_executing_context", None)
    return None if asked is None else asked()

"""Recorded model calls inside ComfyUI: where they stand in a call, and what speaks against one.

They are the innermost of the wrappers around a model's forward, so that what other packs wrap around it runs in
every call; what runs inside is the model's own code and the blocks' stand-ins. Memory goes back when ComfyUI asks for
it (`capture_memory`), when it unloads the model, when the model goes, and at the next run of any model when its
weights have been moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ....cache.graph_cache import GraphCache, shared
from ....cache.lease import Lease
from ....core.reasons import Reason, RunEagerly
from ....cuda_graphs.cuda import CudaCapturer
from ....cuda_graphs.model_capture import ModelCapture
from ....cuda_graphs.model_guard import CaptureHost
from ....cuda_graphs.pool import CapturePool
from ....dispatch.block_runner import BlockRunner
from ....fingerprint.code_hash import CodeReader
from ....fingerprint.plain_values import Indescribable
from ....modules.substitution import Order, substituted
from ....signature.tree_spec import CONSTANTS
from ..server import preferences
from ..versions import NO_RESULT_DEPENDS_ON, is_dynamic, is_split_over_devices
from .capture_memory import memory_of, room_for_recordings
from .options import CAPTURE as KEY
from .options import INTERRUPTS, asks_wrappers, is_transformer_options

_PER_CALL = frozenset(
    "activations_shape block block_index block_type callbacks img_slice original_shape patches patches_replace "
    "sample_sigmas sigmas total_blocks transformer_index uuids wrappers".split()
)
"""Keys of the per-call dict that say nothing of what the model computes while no patch reads them, or that it writes
itself."""


def attach(cache: GraphCache, model: Any) -> None:
    """Let calls be recorded into the cache, and let go of those of the patcher's model when it is unloaded."""
    if cache.captures is None:
        cache.captures = CapturePool(CudaCapturer())
    memory_of(cache)

    def let_go(patcher: Any, unpatch_all: bool = True, *args: Any) -> None:
        if unpatch_all:  # not where another clone takes its place, with the weights as they are
            cache.captures.drop_model(cache, patcher.model.diffusion_model)

    model.callbacks.get(CallbacksMP.ON_DETACH, {}).pop(KEY, None)
    model.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, let_go)


def begin(
    base: torch.nn.Module, settings: Hashable, cache: GraphCache, lease: Lease, layers: Mapping[torch.nn.Module, Any]
) -> ModelCapture:
    """For one run of a BaseModel whose blocks have these stand-ins."""
    memory = memory_of(cache)
    if cache is shared:
        preferences.make_room_for_recordings(room_for_recordings(comfy.model_management.get_torch_device()))
    cache.captures.drop_outdated(cache)
    memory.leave_if_empty()
    asked = memory.asked
    model = base.diffusion_model
    runners = [layer for layer in layers.values() if isinstance(layer, BlockRunner)]
    strings, code, reason = frozenset(), None, None
    try:
        hashed = CodeReader(NO_RESULT_DEPENDS_ON).read(frozenset(map(type, model.modules())))
        strings, code = hashed.strings, hashed.digest
    except Indescribable as why:
        reason = Reason("code_unknown", what=str(why))
    host = CaptureHost(
        facts=(code, settings, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        simplify=_simplifier(strings),
        token=lambda: _weights_token(base),
        why_not=lambda: reason or _obstacle(base) or (Reason("memory_needed") if memory.asked > asked else None),
        of_module=_obstacle_in,
        interrupts=INTERRUPTS,
    )
    return ModelCapture(model, cache, cache.captures, lease, runners, host)


@contextmanager
def standing_in(capture: ModelCapture, model: torch.nn.Module, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For one call of the model, whose transformer_options are to be those that it yields."""
    if is_split_over_devices(options):
        yield options
        return
    options = {**options, KEY: capture}
    if not asks_wrappers(model):
        with substituted({model: torch.compiler.disable(capture.call)}, Order.CAPTURED):
            yield options
        return
    wrappers = options.get("wrappers", {})
    of_model = {key: known for key, known in wrappers.get(WrappersMP.DIFFUSION_MODEL, {}).items() if key != KEY}
    options["wrappers"] = {**wrappers, WrappersMP.DIFFUSION_MODEL: {**of_model, KEY: [_call_model]}}
    yield options


@torch.compiler.disable
def _call_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    options = kwargs.get("transformer_options") or next(
        (value for value in args if isinstance(value, dict) and KEY in value), {}
    )
    capture: ModelCapture | None = options.get(KEY)
    is_innermost = executor.idx + 1 == len(executor.wrappers)
    if capture is None or not is_innermost:
        return executor(*args, **kwargs)
    return capture.call(executor, *args, **kwargs)


def _simplifier(strings: frozenset[str]) -> Callable[[dict], dict]:
    """From the per-call dict to what a recorded call is given of it; `strings`: all in the model's code.

    What its code does not ask for is left out: others keep counters and objects of their own there. Raises `RunEagerly`
    where somebody's code in the dict would have to run in each call.
    """

    readable = strings - _PER_CALL

    def simplify(options: dict) -> dict:
        if not is_transformer_options(options):
            return options
        if options.get("optimized_attention_override") is not None:
            raise RunEagerly(Reason("attention_override"))
        if options.get("patches") or options.get("patches_replace"):
            for name, patches in (*options.get("patches", {}).items(), *options.get("patches_replace", {}).items()):
                if patches:
                    raise RunEagerly(Reason("patch_runs", patch=name))
        if readable.isdisjoint(options):
            return {}
        kept = {}
        for key, value in options.items():
            if key not in readable:
                continue
            if type(value) in CONSTANTS or _is_plain(value):
                kept[key] = value
            else:
                raise RunEagerly(Reason("reads_option", option=key))
        return kept

    return simplify


def _is_plain(value: Any) -> bool:
    """Whether it is made of numbers and texts alone."""
    if type(value) not in (list, tuple, dict):
        return False
    parts = value.values() if type(value) is dict else value
    return all(type(part) in CONSTANTS or _is_plain(part) for part in parts)


def _weights_token(base: torch.nn.Module) -> Hashable:
    """What core changes when it loads, unloads or patches weights."""
    names = ("current_weight_patches_uuid", "model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram")
    return tuple(getattr(base, name, None) for name in names)


def _obstacle(base: torch.nn.Module) -> Reason | None:
    """Why no call of the model can be recorded just now."""
    if getattr(base, "model_lowvram", False):
        return Reason("loaded_in_part")
    patcher = base.current_patcher
    if patcher is None:
        return None
    if is_dynamic(patcher):
        return Reason("weights_streamed")
    if patcher.current_hooks is not None:
        return Reason("hooks_on_weights")
    if patcher.injections:
        return Reason("code_injected")
    return None


def _obstacle_in(module: torch.nn.Module) -> Reason | None:
    if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
        return Reason("weights_patched")
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return Reason("compiled_whole")
    return None

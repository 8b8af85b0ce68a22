"""ComfyUI's hook points for one model call: what its per-call dict, `transformer_options`, means for us.

The dict changes at every call, so a graph whose key depended on it would be compiled again each time. A compiled
block sees none of it, except plain values that the block's code reads; if a patch in the dict concerns the block, the
block runs eagerly, as ComfyUI would run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP

from ....core.reasons import Reason, RunEagerly
from ....signature.tree_spec import CONSTANTS
from .. import attention
from ..attention import OVERRIDE, Override

INTERRUPTS = (comfy.model_management.InterruptProcessingException,)
"""Exceptions that mean "stop the run"; never swallowed."""

CAPTURE = "accel.capture"
"""The key of the run's capture in `transformer_options`, and of our callbacks. Not in `capture`: slow to import."""

SKIPS = "accel_deep_cache"  # the key of DeepCache's run in `transformer_options`, and of its wrappers
WARMS_UP = "accel.warms_up"  # key in `transformer_options` of runs whose images are thrown away

CORE_COMPILE, CORE_CACHE = "torch.compile", "easycache"
"""The keys of the wrappers that core's TorchCompileModel and EasyCache put around the model; the second is also that of
EasyCache's and LazyCache's state in `transformer_options`."""

_NOT_IN_A_CALL = frozenset(
    "activations_shape block block_index block_type callbacks img_slice original_shape patches patches_replace "
    "sample_sigmas sigmas total_blocks transformer_index uuids wrappers".split()
)
"""Keys that do not affect what a whole model computes without patches, or that it writes itself."""

_FOR_PATCHES_ONLY = _NOT_IN_A_CALL | {"cond_or_uncond", "context_window"}
"""Keys that core writes for patches to read; a block that only passes them on computes the same without them."""

_PATCHES = ("patches", "patches_replace")


@functools.lru_cache(maxsize=256)
def simplifier(strings: frozenset[str]) -> Callable[[dict], dict]:
    """The function that reduces a per-call dict to what a graph of a block whose code has these strings gets. It raises
    `RunEagerly` if a patch in the dict concerns the block."""
    readable = strings - _FOR_PATCHES_ONLY - {OVERRIDE}
    asked = readable | {"patches", "patches_replace", OVERRIDE}

    def simplify(options: dict) -> dict:
        # Runs at every call of a block, so the usual case comes first.
        if asked.isdisjoint(options):
            if _FOR_PATCHES_ONLY.isdisjoint(options):
                return options
            attention.begin(options)
            return {}
        if not is_transformer_options(options):
            return options
        attention.begin(options)
        if (reason := _find_concern(options, strings)) is not None:
            raise RunEagerly(reason)
        kept = _select_readable(readable, options, _is_constant)
        if options.get(OVERRIDE) is not None:
            attention.overrides.add(getattr(options[OVERRIDE], "__name__", ""))
            attention.require_known(options[OVERRIDE])
            kept[OVERRIDE] = Override.OF_THE_CALL
        replaced = [name for name in attention.REPLACED if _is_replaced(name, options, strings)]
        if replaced:
            kept["patches_replace"] = {name: attention.replacement(name, options) for name in replaced}
            kept["block"] = attention.BLOCK
        return kept

    return simplify


def call_simplifier(strings: frozenset[str]) -> Callable[[dict], dict]:
    """The function that reduces the per-call dict to what the model's code, with these strings, reads: others keep
    counters and objects there. It raises `RunEagerly` if code in the dict would have to run in each call."""
    readable = strings - _NOT_IN_A_CALL

    def simplify(options: dict) -> dict:
        if not is_transformer_options(options):
            return options
        if options.get(OVERRIDE) is not None:
            raise RunEagerly(Reason("attention_replaced", patch="optimized_attention_override"))
        for name in (name for kind in _PATCHES for name, given in (options.get(kind) or {}).items() if given):
            raise RunEagerly(Reason("patched", patch=name))
        return _select_readable(readable, options, _is_plain)

    return simplify


def runs_between(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether patches run between the blocks in a call of the model with these arguments."""
    options = (value for value in (*args, *kwargs.values()) if type(value) is dict and is_transformer_options(value))
    return any(given for each in options for name in _PATCHES for given in (each.get(name) or {}).values())


def is_transformer_options(options: dict) -> bool:
    """Whether a dict among a block's arguments is the per-call dict or a copy of it."""
    return not _FOR_PATCHES_ONLY.isdisjoint(options) or OVERRIDE in options


def asks_wrappers(model: torch.nn.Module) -> bool:
    """Whether the model's forward runs DIFFUSION_MODEL wrappers; that of SD3 and some others does not."""
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and "DIFFUSION_MODEL" in code.co_names


def is_captured(model: Any) -> bool:
    """Whether calls of a patcher's model may be captured."""
    return CAPTURE in model.callbacks.get(CallbacksMP.ON_DETACH, {})


def _find_concern(options: dict[str, Any], strings: frozenset[str]) -> Reason | None:
    """Why a patch in `options` changes the output of a block whose code has these strings; None if none does."""
    for name, patches in (options.get("patches") or {}).items():
        if patches and name in strings:
            return Reason("patched", patch=name)
    for name in options.get("patches_replace") or {}:
        is_called = name in attention.REPLACED and options.get("block") is not None
        if not is_called and _is_replaced(name, options, strings):
            return Reason("attention_replaced", patch=name)
    return None


def _is_replaced(name: str, options: dict[str, Any], strings: frozenset[str]) -> bool:
    """Whether another node's function has the place `name` in the block being called, whose code has these strings."""
    replacements, block = (options.get("patches_replace") or {}).get(name), options.get("block")
    if not replacements or name not in strings:
        return False
    if block is None:  # UNets name it in the dict
        return True
    return block in replacements or (block[0], block[1], options.get("block_index", 0)) in replacements


def _select_readable(readable: frozenset[str], options: dict, is_allowed: Callable[[Any], bool]) -> dict:
    """The readable part of `options`. Raises `RunEagerly` for a value that a graph cannot depend on."""
    kept = {key: value for key, value in options.items() if key in readable}
    for key, value in kept.items():
        if not is_allowed(value):
            raise RunEagerly(Reason("reads_option", option=key))
    return kept


def _is_constant(value: Any) -> bool:
    return type(value) in CONSTANTS


def _is_plain(value: Any) -> bool:
    """Whether the value consists of constants only, in lists, tuples and dicts."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return _is_constant(value)

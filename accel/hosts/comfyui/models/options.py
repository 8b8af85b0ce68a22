"""ComfyUI's per-call dict, `transformer_options`: which of it concerns a block, and what a graph may see of it.

The dict changes at every call, so a compiled block that saw it would be compiled again at every
call. A block sees nothing of it, unless its code reads a plain value from it; and where a patch in
it concerns the block, the block runs as ComfyUI would run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....core.eager_calls import RunEagerly
from ....fingerprint.survey import Region
from ....signature.tree_spec import CONSTANTS

_FOR_PATCHES_ONLY = frozenset(
    "activations_shape block block_index block_type callbacks cond_or_uncond context_window img_slice original_shape "
    "patches patches_replace sample_sigmas sigmas total_blocks transformer_index uuids wrappers".split()
)
"""Keys that core writes for patches to read; a block that merely copies them on computes the same without."""

_HOOKS = frozenset(("callbacks", "patches", "patches_replace", "wrappers"))
_OVERRIDE = "optimized_attention_override"


def simplifier(region: Region) -> Callable[[dict], dict]:
    """For a block: from a dict it is called with to what its graph is given instead.

    The function raises `RunEagerly` when a patch in the dict concerns the block.
    """
    strings = region.strings
    readable = strings - _FOR_PATCHES_ONLY

    def simplify(options: dict) -> dict:
        # At every call of a block, so what is usual comes first.
        if _FOR_PATCHES_ONLY.isdisjoint(options) and _OVERRIDE not in options:
            return options
        if options.get("patches") or options.get("patches_replace") or _OVERRIDE in options:
            reason = _concern(options, strings)
            if reason is not None:
                raise RunEagerly(reason)
        if readable.isdisjoint(options):
            return {}
        kept = {}
        for key, value in options.items():
            if key in readable:
                if type(value) not in CONSTANTS:
                    raise RunEagerly(f"it reads {key} from the per-call options")
                kept[key] = value
        return kept

    return simplify


def without_hooks(options: dict) -> dict:
    """A copy of the per-call dict that calls nobody's code; any other dict as it is."""
    if not is_transformer_options(options):
        return options
    return {key: {} if key in _HOOKS else value for key, value in options.items() if key != _OVERRIDE}


def is_transformer_options(options: dict) -> bool:
    """Whether a dict among a block's arguments is ComfyUI's per-call dict or a copy of it."""
    return not _FOR_PATCHES_ONLY.isdisjoint(options) or _OVERRIDE in options


def _concern(options: dict[str, Any], strings: frozenset[str]) -> str | None:
    """Why the patches in `options` change what a block computes whose code holds these strings; else None."""
    if options.get(_OVERRIDE) is not None:
        return "an extension overrides attention for this run"
    for name, patches in options.get("patches", {}).items():
        if patches and name in strings:
            return f"a patch ({name}) concerns it"
    for name, replacements in options.get("patches_replace", {}).items():
        if replacements and name in strings and _addresses(replacements, options):
            return f"an attention replacement ({name}) concerns it"
    return None


def _addresses(replacements: dict, options: dict[str, Any]) -> bool:
    """Whether one of the replacements is for the block being called; UNets name it in the dict."""
    block = options.get("block")
    if block is None:
        return True
    return block in replacements or (block[0], block[1], options.get("block_index", 0)) in replacements

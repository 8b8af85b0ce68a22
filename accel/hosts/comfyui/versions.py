"""All differences between versions of ComfyUI, 0.3.75 and later.

Features are probed; version numbers are not compared.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from comfy_api.latest import io

OLDEST = (0, 3, 75)  # the oldest ComfyUI that this pack is tested with
_LATENT_SCALES = {
    "ChromaRadiance": 1,
    **dict.fromkeys(("SC_B", "SD_X4"), 4),
    **dict.fromkeys(("Flux2", "HunyuanImage21Refiner", "HunyuanVideo15", "Wan22"), 16),
    **dict.fromkeys(("HunyuanImage21", "LTXV"), 32),
}
"""Scales other than 8 by latent format, for cores whose formats have no `spacial_downscale_ratio`: those of 0.3.75's
empty-latent nodes and VAEs."""


def schema(**fields: Any) -> io.Schema:
    """An `io.Schema` without the fields that this core does not know: `search_aliases` came in 0.11.0."""
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})


class _ListedCombo(io.Combo.Input):
    """A combo whose type is the list of its options, as nodes of the first version declare it."""

    def get_io_type(self) -> Any:
        return list(self.options)


def make_input(kind: type[io.ComfyTypeIO], /, input_id: str, **options: Any) -> Any:
    """`kind.Input(input_id, ...)` with the options that this core knows: `advanced` came in 0.10.0. kind: such as
    `io.Int`. Cores such as 0.3.75 compare a combo's value with its options only where these are its type."""
    known = inspect.signature(kind.Input.__init__).parameters
    made = _ListedCombo if kind is io.Combo and "advanced" not in known else kind.Input
    return made(input_id, **{name: value for name, value in options.items() if name in known})


def latent_scale(latent_format: Any) -> int:
    """Pixels a side per element of a latent format."""
    given = getattr(latent_format, "spacial_downscale_ratio", None)
    return int(given or _LATENT_SCALES.get(type(latent_format).__name__, 8))


def takes_streamed_weights() -> bool:
    """Whether core can load the streamed weights of several layers at once (from about 0.22 on)."""
    needed = {
        "cast_modules_with_vbar": "comfy_modules dtype device bias_dtype non_blocking",
        "resolve_cast_module_with_vbar": "s dtype device bias_dtype compute_dtype want_requant",
    }
    for name, wanted in needed.items():
        function = getattr(sys.modules.get("comfy.ops"), name, lambda: None)
        if list(inspect.signature(function).parameters)[: len(wanted.split())] != wanted.split():
            return False
    beside = {
        "comfy.memory_management": "tensors_to_geometries",
        "comfy.model_management": "get_total_memory current_stream sync_stream",
    }
    return all(hasattr(sys.modules.get(module), name) for module, names in beside.items() for name in names.split())


def find_stored_forms(weights: Sequence[torch.Tensor | None]) -> list[Any]:
    """The forms in which core loads these streamed weights, with `shape` and `dtype`; quantised ones are their own;
    None for None. Only for cores of `takes_streamed_weights`."""
    from comfy.memory_management import tensors_to_geometries

    return tensors_to_geometries(weights)


def is_dynamic(model: Any) -> bool:
    """Whether a ModelPatcher or a VAE streams its weights (from 0.15.1 on)."""
    asked = getattr(model, "is_dynamic", None)
    return asked is not None and asked()


def is_split_over_devices(options: dict) -> bool:
    """Whether the call with this per-call dict is one of several that run at once, one per device (newer cores)."""
    return "multigpu_thread_device" in options


def put_wrappers(model: Any, key: str, wrappers: Mapping[str, Callable]) -> None:
    """Have a ModelPatcher's wrappers with our key be these, by their kind, and no others."""
    for kind in list(model.wrappers):
        model.remove_wrappers_with_key(kind, key)
    for kind, wrapper in wrappers.items():
        model.add_wrapper_with_key(kind, key, wrapper)

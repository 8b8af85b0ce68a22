"""LoRA through PEFT (diffusers' `load_lora_weights`): what its wrappers add to their layers at each call.

Strength, active, hot-swapped, merged and disabled adapters are read from the wrappers at every call, so changing them
compiles nothing. An adapter's product is added to the weight and rounded to the weight's dtype, while PEFT rounds the
adapter's output: in float16 and bfloat16 the results differ by about one rounding of the layer's output, as after
`fuse_lora`.

PEFT is not imported here: unless somebody else has, no module is one of its wrappers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ...core.reasons import Reason, RunEagerly
from ...modules.opaque_layers import OpaqueLayers
from ...modules.wrapped_layers import LowRank

_BASE = "base_layer"
_LAYERS = {"Linear": torch.nn.Linear, "Conv1d": torch.nn.Conv1d, "Conv2d": torch.nn.Conv2d, "Conv3d": torch.nn.Conv3d}
"""Class name in `peft.tuners.lora.layer` that only adds a product to its layer → the layer's required class."""

_STREAMS = ("hidden_states", "encoder_hidden_states")
_IMAGE_PROMPTS = {
    "IPAdapterAttnProcessor": ("Attention", ()),
    "IPAdapterAttnProcessor2_0": ("Attention", ()),
    "IPAdapterXFormersAttnProcessor": ("Attention", ()),
    "FluxIPAdapterAttnProcessor": ("FluxAttention", (*_STREAMS, "hidden_states")),
    "SD3IPAdapterJointAttnProcessor2_0": ("Attention", _STREAMS),
}
"""Class of an attention's processor with an IP-Adapter, whose scales are numbers on it → the attention's class, and
what its results are like (`OpaqueLayer`)."""

_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "groups")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class PeftLayers:
    """PEFT's wrappers (`wrapped_layers.Wraps`); blocks with others than LoRA run eagerly. A quantised layer that cannot
    be traced or has a LoRA is called as it is, and so is attention with an IP-Adapter, for any scales and masks."""

    def __init__(self) -> None:
        self._opaque = OpaqueLayers()

    def base(self, module: torch.nn.Module) -> torch.nn.Module | None:
        tuners = sys.modules.get("peft.tuners.tuners_utils") if _BASE in module._modules else None
        if tuners is None or not isinstance(module, tuners.BaseTunerLayer):
            processor = type(module._modules.get("processor")).__name__
            attention, like = _IMAGE_PROMPTS.get(processor, ("", ()))
            is_prompted = type(module).__name__ == attention
            return self._opaque.any(module, like=like) if is_prompted else self._opaque.linear(module)
        layer = module.get_base_layer()
        return self._opaque.linear(layer, is_wrapped=True) or layer

    def reader(self, wrapper: torch.nn.Module, base: torch.nn.Module) -> _Reader:
        return _Reader(wrapper, base)


class _Reader:
    """Reads one wrapper in the way its `forward` does."""

    __slots__ = ("_base", "_checked", "_downs", "_dropouts", "_refusal", "_ups", "_wrapper")

    def __init__(self, wrapper: torch.nn.Module, base: torch.nn.Module):
        self._wrapper, self._base = wrapper, base
        self._refusal = _find_difference(wrapper, base)
        self._checked: dict[str, tuple[torch.nn.Module, torch.nn.Module, Reason | None]] = {}
        if self._refusal is None:
            names = ("lora_A", "lora_B", "lora_dropout")
            self._downs, self._ups, self._dropouts = (wrapper._modules[name]._modules for name in names)

    def __call__(self) -> Sequence[LowRank]:
        wrapper = self._wrapper
        if self._refusal is not None:
            raise RunEagerly(self._refusal)
        if wrapper._modules[_BASE] is not self._base or _is_hooked(wrapper):
            raise RunEagerly(Reason("lora_changed"))
        merged, is_disabled = wrapper.merged_adapters, wrapper._disable_adapters
        if merged and is_disabled:
            raise RunEagerly(Reason("lora_changed"))  # PEFT takes it out of the weights in this call
        if merged or is_disabled:
            return ()
        active = wrapper._active_adapter
        names = (active,) if isinstance(active, str) else active
        return [self._read(name, down) for name in names if (down := self._downs.get(name)) is not None]

    def _read(self, name: str, down: torch.nn.Module) -> LowRank:
        wrapper, up = self._wrapper, self._ups[name]
        checked = self._checked.get(name)
        if checked is None or checked[0] is not down or checked[1] is not up:
            checked = self._checked[name] = (down, up, _check_adapter(wrapper, self._base, name, down, up))
        dropout, reason = self._dropouts[name], checked[2]
        if reason is None and (_is_hooked(down) or _is_hooked(up)):
            reason = Reason("lora_changed")
        if reason is None and type(dropout) is not torch.nn.Identity:
            if dropout.training or type(dropout) is not torch.nn.Dropout:
                reason = Reason("not_addable", why="a LoRA uses dropout")
        if reason is not None:
            raise RunEagerly(reason)
        weights = up._parameters
        return LowRank(weights["weight"], down._parameters["weight"], wrapper.scaling[name], weights["bias"])


def _find_difference(wrapper: torch.nn.Module, base: torch.nn.Module) -> Reason | None:
    """Why the wrapper does more than add a product to the weight of a plain layer; None if it does not."""
    cls, lora = type(wrapper), sys.modules.get("peft.tuners.lora.layer")
    plain = _LAYERS.get(cls.__name__)
    if plain is None or cls is not getattr(lora, cls.__name__, None):
        return Reason("not_addable", why=f"{cls.__module__}.{cls.__qualname__} is not known")
    is_plain = _computes_as(base, plain) and not getattr(wrapper, "fan_in_fan_out", False)
    is_plain = is_plain and getattr(base, "groups", 1) == 1
    if not is_plain or type(base.weight) is not torch.nn.Parameter or base.weight.dtype not in _FLOATS:
        return Reason("not_addable", why=f"a LoRA wraps a {type(base).__name__} that is not a plain one")
    return None


def _check_adapter(
    wrapper: torch.nn.Module, base: torch.nn.Module, name: str, down: torch.nn.Module, up: torch.nn.Module
) -> Reason | None:
    """Why the adapter adds something else than the product of its two matrices; None if it does not."""
    variant = getattr(wrapper, "lora_variant", {}).get(name)
    if variant is not None or getattr(wrapper, "use_dora", {}).get(name):
        other = "DoRA" if variant is None else type(variant).__name__
        return Reason("not_addable", why=f"the LoRA {name} is of another type ({other})")
    plain = _LAYERS[type(wrapper).__name__]
    is_product = _computes_as(down, plain) and _computes_as(up, plain) and down.bias is None
    is_product = is_product and down.weight.dtype is up.weight.dtype and down.weight.dtype in _FLOATS
    is_product = is_product and (up.bias is None or base.bias is not None)
    if is_product and plain is not torch.nn.Linear:
        same = all(getattr(down, part) == getattr(base, part) for part in _GEOMETRY)
        is_product = same and set(up.kernel_size) == set(up.stride) == {1} and set(up.padding) == {0} and up.groups == 1
    return None if is_product else Reason("not_addable", why=f"the LoRA {name} is not the product of two plain layers")


def _computes_as(layer: torch.nn.Module, plain: type[torch.nn.Module]) -> bool:
    """Whether the layer computes the same from its weight and bias as the plain class."""
    cls = type(layer)
    same = isinstance(layer, plain) and cls.forward is plain.forward
    return same and getattr(cls, "_conv_forward", None) is getattr(plain, "_conv_forward", None)


def _is_hooked(module: Any) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__)

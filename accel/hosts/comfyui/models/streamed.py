"""The weights of blocks that core streams ("DynamicVRAM"): taken for a call of a block's graph, and released after it.

A layer whose weights core streams has a place for them in the device's virtual memory (`_v`). A fault pins its pages
and says what they hold: where its signature is the one of core's last use, the weights are there (`_v_weight`).
Otherwise core's own functions bring them, into that place or into a buffer that a stream's next use overwrites. So all
of a block's are brought at once: one layer at a time, the first would be overwritten before the graph reads them.
They are taken in the form in which they are stored, with LoRA in it: one graph serves all, resident or not.

Where core does not stream, it may load a model in part ("lowvram"): the other layers' weights stay on the CPU, and each
use of such a layer takes them to the device. Blocks with such layers run uncompiled.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import repeat
from typing import Any

import comfy.model_management
import comfy.ops
import torch

from ....cache.graph_cache import GraphCache, shared
from ....core.errors import one_line
from ....core.events import log
from ....core.reasons import Reason, RunEagerly
from ....fingerprint.kinds import weight_slots
from ....fingerprint.plain_values import Indescribable
from ....fingerprint.survey import Region
from ....modules import stored_form
from ....modules.stored_form import Forms
from .. import preferences
from ..versions import find_stored_forms, is_dynamic, takes_streamed_weights
from .options import INTERRUPTS

LARGEST_SHARE = 0.15
"""Fraction of device memory; two non-resident blocks are buffered at a time, on top of core's own use."""

_OURS = frozenset(
    "_v _v_weight _v_bias _v_signature _v_block _v_block_faulted _pin_state _pins _prefetch seed_key "
    "weight_lowvram_function bias_lowvram_function _comfy_graph".split()
)
"""Attributes that core sets for streaming, which affect no result. A copy of `_v` would free its memory twice."""

_FUNCTIONS = ("weight_function", "bias_function")
"""Attributes for functions applied to a weight at each use. An extension's layer without a bias may lack the second."""


def clone_for_compiling(model: Any, cache: GraphCache) -> Any:
    """A clone of a ModelPatcher whose blocks can be compiled, with its weights in place where the person set so, or
    this core cannot load a whole block's at once. If core cannot load it again for that, the weights stay streamed."""
    is_followed = takes_streamed_weights()
    if is_dynamic(model) and (not is_followed or cache is shared and preferences.current().weights_in_place):
        try:
            return model.clone(disable_dynamic=True)
        except Exception as reason:  # not loaded from a file, the file is gone, or its loader cannot do it
            effect = "" if is_followed else ", and its blocks may run uncompiled"
            log.warning("The weights of this %s stay streamed%s: %s", type(model.model).__name__, effect, reason)
    return model.clone()


def plain(module: torch.nn.Module) -> torch.nn.Module:
    """The module as it would be with its weights in place (`streamed_weights.Plain`)."""
    parts = list(module.modules())
    if any(map(_has_waiting_weights, parts)):
        raise Indescribable("weights that wait in the CPU's memory, since the model is loaded in part")
    if not any(map(_is_prepared, parts)):
        return module
    if not takes_streamed_weights() and any("_v" in vars(part) for part in parts):
        raise Indescribable("weights that are streamed one by one")
    try:
        return _copy_without_streaming(module, {})
    except Exception as error:
        raise Indescribable(f"weights that are streamed in an unknown way ({one_line(error)})") from error


def _copy_without_streaming(module: torch.nn.Module, made: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """A copy that shares all except what core adds for streaming. made: the copies so far, by module."""
    if module in made:
        return made[module]
    copied = made[module] = object.__new__(type(module))
    kept = {name: value for name, value in vars(module).items() if name not in _OURS}
    if _is_prepared(module):
        # The class's own again, as for weights in place, but where they are cast there too (ModelComputeDtype).
        if not kept.setdefault("comfy_force_cast_weights", False):
            kept.pop("comfy_cast_weights", None)
        kept["comfy_patched_weights"] = True
        for name in _FUNCTIONS:
            if not kept.get(name):
                kept.pop(name, None)
    kept["_modules"] = {
        name: None if child is None else _copy_without_streaming(child, made) for name, child in module._modules.items()
    }
    kept["_parameters"] = {name: _remove_values(module, name, one) for name, one in module._parameters.items()}
    vars(copied).update(kept)
    return copied


def _remove_values(module: torch.nn.Module, name: str, weight: torch.Tensor | None) -> torch.Tensor | None:
    """A streamed weight as one without values, in the form that core loads; any other as it is."""
    if weight is None or stored_form.is_data(type(weight)):
        return weight  # with its attributes, and the module's code moves it
    if "_v" not in vars(module) or name not in ("weight", "bias"):
        return weight
    (form,) = find_stored_forms([weight])
    if isinstance(form, torch.Tensor):  # quantised: as it is
        return weight
    return torch.nn.Parameter(torch.empty(form.shape, dtype=form.dtype, device="meta"), False)


def weights_of(region: Region) -> StreamedWeights | None:
    """The source of a block's weights; None where all are in place."""
    # Each run asks of all blocks, so no loop of Python's
    if not any(map(operator.contains, region.states, repeat("_v"))):
        return None
    return StreamedWeights(region.block, region.kind.weights, region.kind.forms)


class StreamedWeights:
    """A block's weights, streamed ones and those in place (small ones, buffers). names: in its graphs' order."""

    def __init__(self, block: torch.nn.Module, names: tuple[str, ...], forms: Forms = ()):
        self._forms = forms
        self._slots = weight_slots(block, names)
        index = {name: at for at, name in enumerate(names)}
        self._parts = [
            (part, index.get(f"{path}weight"), index.get(f"{path}bias"))
            for path, part in ((f"{path}." if path else "", part) for path, part in block.named_modules())
            if "_v" in vars(part) and not {f"{path}weight", f"{path}bias"}.isdisjoint(index)
        ]
        # What these do to a weight belongs to each use of it, and core applies them where it brings one.
        self._is_patched = any(getattr(part, name, None) for part, _, _ in self._parts for name in _FUNCTIONS)
        self._taken: Any = None  # the weights, while they are taken
        self._refusal: Reason | None = None
        self._pins = Pins()
        self._brought: list[torch.nn.Module] = []
        self._stream: Any = None
        self._current: Any = None

    def take(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `WeightSource.take`. What has failed is not tried again before it is released."""
        if self._taken is None and self._refusal is None:
            self._try(inputs)
        if self._refusal is not None:
            raise RunEagerly(self._refusal)
        return self._taken

    def release(self) -> None:
        """See `WeightSource.release`. Each weight is released, whatever the release of another raises."""
        self._taken = self._refusal = None
        with ExitStack() as last_first:
            if self._stream is not None:
                last_first.callback(self._stream.wait_stream, self._current)
            last_first.callback(self._pins.release)
            for part in self._brought:
                last_first.callback(vars(part).pop, "_prefetch", None)
                for patch in _find_patches(part):
                    last_first.callback(patch.clear_prepared)
            self._stream, self._brought = None, []

    def _try(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take the weights, or note why not."""
        try:
            self._taken = self._take_all(inputs)
        except INTERRUPTS:
            raise
        except Exception as error:
            self.release()
            other = Reason("weights_not_taken", error=one_line(error))
            self._refusal = error.reason if isinstance(error, RunEagerly) else other

    def _take_all(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._is_patched:
            raise RunEagerly(Reason("weights_patched"))
        made = self._slots.take()
        missing = []
        for part, weight, bias in self._parts:
            state = vars(part)
            if state.get("_v") is None:  # a LoRA of another size: core has put its weights in place
                continue
            signature, is_current = (None, False) if "_prefetch" in state else self._pins.pin(state)
            if is_current:
                if weight is not None:
                    made[weight] = state["_v_weight"]
                if bias is not None:
                    made[bias] = state["_v_bias"]
                continue
            missing.append((part, weight, bias, signature))
        if missing:
            self._bring(missing, inputs, made)
        return stored_form.plain(made, self._forms)

    def _bring(self, missing: list[tuple], inputs: Sequence[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Have core load the weights of these parts, all at once; prefetched ones are there already."""
        device, dtypes = _find_place(inputs)
        fresh = [(part, signature) for part, _, _, signature in missing if "_prefetch" not in vars(part)]
        prefetched = {part for part, _, _, _ in missing if "_prefetch" in vars(part)}
        buffered = sum(part._v[2] for part, signature in fresh if signature is None)
        if 2 * buffered > LARGEST_SHARE * comfy.model_management.get_total_memory(device):
            raise RunEagerly(Reason("weights_too_large", megabytes=buffered >> 20))
        if fresh:
            parts = [part for part, _ in fresh]
            self._brought.extend(parts)
            self._current = comfy.model_management.current_stream(device)
            with _use_pinned_parts(fresh):
                self._stream = comfy.ops.cast_modules_with_vbar(parts, None, device, None, True)
            comfy.model_management.sync_stream(device, self._stream)
        for part, weight, bias, _ in missing:
            forms = find_stored_forms([part.weight, part.bias])
            stored, of_bias = (None if form is None else form.dtype for form in forms)
            computed = stored if stored in dtypes else next(iter(dtypes), stored)
            with _reload_on_failure(part), _keep_prefetched(part) if part in prefetched else nullcontext():
                found = comfy.ops.resolve_cast_module_with_vbar(part, stored, device, of_bias, computed, True)
            if weight is not None:
                made[weight] = found[0]
            if bias is not None:
                made[bias] = found[1]


class Pins:
    """Streamed weights' places on the device whose pages are pinned until `release`."""

    def __init__(self) -> None:
        self._pinned: list[tuple] = []

    def pin(self, state: dict[str, Any]) -> tuple[Any, bool]:
        """A layer's pages' signature, now pinned, and whether core's last use left it; None, False without memory."""
        vbar, address, size = state["_v"]
        signature = vbar.fault(address, size)
        if signature is None:
            return None, False
        self._pinned.append((vbar, address, size))
        known = state.get("_v_signature")
        return signature, known is not None and bytes(signature) == bytes(known)

    def release(self) -> None:
        """Each is released, whatever the release of another raises."""
        with ExitStack() as each:
            for vbar, address, size in self._pinned:
                each.callback(vbar.unpin, address, size)
            self._pinned = []


def _is_prepared(module: torch.nn.Module) -> bool:
    """Whether core has prepared the module for streaming, wherever its weights are now."""
    return "seed_key" in vars(module)


def _has_waiting_weights(module: torch.nn.Module) -> bool:
    """Whether each use copies the module's weights to the device, in a partly loaded model. Newer cores mark modules
    alike that they only cast there (ModelComputeDtype), and say so."""
    return "prev_comfy_cast_weights" in vars(module) and not vars(module).get("comfy_force_cast_weights")


def _find_patches(module: torch.nn.Module) -> list[Any]:
    """The patches that core applies to the module's streamed weights as it loads them."""
    patches = (vars(module).get(f"{name}_lowvram_function") for name in ("weight", "bias"))
    return [patch for patch in patches if patch is not None]


def _find_place(inputs: Sequence[torch.Tensor]) -> tuple[torch.device, list[torch.dtype]]:
    """The device that a call runs on, and the types that it computes in."""
    filled = [tensor for tensor in inputs if tensor.numel()]
    if not filled:
        raise RunEagerly(Reason("no_tensors"))
    device = next((tensor.device for tensor in filled if tensor.device.type != "cpu"), filled[0].device)
    return device, [tensor.dtype for tensor in filled if tensor.is_floating_point() and tensor.element_size() > 1]


class _Faulted:
    """The memory of a layer whose pages are pinned already, so that core does not pin them once more."""

    def __init__(self, vbar: Any, signature: Any):
        self._vbar, self._signature = vbar, signature

    def fault(self, address: int, size: int) -> Any:
        return self._signature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vbar, name)


@contextmanager
def _use_pinned_parts(parts: Sequence[tuple[torch.nn.Module, Any]]) -> Iterator[None]:
    """Let core use parts that are pinned already; if it failed midway, what it had pinned would be unknown."""
    places = [(part, part._v) for part, _ in parts]
    try:
        for part, signature in parts:
            vbar, address, size = part._v
            part._v = _Faulted(vbar, signature), address, size
        yield
    finally:
        for part, place in places:
            part._v = place


@contextmanager
def _reload_on_failure(part: torch.nn.Module) -> Iterator[None]:
    """Make core load the weights again if adding LoRA fails: it marks them as patched before they are."""
    try:
        yield
    except BaseException:
        part._v_signature = None
        raise


@contextmanager
def _keep_prefetched(part: torch.nn.Module) -> Iterator[None]:
    """Keep prefetched weights as loaded while LoRA is added: the block may still run eagerly on them. Those with a
    place of their own keep the result, unless adding LoRA failed midway."""
    prefetch = part._prefetch
    if prefetch["resident"] or not _find_patches(part):
        yield
        return
    came = prefetch["xfer_dest"]
    copy = came.clone()
    if prefetch["signature"] is None:
        prefetch["xfer_dest"] = copy
    try:
        yield
    except BaseException:
        if prefetch["signature"] is not None:
            came.copy_(copy)
        raise
    finally:
        prefetch["xfer_dest"] = came

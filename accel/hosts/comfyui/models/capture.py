"""Capturing whole model calls inside ComfyUI: where in a call it happens, and what rules it out.

The capture is the innermost wrapper around a model's forward, so other packs' wrappers run in every call; inside are
only the model's own code and its blocks' layers. Memory is released when ComfyUI asks for it (`capture_memory`), when
it unloads the model, when the model is freed, and when a call finds that its weights were moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ....cache.entry import Lease
from ....cache.graph_cache import GraphCache, shared
from ....core.compile_settings import CompileSettings
from ....core.reasons import Reason
from ....cuda_graphs.cuda import CudaCapturer
from ....cuda_graphs.model_capture import ModelCapture
from ....cuda_graphs.model_guard import CaptureHost
from ....cuda_graphs.pool import CapturePool
from ....dispatch.block_runner import BlockRunner
from ....dispatch.whole_calls import WholeCalls
from ....fingerprint.code_hash import CodeHash, CodeReader
from ....fingerprint.plain_values import Indescribable
from ....modules.snapshot import WeightSnapshot
from ....modules.substitution import Layer, Order, Substitution
from .. import attention, preferences
from ..recording import records_memory
from ..tracing import NO_RESULT_DEPENDS_ON
from ..versions import is_dynamic, takes_streamed_weights
from .capture_memory import let_core_take_memory, room_for_captures
from .options import CAPTURE as KEY
from .options import INTERRUPTS, asks_wrappers, call_simplifier
from .streamed import Pins

_LOADED = ("current_weight_patches_uuid", "model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram")
"""What core changes on a BaseModel when it loads, unloads or patches weights."""


def attach(cache: GraphCache, model: Any) -> None:
    """Allow captures in the cache, and drop those of the patcher's model when it is unloaded."""
    if cache.captures is None:
        cache.captures = CapturePool(CudaCapturer())
    let_core_take_memory(cache)

    def drop(patcher: Any, unpatch_all: bool = True, *args: Any) -> None:
        if unpatch_all:  # False if another clone replaces it with the same weights in place
            model = patcher.model.diffusion_model
            cache.captures.drop(cache, lambda call: call.key.model() is model)

    model.callbacks.get(CallbacksMP.ON_DETACH, {}).pop(KEY, None)
    model.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, drop)


def begin(
    base: torch.nn.Module,
    settings: CompileSettings,
    cache: GraphCache,
    lease: Lease,
    layers: Mapping[torch.nn.Module, Any],
) -> CapturedModel:
    """Captures for one run of a BaseModel. layers: those of its blocks and of its network."""
    if cache is shared:
        preferences.make_room_for_captures(room_for_captures(comfy.model_management.get_torch_device()))
    cache.captures.drop(cache, lambda call: call.key.model() is None)
    given_way = cache.captures.given_way
    model = base.diffusion_model
    blocks = {module: layer for module, layer in layers.items() if isinstance(layer, BlockRunner)}
    kinds = tuple(runner.kind.digest for runner in blocks.values())
    held = _HeldWeights(model)
    code, still_stands, reason = _read_code(model)

    def why_not() -> Reason | None:
        if reason is not None:
            return reason
        if not still_stands():
            return Reason("code_replaced", where=type(model).__name__)
        return _find_obstacle(base) or (Reason("memory_needed") if cache.captures.given_way > given_way else None)

    host = CaptureHost(
        facts=(code and code.digest, kinds, settings),
        simplify=call_simplifier(frozenset() if code is None else code.strings),
        token=lambda: (*(getattr(base, name, None) for name in _LOADED), held.current),
        why_not=why_not,
        unchanged=layers[model].is_set_as_at_first,
        of_module=_find_obstacle_in,
        interrupts=INTERRUPTS,
        snapshot=lambda model: _snapshot(model, frozenset() if code is None else code.unread),
        hold=held.hold,
        release=held.release,
    )
    calls = WholeCalls(type(model).__name__, blocks, cache, settings)
    return CapturedModel(ModelCapture(model, cache, cache.captures, lease, calls, host), model, layers[model])


class CapturedModel:
    """A model whose calls one run captures or replays. layer: its own; the capture places its blocks'."""

    def __init__(self, capture: ModelCapture, model: torch.nn.Module, layer: Layer):
        self.capture = capture
        self._observed = Substitution({model: layer}, Order.COMPILED)
        self._captured = None
        if not asks_wrappers(model):
            self._captured = Substitution({model: torch.compiler.disable(capture.call)}, Order.CAPTURED)

    @contextmanager
    def replay_or_capture(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Replay or capture one call of the model, made with the transformer_options that this yields."""
        options = {**options, KEY: self.capture}
        with self._observed.put_in_place():
            if self._captured is not None:
                with self._captured.put_in_place():
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
    if capture is None:
        return executor(*args, **kwargs)
    is_innermost = executor.idx + 1 == len(executor.wrappers)
    return (capture.call if is_innermost else capture.call_uncaptured)(executor, *args, **kwargs)


def _read_code(model: torch.nn.Module) -> tuple[CodeHash | None, Callable[[], bool], Reason | None]:
    """The code of the model, whether it is still that, and why it cannot be captured."""
    attention_called = attention.Asked(NO_RESULT_DEPENDS_ON)
    reader = CodeReader(attention_called)
    try:
        code = reader.read(frozenset(map(type, model.modules())))
    except Indescribable as why:
        return None, bool, Reason("indescribable", what=str(why))
    opaque = attention_called.opaque
    reason = None if opaque is None else Reason("attention_runs", function=".".join(opaque))
    return code, reader.notes.snapshot().is_current, reason


def _find_obstacle(base: torch.nn.Module) -> Reason | None:
    """Core's conditions of a call: why none of the model can be captured now; None if one can."""
    patcher = base.current_patcher
    if getattr(base, "model_lowvram", False) or is_dynamic(patcher) and not takes_streamed_weights():
        return Reason("weights_streamed")
    if patcher is None:
        return None
    if records_memory():
        return Reason("memory_planned", by="Comfy Compiler")
    if patcher.current_hooks is not None:
        return Reason("model_changes")
    if patcher.injections:
        return Reason("code_replaced", where=type(base.diffusion_model).__name__)
    return None


def _find_obstacle_in(module: torch.nn.Module) -> Reason | None:
    """Core's own conditions of a module of the model."""
    if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
        return Reason("weights_patched")
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return Reason("compiled_already")
    return None


class _HeldWeights(Pins):
    """The weights that core streams to a model, kept on the device for one call that is captured or replayed.

    Their addresses are fixed. Core has to load values that are not those of the layer's last use, as after a change of
    LoRA. Making room for one while others are pinned would evict them all, so all are first checked to fit, unpinned.
    current: those with their values at the last `hold`; None where not all could be there at once.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._parts = [vars(part) for part in model.modules() if "_v" in vars(part)]
        self._loaded: list[int] = []
        self.current: frozenset[int] | None = frozenset()

    def hold(self) -> frozenset[int] | None:
        """See `CaptureHost.hold`."""
        if not self._parts:
            return self.current
        self.release()
        # Without a place: a LoRA of another size, for which core has put the weights elsewhere.
        placed = {number: state for number, state in enumerate(self._parts) if state.get("_v") is not None}
        places, self.current = [state["_v"] for state in placed.values()], None
        if self._loaded != _sizes_on_device(places) and not all(map(_make_room, places)):
            return None
        current = []
        for number, state in placed.items():
            signature, is_current = self.pin(state)
            if signature is None:
                self.release()
                return None
            if is_current:
                current.append(number)
        self.current, self._loaded = frozenset(current), _sizes_on_device(places)
        return self.current


def _sizes_on_device(places: Sequence[tuple]) -> list[int]:
    """Bytes of each memory on the device; where none has changed, all is still there."""
    return [vbar.loaded_size() for vbar in {id(vbar): vbar for vbar, _, _ in places}.values()]


def _make_room(place: tuple) -> bool:
    """Make room for weights, as core does; True if there was enough."""
    vbar, address, size = place
    if vbar.fault(address, size) is None:
        return False
    vbar.unpin(address, size)
    return True


def _snapshot(model: torch.nn.Module, unread: frozenset[str]) -> WeightSnapshot:
    streamed = {part: ("weight", "bias") for part in model.modules() if "_v" in vars(part)}
    elsewhere = (lambda part: streamed.get(part, ())) if streamed else None
    return WeightSnapshot(model, elsewhere, unread)

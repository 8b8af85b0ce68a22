"""VAEs that are never compiled, or whose blocks run compiled: a view of a VAE, for VAE Skip Compile."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import comfy.model_management
import torch

from ....cache.entry import Use
from ....cache.graph_cache import GraphCache, shared
from ....core.compile_settings import CompileSettings
from ....core.events import log
from ....core.fallbacks import fallbacks
from ....core.reasons import Reason
from ....modules.first_call import at_first_call, is_compiled
from ....modules.substitution import Layer
from ....sizing.vae import AUTO, SKIP, Repeats, VaePolicy, gives_back, has_room, one_tile
from ....store.graph_store import attach
from ..home import running_home
from ..progress import CompileProgress
from ..versions import leading_node
from ..views import as_view
from .accelerate import block_layers, count_kinds
from .streamed import clone_for_compiling, stays_in_place

_CALLS = ("decode", "encode")
"""Prefixes of the methods that run a VAE (such as decode_tiled_1d)."""


def vae_view(
    vae: Any,
    policy: VaePolicy,
    settings: CompileSettings | None = None,
    cache: GraphCache = shared,
    made_by: str | None = None,
) -> Any:
    """A VAE with the same weights that follows the policy; the given VAE is unchanged.

    A view of a view replaces it: the last node counts.
    made_by: the class of the node that shows compile progress.
    """
    view = copy.copy(vae)
    if policy.compiled != SKIP:
        attach(cache, running_home)
        if stays_in_place(view, cache):
            # The view uses its patcher's model, as core's own node for another device does.
            view.patcher = clone_for_compiling(view.patcher, cache)
            view.first_stage_model = view.patcher.model
    return as_view(view, _CALLS, _Around(policy, settings or CompileSettings(), cache, made_by))


class _Around:
    """The calls of one view: its policy, and the state from one call to the next."""

    def __init__(self, policy: VaePolicy, settings: CompileSettings, cache: GraphCache, made_by: str | None):
        self._made_with = policy, settings, cache, made_by
        self._policy = policy
        self._settings = settings
        self._cache = cache
        self._progress = CompileProgress()
        self._repeats = Repeats(policy.after)
        self._last_shape: tuple[int, ...] | None = None

    def __deepcopy__(self, memo: dict) -> _Around:
        """The state for a deep copy of a view; it shares the cache."""
        return _Around(*self._made_with)

    def call(self, vae: Any, name: str, args: tuple, kwargs: dict) -> AbstractContextManager:
        """The context for one call of the VAE's method `name` with these arguments."""
        if not isinstance(getattr(vae, "first_stage_model", None), torch.nn.Module):
            return nullcontext()
        shape = _shape(vae, name, args, kwargs)
        if self._policy.free_memory and shape is not None:
            self._give_memory_back(vae, name, shape)
        if not self._policy.compiles(name):
            return _nothing_compiled() if self._policy.compiled in (SKIP, AUTO) else nullcontext()
        if self._policy.compiled == AUTO and (shape is None or not self._repeats.count(shape)):
            return _nothing_compiled()
        return self._compiled(vae, name, shape)

    @contextmanager
    def _compiled(self, vae: Any, name: str, shape: tuple[int, ...] | None) -> Iterator[None]:
        model, used = vae.first_stage_model, []
        if is_compiled(model):
            fallbacks.note(type(model).__name__, Reason("compiled_already"))
            yield
            return
        is_auto = self._policy.compiled == AUTO
        with ExitStack() as stack:
            lease = stack.enter_context(self._cache.lease())
            if shape is not None:
                lease.uses = (Use(type(model).__name__, shape[2:], shape[0]),)

            def make_layers(part: torch.nn.Module) -> Mapping[torch.nn.Module, Layer]:
                used.append(part)
                # Only now, with the weights loaded, is the free memory known.
                if is_auto and not self._has_room(vae, name, shape):
                    return {}
                on_shortage = functools.partial(self._repeats.was_short, shape) if is_auto else lambda: None
                layers = block_layers(part, self._settings, self._cache, lease, on_shortage)
                node_id = leading_node(self._made_with[-1], "VAE")
                stack.enter_context(self._progress.during_call(count_kinds(layers), node_id))
                if is_auto:
                    layers[part] = self._remembering_shortage(layers[part], shape)
                return layers

            stack.enter_context(at_first_call(model, make_layers))
            yield
        if not used:
            fallbacks.note(type(model).__name__, Reason("no_block_runs", part=name))

    def _has_room(self, vae: Any, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is memory to run compiled, for one image: core splits batches that do not fit."""
        needed = _memory_used(vae, name, (1, *shape[1:]))
        free = comfy.model_management.get_free_memory(vae.device)
        if needed is None or has_room(free, needed):
            return True
        model = type(vae.first_stage_model).__name__
        log.info("%s runs uncompiled at %s: %.0f MB of memory are free", model, shape, free / 2**20)
        return False

    def _remembering_shortage(self, layer: Layer, shape: tuple[int, ...]) -> Layer:
        def call(inner: Callable, *args: Any, **kwargs: Any) -> Any:
            try:
                return layer(inner, *args, **kwargs)
            except torch.OutOfMemoryError:
                self._repeats.was_short(shape)
                raise

        return call

    def _give_memory_back(self, vae: Any, name: str, shape: tuple[int, ...]) -> None:
        before, self._last_shape = self._last_shape, shape
        device = getattr(vae, "device", None)
        if not isinstance(device, torch.device) or device.type != "cuda":
            return
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        if gives_back(before, shape, reserved, allocated, _memory_used(vae, name, shape)):
            comfy.model_management.soft_empty_cache()


def _nothing_compiled() -> AbstractContextManager:
    """A context in which functions wrapped in torch.compile run eagerly (torch 2.6 and later)."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance("force_eager")


def _shape(vae: Any, name: str, args: tuple, kwargs: dict) -> tuple[int, ...] | None:
    """The shape [B, C, (T,) H, W] of a call's input, or of one tile, as the VAE's memory estimates expect it."""
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    if given is None or given.ndim < 3:
        return None
    shape = tuple(given.shape)
    if name in ("encode", "encode_tiled"):  # these take images with channels last; core's other methods do not
        shape = _with_channels_second(shape, vae)
    return one_tile(shape, kwargs.get("tile_x"), kwargs.get("tile_y"), kwargs.get("tile_t"))


def _with_channels_second(shape: Sequence[int], vae: Any) -> tuple[int, ...]:
    """The shape of [B, H, W, C] or [B, T, H, W, C] inside the VAE; a video VAE treats a batch of images as frames."""
    batch, *sizes, channels = shape
    if getattr(vae, "latent_dim", 2) != 3 or len(sizes) == 3:
        return (batch, channels, *sizes)
    return (batch, channels, 1, *sizes) if getattr(vae, "not_video", False) else (1, channels, batch, *sizes)


def _memory_used(vae: Any, name: str, shape: tuple[int, ...]) -> float | None:
    """Core's estimate for a call, in bytes; None if the VAE has none for this shape."""
    estimate = getattr(vae, "memory_used_encode" if name.startswith("encode") else "memory_used_decode", None)
    try:
        return float(estimate(shape, vae.vae_dtype))
    except Exception as error:  # from the VAE's own function; only a hint is lost
        log.debug("no estimate for %s at %s: %s", name, shape, error)
        return None

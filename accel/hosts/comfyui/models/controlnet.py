"""ControlNets with compiled blocks: a copy of a control object, for Accelerate ControlNet."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ....cache.entry import Use
from ....cache.graph_cache import GraphCache, shared
from ....core.compile_settings import CompileSettings
from ....core.events import log
from ....core.fallbacks import fallbacks
from ....core.reasons import Reason
from ....fingerprint.code_facts import facts_of
from ....modules.blocks import is_compiled
from ....store.graph_store import attach
from ..preferences import find_running_home
from ..versions import is_dynamic, takes_streamed_weights
from .accelerate import NetworkRun

_NETWORKS = ("control_model", "t2i_model")
"""Attributes for a control object's network; a ControlLora has one only from `pre_run` to `cleanup`."""

_CALLS = ("copy", "pre_run", "get_control", "cleanup")


def accelerate_control(
    control: Any, settings: CompileSettings, cache: GraphCache = shared, node_id: str | None = None
) -> Any:
    """A copy of a control object, whose network's blocks run compiled; the same holds for copies of the copy.

    The given object, its class and its network are unchanged. The copy has exactly the same class, because extensions
    check for it. An object that cannot be copied is returned as it is.

    node_id: the node in the page that shows compile progress.
    """
    attach(cache, find_running_home)
    name = type(control).__name__
    if not all(callable(getattr(control, call, None)) for call in _CALLS):
        log.warning("%s runs uncompiled: it is not a control object like core's", name)
        return control
    ours = getattr(vars(control).get("copy"), "__self__", None)
    copied = ours.own("copy") if isinstance(ours, _Calls) else control.copy()
    if copied is control:
        log.warning("%s runs uncompiled: its copy is the object itself", name)
        return control
    if is_dynamic(getattr(copied, "control_model_wrapped", None)) and not takes_streamed_weights():
        log.warning("This %s's weights are streamed (dynamic VRAM), so its blocks may run uncompiled", name)
    _Calls(copied, settings, cache, node_id)
    return copied


class _Calls:
    """Our versions of a control object's methods, set as attributes of it alone. A run ends at `cleanup`, which core
    omits after a failed sampler; otherwise at the next `pre_run`, or when the object is freed."""

    def __init__(self, control: Any, settings: CompileSettings, cache: GraphCache, node_id: str | None):
        self._control, self._settings, self._cache, self._node_id = control, settings, cache, node_id
        self._run: NetworkRun | None = None
        self._before = {name: vars(control).get(name) for name in _CALLS}  # extensions do the same
        vars(control).update({name: getattr(self, name) for name in _CALLS}, __reduce_ex__=self._reduce)

    def own(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the control's own method."""
        control, before = self._control, self._before[name]
        return before(*args, **kwargs) if before else getattr(type(control), name)(control, *args, **kwargs)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        copied = self.own("copy", *args, **kwargs)
        if copied is not self._control:
            _Calls(copied, self._settings, self._cache, self._node_id)
        return copied

    def pre_run(self, *args: Any, **kwargs: Any) -> Any:
        self._end(is_told=False)  # it was interrupted, and is no part of the image that begins
        return self.own("pre_run", *args, **kwargs)

    def cleanup(self, *args: Any, **kwargs: Any) -> Any:
        self._end()
        return self.own("cleanup", *args, **kwargs)

    def get_control(self, *args: Any, **kwargs: Any) -> Any:
        """Call the control's own, with its network's calls compiled."""
        attributes = vars(self._control)
        name = next((name for name in _NETWORKS if attributes.get(name) is not None), None)
        network = attributes[name] if name else None
        if self._run is None or self._run.network is not network:
            is_network = isinstance(network, torch.nn.Module) and type(type(network)) is type
            if not is_network or is_compiled(network):
                reason = Reason("compiled_already") if is_network else Reason("no_network")
                fallbacks.note(type(self._control).__name__, reason)
                return self.own("get_control", *args, **kwargs)
            self._end()
            lease = self._cache.begin_lease()
            self._run = NetworkRun(network, self._settings, self._cache, lease, self._node_id, _sets_its_settings)
        view = attributes[name] = _view(self._run)
        try:
            return self.own("get_control", *args, **kwargs)
        finally:
            if attributes.get(name) is view:
                attributes[name] = network

    def _end(self, is_told: bool = True) -> None:
        run, self._run = self._run, None
        if run is not None:
            if is_told:
                run.end()
            self._cache.end_lease(run.lease)

    def _reduce(self, protocol: int) -> Any:
        """Pickling for the `copy` module: the control without our methods, which belong to one object."""
        cls: Any = type(self._control)
        make, arguments, state, *rest = cls.__reduce_ex__(self._control, protocol)
        ours = (*_CALLS, "__reduce_ex__")
        plain = {name: value for name, value in state.items() if name not in ours}
        plain.update({name: value for name, value in self._before.items() if value is not None})
        return (make, arguments, plain, *rest)


def _sets_its_settings(block: torch.nn.Module) -> bool:
    """Whether its forward changes settings of its layers, so that each size gives it another kind. A T2I-Adapter's
    pooling sets its padding by whether the size is odd."""
    codes = (getattr(type(module).forward, "__code__", None) for module in block.modules())
    assigned = frozenset().union(*(facts_of(code).assigned for code in codes if code is not None))
    return any(name in assigned for module in block.modules() for name in vars(module))


def _view(run: NetworkRun) -> torch.nn.Module:
    """A module that shares the network's `__dict__` and calls the network in the run. In its place it affects one
    control object: others may share the network, and a T2I-Adapter's is moved and cast right before its call."""
    view = object.__new__(_view_class(type(run.network)))  # type: ignore[arg-type]  # a class is hashable
    # Module.__setattr__ would register the network as a submodule.
    object.__setattr__(view, "__dict__", run.network.__dict__)
    object.__setattr__(view, "accel_run", run)
    return view


@functools.lru_cache(maxsize=64)
def _view_class(cls: type) -> type:
    def call(view: Any, *args: Any, **kwargs: Any) -> Any:
        run, latent = view.accel_run, args[0] if args else kwargs.get("x")
        if isinstance(latent, torch.Tensor) and latent.ndim > 2:  # [B, C, ...]
            run.lease.uses = (Use(type(run.network).__name__, tuple(latent.shape[2:]), latent.shape[0]),)
        return run.call(run.network, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__slots__": ("accel_run",), "__call__": call})

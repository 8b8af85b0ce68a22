"""ControlNets that run only where something reads what they give, as a skipped step of a UNet may not.

Core runs them before it calls the model, which alone knows whether it can be skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comfy.controlnet
import comfy.hooks
from comfy.patcher_extension import WrappersMP

from .controlnet import own_get_control
from .options import CORE_CACHE, CORE_COMPILE

_TAKES_CONTROL = ("model_function_wrapper", "multigpu_clones")
"""Keys of model_options: other code than core's usual reads the residuals, or chooses the control object."""

_BETWEEN = (WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
"""Kinds of wrappers that are given control objects or their residuals, which may need to be what core makes."""

_PASS_ON = ("accel", CORE_COMPILE, CORE_CACHE)
"""How the keys of wrappers begin that only pass them on: ours and core's."""


class LateControl(Mapping):
    """The residuals that a control object gives for one call of the model, computed when they are first read."""

    def __init__(self, compute: Callable[[], dict[str, list] | None]):
        self._compute = compute

    @functools.cached_property
    def computed(self) -> dict[str, list] | None:
        return self._compute()

    def __getitem__(self, name: str) -> list:
        return (self.computed or {})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.computed or {})

    def __len__(self) -> int:
        return len(self.computed or {})


class _Waiting:
    """A control object, and those chained to it, whose `get_control` gives a LateControl."""

    def __init__(self, control: Any):
        self._control = control

    def get_control(self, x: Any, t: Any, cond: dict[str, Any], *args: Any) -> LateControl:
        # A copy: core adds the residuals to `cond`, which would then hold itself.
        return LateControl(functools.partial(self._control.get_control, x, t, dict(cond), *args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


def can_wait(control: Any, model_options: dict[str, Any]) -> bool:
    """Whether nothing but the residuals tells if a control object ran, or those chained to it: all are core's."""
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    keys = [str(key) for kind in _BETWEEN for key, given in wrappers.get(kind, {}).items() if given]
    if any(model_options.get(name) for name in _TAKES_CONTROL) or not all(key.startswith(_PASS_ON) for key in keys):
        return False
    while control is not None:
        if type(control).__module__ != comfy.controlnet.__name__ or own_get_control(control) is not None:
            return False
        control = control.previous_controlnet
    return True


def _adds_wrappers(cond: dict[str, Any]) -> bool:
    """Whether hooks of the prompt may: core adds theirs after this, for its calls alone. Those of LoRAs do not."""
    return any(type(hook) is not comfy.hooks.WeightHook for hook in getattr(cond.get("hooks"), "hooks", ()))


def postponed(conds: Sequence[list | None], model_options: dict[str, Any]) -> list[list | None]:
    """The conds of one batch of predictions with LateControls in place of what ControlNets give."""
    waiting: dict[int, _Waiting] = {}  # one for each, as core batches only those of the same object

    def with_late_control(cond: dict[str, Any]) -> dict[str, Any]:
        control = cond.get("control")
        if control is None or _adds_wrappers(cond) or not can_wait(control, model_options):
            return cond
        return {**cond, "control": waiting.setdefault(id(control), _Waiting(control))}

    return [group and [with_late_control(cond) for cond in group] for group in conds]

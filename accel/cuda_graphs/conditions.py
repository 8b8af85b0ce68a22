"""When a call of a model is captured or replayed: the conditions, in the order in which they are asked.

At each call: `CaptureHost.why_not`, `check_device` and `check_weights`; at the first of its kind `check_arguments`
before them. At the first call of a run, and where the model seems to have changed: `check_model`. After the second call
of its kind: `check_warm_call`. In a repetition of that call, at each operator: `DryRun`. The third call is captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..compile.compiled_graph import CompileFailed
from ..core.reasons import Reason, check_mode
from ..modules.snapshot import WeightSnapshot
from ..modules.substitution import StandIn, has_foreign_forward
from ..modules.wrapped_forward import is_replaced
from ..signature.tensors import PLAIN_TENSORS, storage_of, tensors_in


class CaptureFailed(CompileFailed):
    """A call cannot be captured, or its captured graph is not right; the message says why."""


_SYNCHRONIZES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def check_arguments(tensors: Sequence[torch.Tensor]) -> Reason | None:
    """Why a call with these tensors cannot be captured; None where nothing says so, as below."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return Reason("no_tensors")
    odd = next((type(tensor).__name__ for tensor in filled if type(tensor) not in PLAIN_TENSORS), None)
    if odd is not None:
        return Reason("unsupported_argument", what=odd)
    devices = {tensor.device for tensor in filled}
    if len(devices) > 1:
        return _describe_devices(devices)
    return check_mode((), tensors)


def check_device(device: torch.device, stream: torch.cuda.Stream | None) -> Reason | None:
    """Why nothing can be captured there now. stream: of earlier captures, as graphs that share memory take turns."""
    if device.type != "cuda" or torch.version.hip is not None:  # torch for ROCm calls its devices cuda
        return Reason("not_cuda", device=f"{device} (ROCm)" if device.type == "cuda" else str(device))
    if torch.cuda.get_allocator_backend() != "native":
        return Reason("cuda_malloc_async")
    is_elsewhere = stream is not None and torch.cuda.current_stream(device) != stream
    return Reason("captured_around") if torch.cuda.is_current_stream_capturing() or is_elsewhere else None


def check_model(model: torch.nn.Module, of_module: Callable[[torch.nn.Module], Reason | None]) -> Reason | None:
    """Why calls of the model cannot be captured; of_module: the host's own reason for each module."""
    everywhere = torch.nn.modules.module
    if model.training:
        return Reason("training")
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return Reason("hooks_everywhere")
    for path, module in model.named_modules():
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        own = [name for name, value in vars(module).items() if callable(value) and not isinstance(value, StandIn)]
        hides_a_method = any(callable(getattr(type(module), name, None)) for name in own)
        if has_hooks or has_foreign_forward(module) or is_replaced(type(module)) or hides_a_method:
            return Reason("code_replaced", where=f"{type(module).__name__} {path}".rstrip())
        reason = of_module(module)
        if reason is not None:
            return reason
    return None


def check_weights(weights: WeightSnapshot, device: torch.device) -> Reason | None:
    """Why a call whose arguments are on the device cannot be captured with these weights; None where it can."""
    if weights.devices and device not in weights.devices:
        return _describe_devices({device, *weights.devices})
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in weights.tensors()):
        return Reason("gradients")
    return None


def check_warm_call(device_waited: Callable[[], bool] | None, has_room: bool, changes: bool) -> Reason | None:
    """Why calls like the one that was just made eagerly are better not captured.

    device_waited: whether the device waited for Python, which a replay would spare; None where that is known. has_room:
    whether the call could be made aside; streamed weights that are held while memory is short lose their place on the
    device for the whole run. changes: whether the call has put other objects on the model.
    """
    if device_waited is not None and not device_waited():
        return Reason("device_busy")
    if not has_room:
        return Reason("weights_streamed")
    return Reason("model_changes") if changes else None


class CaptureStopped(BaseException):
    """Ends a dry run at the first obstacle, past whoever catches exceptions: what follows might leave a trace."""


class DryRun(TorchDispatchMode):
    """A mode to make the call in; afterwards `reason` says why it cannot be captured, None where it can.

    It raises `CaptureStopped` before an operator that a graph would not repeat, or not on the right tensors. Python's
    random numbers are left as they were. What happens between operators, in Python, is not seen (`check_model`).

    own: the weights and the inputs. The call may read these and what it makes, and write to what it makes only.
    device: where all of it must be, but for what is made on the CPU of numbers alone (`host_constants`).
    """

    def __init__(self, own: Iterable[torch.Tensor], device: torch.device):
        super().__init__()
        self._own = {storage_of(tensor) for tensor in own}
        self._made: set[int] = set()
        self._device = device
        self._random = random.getstate()
        self.reason: Reason | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if random.getstate() != self._random:
            random.setstate(self._random)
            self.reason = self.reason or Reason("random", operator="Python")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.reason = self._check_operator(func, args, kwargs)
        if self.reason is not None:
            raise CaptureStopped
        out = func(*args, **kwargs)
        made = tensors_in(out)
        self.reason = self._check_results(func, args, kwargs, made)
        if self.reason is not None:
            raise CaptureStopped
        self._made.update({storage_of(tensor) for tensor in made} - self._own)
        return out

    def _check_operator(self, func: Any, args: tuple, kwargs: dict) -> Reason | None:
        """Why a graph would not repeat the operator, or not on the right tensors."""
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_inert(func, args, kwargs):
            return Reason("random", operator=str(func))
        if any(tag in func.tags for tag in _SYNCHRONIZES):
            return Reason("host_values", operator=str(func))
        if "lift_fresh" in func.name():
            # Made on the device it has been copied there already, unseen by any mode. A number that is assigned to an
            # index is one too where the device is the CPU.
            is_copied = args[0].device == self._device and (args[0].ndim or self._device.type != "cpu")
            return Reason("host_values", operator=str(func)) if is_copied else None
        read = {storage_of(tensor) for tensor in tensors_in((args, kwargs)) if tensor.numel()}
        written = {
            storage_of(tensor)
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
        }
        if read - self._own - self._made or written & self._own:
            return Reason("lasting_tensors", operator=str(func))
        return None

    def _check_results(self, func: Any, args: tuple, kwargs: dict, made: Sequence[torch.Tensor]) -> Reason | None:
        """Why a graph may not contain the operator, which made these tensors."""
        # Beside a result, attention hands out the state of a random draw that it did not make, outside captures on the
        # CPU (`_scaled_dot_product_efficient_attention`, not in inference mode). Whoever takes that is refused.
        if not made or any(tensor.device == self._device for tensor in made):
            return None
        is_taken = any(tensor.device == self._device and tensor.numel() for tensor in tensors_in((args, kwargs)))
        return Reason("host_values", operator=str(func)) if is_taken or made[0].device.type != "cpu" else None


def _is_inert(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator that may draw random numbers draws none: not training, or a dropout of 0."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
    arguments.update(zip(names, args, strict=False))
    arguments.update(kwargs)
    if arguments.get("train") is False or arguments.get("training") is False:
        return True
    return any(name in arguments and not arguments[name] for name in ("dropout_p", "dropout", "p"))


def _describe_devices(devices: Iterable[torch.device]) -> Reason:
    return Reason("tensors_on_devices", devices=", ".join(sorted(map(str, devices))))

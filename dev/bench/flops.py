"""Counts the floating-point operations that a model really executes when parts of its calls are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_LAYERS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)


@contextmanager
def counted(device: torch.device) -> Iterator[FlopCounterMode]:
    """Torch's counter of floating-point operations on the device."""
    # It does not know the CPU's fused attention.
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
    with FlopCounterMode(display=False) as counter, attention:
        yield counter


class Flops:
    """Operations of one model, by hooks on its layers with weights, which a skipped block does not call.

    Torch's counter says once, over a whole call, what each layer takes for one row of the batch. What a module does
    beside its layers, such as attention, is attributed to the first of them.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._rows: Counter[torch.nn.Module] = Counter()
        self._each: dict[torch.nn.Module, float] = {}
        for module in model.modules():
            if isinstance(module, _LAYERS):
                module.register_forward_hook(self._on_call)

    def _on_call(self, layer: torch.nn.Module, _, out: torch.Tensor) -> None:
        self._rows[layer] += out.shape[0]

    def learn(self, call: Callable[[], object]) -> None:
        """Learn from `call`, which calls the model in full, what later calls at the same size take."""
        self._rows.clear()
        with counted(next(self._model.parameters()).device) as counter:
            call()
        root = type(self._model).__name__
        modules = {f"{root}.{name}" if name else root: module for name, module in self._model.named_modules()}
        own = {name: sum(taken.values()) for name, taken in counter.get_flop_counts().items() if name in modules}
        for name, taken in sorted(own.items(), reverse=True):  # inner modules first
            around = name
            while "." in around:
                around = around.rpartition(".")[0]
                if around in own:  # lists of modules are not called
                    own[around] -= taken
                    break
        totals: Counter[torch.nn.Module] = Counter()
        for name, taken in own.items():
            layer = next((part for part in modules[name].modules() if part in self._rows), None)
            if taken and layer is not None:
                totals[layer] += taken
        self._each = {layer: total / self._rows[layer] for layer, total in totals.items()}
        self._rows.clear()

    @contextmanager
    def paused(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Within the context nothing is counted, where that `is_wanted` at its end."""
        before = self._rows.copy()
        yield
        if is_wanted():
            self._rows = before

    def take(self) -> float:
        """Operations of all calls since the last `take`, by the latest `learn`."""
        total = sum(rows * self._each.get(layer, 0.0) for layer, rows in self._rows.items())
        self._rows.clear()
        return total

"""The floating-point operations that a model really executes, whatever leaves parts of its calls out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_LAYERS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)


class Flops:
    """Of one model, by hooks on its layers with weights, which a block that is left out does not call.

    torch's counter says once, over a whole call, what each layer takes for one row of the batch. What a module does
    beside its layers, such as attention, counts with the first of them.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._rows: Counter[torch.nn.Module] = Counter()
        self._each: dict[torch.nn.Module, float] = {}
        for module in model.modules():
            if isinstance(module, _LAYERS):
                module.register_forward_hook(self._on_call)

    def _on_call(self, layer: torch.nn.Module, _, out: torch.Tensor) -> None:
        made = out.shape[-1] if isinstance(layer, torch.nn.Linear) else out.shape[1]
        if made == layer.weight.shape[0]:  # a layer that is left out itself passes something else on
            self._rows[layer] += out.shape[0]

    def learn(self, call: Callable[[], object]) -> None:
        """Learn from `call`, which calls the model in full, what later ones at its size take."""
        self._rows.clear()
        on_cpu = next(self._model.parameters()).device.type == "cpu"
        # The counter knows attention written out, not the CPU's fused kind.
        attention = sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext()
        with FlopCounterMode(display=False) as counter, attention:
            call()
        root = type(self._model).__name__
        modules = {f"{root}.{name}" if name else root: module for name, module in self._model.named_modules()}
        own = {name: sum(taken.values()) for name, taken in counter.get_flop_counts().items() if name in modules}
        for name, taken in sorted(own.items(), reverse=True):  # what is inside before what it is in
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

    def take(self) -> float:
        """Those of all calls since the last time, by what was learned last."""
        total = sum(rows * self._each.get(layer, 0.0) for layer, rows in self._rows.items())
        self._rows.clear()
        return total

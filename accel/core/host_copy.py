"""Numbers of the device, read where the host need not wait for it."""

from __future__ import annotations

import torch


class HostCopy:
    """A small tensor on its way to the host, from a CUDA device beside the device's work."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def has_come(self) -> bool:
        """Whether `read` returns at once."""
        return self._event is None or self._event.query()

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU."""
        if not self.has_come():
            self._event.synchronize()
        return self._tensor.cpu()

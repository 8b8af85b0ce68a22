"""A stand-in for comfy-aimdo's allocator, so that ComfyUI streams weights ("DynamicVRAM") on a CPU.

It is not comfy-aimdo: there is no device and no concurrency. It has the Python API that core 0.33 calls, and its rules:
pages that a fault pins and that pressure evicts, a signature for each residence, a watermark above which nothing is
made resident, and one cast buffer for each of two streams, which the stream's next use overwrites. What may no longer
be read is overwritten with 0xFF, which is NaN in every floating-point type. Core's own patcher and casting code run
on top, unchanged but for the device: "cpu:0" is the card, "cpu" the host. Core's switch `aimdo_enabled` stays off, with
which it would make layers without weights, to be loaded from a file.

    with streaming() as card:
        model = card.streamed(patcher)      # a ModelPatcherDynamic over the model of a ModelPatcher
        card.capacity = 200_000             # bytes; then sample, call, shake

Imported by tests that have put a ComfyUI tree on the path; `why_not` says why one has nothing to stand in for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, pairwise
from typing import Any
from unittest import mock

import torch

CARD = torch.device("cpu", 0)
"""The device of streamed models; tensors made there are on "cpu", with which core compares it as unequal."""

PAGE = 16 * 1024
"""Bytes that are resident or not as one; 32 MiB in comfy-aimdo."""

BUFFER = 128 * 2**20
POISON = 0xFF


def why_not() -> str | None:
    """Why this core cannot stream weights even with the stand-in; None where it can."""
    if importlib.util.find_spec("comfy_aimdo") is None:
        return "this core has no streamed weights (no comfy-aimdo)"
    import comfy.model_patcher
    import comfy.ops

    needed = (comfy.model_patcher, "ModelPatcherDynamic"), (comfy.ops, "cast_modules_with_vbar")
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    return f"this core has no {' and no '.join(missing)}" if missing else None


class _Memory:
    """Bytes at a fixed address, which live as long as a tensor over them does."""

    def __init__(self, size: int):
        self._map = mmap.mmap(-1, max(size, 1))
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))

    def fill(self, offset: int, size: int) -> None:
        ctypes.memset(self.base + offset, POISON, size)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=address - self.base)


class Card:
    """What all models of one `streaming()` share.

    capacity, resident: bytes of pages that may be resident, and that are. peak: most bytes at once, of resident pages
    and cast buffers.
    fail: called with the kind of request ("fault", "buffer") before each; what it raises reaches core.
    races: what a device would have read too early; `streaming` ends with an error if there is any.
    """

    def __init__(self) -> None:
        self.capacity = 1 << 40
        self.resident = self.peak = 0
        self.faults = self.misses = self.casts = 0
        self.fail = lambda kind: None
        self.vbars: list[ModelVBAR] = []
        self.races: list[str] = []
        self.streams = [Stream(self), Stream(self)]

    def streamed(self, patcher: Any) -> Any:
        """A ModelPatcherDynamic over the model of a ModelPatcher, with its patches; loaded by core as any other."""
        import comfy.model_patcher

        made = comfy.model_patcher.ModelPatcherDynamic(patcher.model, CARD, torch.device("cpu"))
        made.patches = {key: list(patches) for key, patches in patcher.patches.items()}
        made.patches_uuid = patcher.patches_uuid
        made.model_options = patcher.model_options
        return made

    @property
    def pins(self) -> int:
        """Pins of all pages; 0 between calls unless something leaks."""
        return sum(sum(vbar.pins) for vbar in self.vbars)

    @property
    def size(self) -> int:
        """Bytes of all streamed weights."""
        return sum(vbar.offset for vbar in self.vbars)

    def shake(self, rng: random.Random) -> None:
        """What other programs and models do between calls: take memory, of any amount, or give it back."""
        self.capacity = rng.choice((0, self.size // 3, self.size // 2, 1 << 40))
        for vbar in self.vbars:
            if rng.random() < 0.5:
                vbar.prioritize()
            vbar.free_memory(rng.randrange(vbar.loaded_size() + 1))
            if rng.random() < 0.5:
                vbar.prioritize()

    def ask(self, kind: str) -> None:
        """Call `fail`; what it stops is not read any more."""
        try:
            self.fail(kind)
        except BaseException:
            for stream in self.streams:
                stream.stop()
            raise

    def has_room(self) -> bool:
        """Make room for one page, from the model that was used least recently; False where all are pinned."""
        for vbar in self.vbars:
            while self.resident + PAGE > self.capacity and vbar.watermark:
                vbar.lower()
        return self.resident + PAGE <= self.capacity

    def note_peak(self) -> None:
        buffers = sum(stream.buffer.size() for stream in self.streams if stream.buffer is not None)
        self.peak = max(self.peak, self.resident + buffers)


class ModelVBAR:
    """The addresses of one model's weights; `pins` and `live` are by page."""

    def __init__(self, card: Card, size: int, device: int | None):
        pages = -(-int(size) // PAGE)
        self._card, self.device, self.max_size = card, device, pages * PAGE
        self._memory = _Memory(self.max_size)
        self.base_addr, self.offset = self._memory.base, 0
        self.live, self.pins, self.serial = [False] * pages, [0] * pages, [0] * pages
        self.watermark = pages
        card.vbars.append(self)

    def __del__(self) -> None:
        """There as in comfy-aimdo, where it frees the native memory."""

    def __deepcopy__(self, memo: dict) -> None:
        raise AssertionError("a copy would free the native memory twice")

    def prioritize(self, *_: Any) -> None:
        vbars = self._card.vbars
        vbars.append(vbars.pop(vbars.index(self)))
        self.watermark = len(self.live)

    def deprioritize(self) -> None:
        vbars = self._card.vbars
        vbars.insert(0, vbars.pop(vbars.index(self)))

    def alloc(self, size: int) -> tuple[ModelVBAR, int, int]:
        self.offset = -(-self.offset // 512) * 512
        start, self.offset = self.offset, self.offset + size
        self._memory.fill(start, size)
        return self, self.base_addr + start, size

    def _pages(self, address: int, size: int) -> range:
        start = address - self.base_addr
        return range(start // PAGE, -(-(start + size) // PAGE))

    def fault(self, address: int, size: int) -> Any:
        """Pin the pages and return their signature; None where they are not all to be resident."""
        card, pages = self._card, self._pages(address, size)
        card.ask("fault")
        card.faults += 1
        for page in pages if pages.stop <= self.watermark else ():
            if not self.live[page]:
                # Making room may lower this model's own watermark to below these pages.
                if not card.has_room() or pages.stop > self.watermark:
                    break
                self.live[page] = True
                card.resident += PAGE
                self.serial[page] += 1
                card.note_peak()
        if pages.stop > self.watermark or not all(self.live[page] for page in pages):
            card.misses += 1
            return None
        signature = (ctypes.c_uint32 * (size // PAGE + 2))()
        for at, page in enumerate(pages):
            signature[at] = self.serial[page]
            self.pins[page] += 1
        return signature

    def unpin(self, address: int, size: int) -> None:
        for page in self._pages(address, size):
            assert self.pins[page] > 0, "unpinned more often than pinned"
            self.pins[page] -= 1
            if page >= self.watermark:
                self._drop(page)

    def lower(self) -> int:
        """Lower the watermark by one page; the bytes that this frees."""
        self.watermark -= 1
        return self._drop(self.watermark)

    def _drop(self, page: int) -> int:
        if not self.live[page] or self.pins[page]:
            return 0
        self.live[page] = False
        self._card.resident -= PAGE
        self._memory.fill(page * PAGE, PAGE)
        return PAGE

    def free_memory(self, size: float) -> int:
        freed = 0
        while freed < size and self.watermark:
            freed += self.lower()
        return freed

    def loaded_size(self) -> int:
        return sum(self.live) * PAGE

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return self._memory.tensor(address, size)


class VRAMBuffer:
    """A stream's cast buffer: each cast of weights that are not resident writes at a running offset."""

    def __init__(self, card: Card, max_size: int, device: int | None):
        self._card, self._memory, self._used = card, _Memory(BUFFER), 0
        self.base_addr = self._memory.base

    def size(self) -> int:
        return self._used

    def get(self, size: int, offset: int = 0) -> tuple[VRAMBuffer, int, int]:
        self._card.ask("buffer")
        self._card.casts += 1
        self._used = max(self._used, int(offset) + int(size))
        assert self._used <= BUFFER
        self._card.note_peak()
        return self, self.base_addr + int(offset), int(size)

    def spoil(self) -> None:
        self._memory.fill(0, self._used)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return self._memory.tensor(address, size)


class Stream:
    """An offload stream. Work is done at once here, so what counts is whose buffer may be overwritten, and who waits.

    What is copied on it may be read once the current stream waits for it (`sync`), and overwritten once it has waited
    for the current one.
    """

    def __init__(self, card: Card):
        self._card = card
        self.buffer: VRAMBuffer | None = None
        self.is_used = self.is_read = False

    def __enter__(self) -> Stream:
        self.is_used, self.is_read = True, False
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def sync(self) -> None:
        self.is_read = True

    def wait_stream(self, _: Any) -> None:
        if self.is_used and not self.is_read:
            self._card.races.append("weights were released that nobody had waited for")
        self.stop()

    def stop(self) -> None:
        self.is_used = self.is_read = False

    def synchronize(self) -> None:
        pass

    def cast_buffer(self, device: torch.device) -> VRAMBuffer:
        """As core's `get_aimdo_cast_buffer`."""
        if self.buffer is None:
            self.buffer = VRAMBuffer(self._card, BUFFER, device.index)
        return self.buffer

    def begin(self) -> Stream:
        """Its next use, from which on nothing that was cast there before may be read."""
        if self.buffer is not None:
            self.buffer.spoil()
        return self


class _HostBuffer:
    """Pinned memory of the host, of which there is none here."""

    def __init__(self, *_: Any, **__: Any):
        self.size = 0

    def truncate(self, size: int, **_: Any) -> None:
        self.size = size


@contextmanager
def streaming() -> Iterator[Card]:
    """In this context core streams the weights of patchers made by `Card.streamed`, or by core's loaders on `CARD`.

    Models and tensors made inside are void afterwards.
    """
    import comfy.model_management
    import comfy.ops
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch
    import comfy_aimdo.vram_buffer

    card, current = Card(), object()
    management, own_cast = comfy.model_management, comfy.ops.cast_bias_weight

    def in_turn() -> Iterator[Stream]:
        for last, stream in pairwise(cycle(card.streams)):
            last.wait_stream(current)  # as core does, whose layers release streamed weights without
            yield stream.begin()

    # No function here closes over the card: what core's layers read of it would be part of their blocks' code. Nobody
    # looks inside a generator.
    turns = in_turn()

    def get_offload_stream(device: torch.device) -> Stream | None:
        return None if torch.compiler.is_compiling() else next(turns)

    def cast_bias_weight(s: Any, input: Any = None, dtype: Any = None, device: Any = None, *args: Any, **kwargs: Any):
        """Core's, which takes weights to be in place where they and the input are on one device."""
        if hasattr(s, "_v") and (device is None or device == torch.device("cpu")):
            device = CARD
        return own_cast(s, input, dtype, device, *args, **kwargs)

    with ExitStack() as stack:
        for owner, name, value in (
            (comfy_aimdo.model_vbar, "ModelVBAR", lambda size, device: ModelVBAR(card, size, device)),
            (comfy_aimdo.torch, "aimdo_to_tensor", lambda alloc, device: alloc[0].tensor(*alloc[1:])),
            (comfy_aimdo.host_buffer, "HostBuffer", _HostBuffer),
            (comfy_aimdo.vram_buffer, "VRAMBuffer", lambda size, device: VRAMBuffer(card, size, device)),
            (management.args, "disable_pinned_memory", True),
            (management, "is_device_cpu", lambda device: device == torch.device("cpu")),
            (management, "NUM_STREAMS", len(card.streams)),
            (management, "get_offload_stream", get_offload_stream),
            (management, "get_aimdo_cast_buffer", lambda stream, device: stream.cast_buffer(device)),
            (management, "current_stream", lambda device: current),
            (management, "sync_stream", lambda device, stream: stream and stream.sync()),
            (comfy.ops, "cast_bias_weight", cast_bias_weight),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            yield card
            assert not card.races, sorted(set(card.races))
        finally:
            management.unload_all_models()
            management.current_loaded_models.clear()

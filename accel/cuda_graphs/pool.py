"""The memory that recordings share, and how it is counted.

Memory that one recording has made the pool grow by serves later ones too, and goes back only when the last
recording goes. So each weighs an equal part of its device's pool, and the sum is the truth whichever of them leave.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..modules.snapshot import UnsupportedWeights, WeightSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    import torch

    from ..cache.graph_cache import GraphCache
    from ..cache.lease import Lease
    from .captured_call import CapturedCall
    from .recorder import Recorder, Recording

_MAX_REFUSED = 1024


class NoRoom(Exception):
    """The recording does not fit into the budget beside those that the run needs too."""


class MadeRoom(Exception):
    """Everything recorded was dropped so that what the present run needs can be recorded again, alone."""


class CapturePool:
    """What a recorder's recordings hold, and who of them is left.

    recorder: makes them. One pool for each recorder, and one recorder for a process.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self._grown: dict[torch.device, int] = {}
        self._members: weakref.WeakSet[CapturedCall] = weakref.WeakSet()
        self._refused: dict[Hashable, int] = {}
        self.on_admitted: Callable[[torch.device], None] = lambda device: None
        """Told on which device a recording has come in. Must not raise."""

    @property
    def members(self) -> list[CapturedCall]:
        """The recordings that are left."""
        return list(self._members)

    def share(self, device: torch.device) -> int:
        """Bytes of a device's shared memory, for each recording there."""
        return self._grown.get(device, 0) // max(len(self._members_on(device)), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory and of all buffers."""
        return sum(map(self.nbytes_on, {member.device for member in self.members}))

    def nbytes_on(self, device: torch.device) -> int:
        """As `nbytes`, of one device."""
        members = self._members_on(device)
        return (self._grown.get(device, 0) if members else 0) + sum(member.buffer_bytes for member in members)

    def begin(self) -> None:
        """Before a recording is made: where none is left, their memory is nobody's any more."""
        left = {member.device for member in self.members}
        self._grown = {device: grown for device, grown in self._grown.items() if device in left}
        if not left:
            self.recorder.begin_anew()

    def grow(self, recording: Recording, device: torch.device) -> None:
        """A recording was made, whether or not it is kept."""
        self._grown[device] = self._grown.get(device, 0) + recording.nbytes

    def is_refused(self, key: Hashable, budget: int) -> bool:
        """Whether a recording under this key did not fit into a budget as large as this, bytes."""
        return self._refused.get(key, -1) >= budget

    def leave(self, member: CapturedCall) -> None:
        """A recording has let go of its memory."""
        self._members.discard(member)

    def admit(self, member: CapturedCall, cache: GraphCache, lease: Lease) -> None:
        """Take a new recording in, where the pool then fits into the cache's budget beside its other graphs.

        Raises:
            MadeRoom: all recordings were dropped, some of them of other runs; the call may be recorded again.
            NoRoom: it does not fit beside those that this run uses; those stay.
        """
        self._members.add(member)
        keys = {known.key for known in self.members}
        room = cache.room_for(keys)
        if self.nbytes <= room:
            self.on_admitted(member.device)
            return
        needed = self.nbytes
        self._members.discard(member)
        others = keys - lease.keys.keys() - {member.key}
        if not others:
            self._refuse(member.key, cache.max_bytes)
        if others or self.nbytes > room:
            self.drop_all(cache)
        if others:
            raise MadeRoom
        raise NoRoom(
            f"the recorded calls of this run need {needed >> 20} MB, more than the {max(room, 0) >> 20} MB that they "
            "may keep (cache_mb)"
        )

    def drop_all(self, cache: GraphCache) -> None:
        """Let go of every recording."""
        _evict(cache, self.members)

    def drop_outdated(self, cache: GraphCache) -> None:
        """Let go of the recordings whose model is gone or has been moved since; some milliseconds for each model."""
        digests: dict[object, str | None] = {}
        for member in self.members:
            model = member.key.model()
            if model is not None and model not in digests:
                digests[model] = _digest(model)
            if model is None or member.digest != digests[model] or not member.has_kernels():
                cache.evict(member.key)

    def drop_model(self, cache: GraphCache, model: object) -> None:
        """Let go of the recordings of one model."""
        _evict(cache, (member for member in self.members if member.key.model() is model))

    def drop_device(self, cache: GraphCache, device: torch.device) -> None:
        """Let go of the recordings on one device."""
        _evict(cache, self._members_on(device))

    def _members_on(self, device: torch.device) -> list[CapturedCall]:
        return [member for member in self.members if member.device == device]

    def _refuse(self, key: Hashable, budget: int) -> None:
        self._refused.pop(key, None)
        self._refused[key] = budget
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]


def _evict(cache: GraphCache, members: Iterable[CapturedCall]) -> None:
    for member in members:
        cache.evict(member.key)


def _digest(model: torch.nn.Module) -> str | None:
    try:
        return WeightSnapshot(model).digest
    except UnsupportedWeights:
        return None

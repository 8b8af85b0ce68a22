"""Which replica a prompt goes to: the one that has run its key, so that captured calls and loaded models serve again.

The rule alone, without Ray and with the caller's clock: a fleet's router and `bench fleet --simulate` both ask it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

_MOST_KEYS = 4096

Replica = TypeVar("Replica", bound=Hashable)


class Homes(Generic[Replica]):
    """A key's prompts wait for a replica that has run the key, unless they and another replica have waited long.

    New keys are spread evenly, those of one model together where that leaves them so.

    patience: seconds for which a replica has had nothing to do, and a prompt has waited, before it takes that prompt.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._given: OrderedDict[str, Replica] = OrderedDict()
        """Where each key was first sent to; its replica tells of it later."""
        self._busy_at: dict[Replica, float] = {}
        """When each replica last began or ended something."""

    def choose(
        self,
        key: str,
        waited: float,
        ran: Mapping[Replica, Collection[str]],
        queued: Callable[[Replica], int | None],
        now: float,
    ) -> list[list[Replica]]:
        """Replicas that may take a prompt, the best first: one of a later list only if none of the earlier has room.

        waited: seconds since the prompt came. ran: the keys that each replica has lately run. queued: how many prompts
        a replica has; None where that is not known. now: seconds, by the clock of `note_work`.
        """
        first = self._given.get(key)
        homes = [replica for replica, keys in ran.items() if key in keys or replica == first]
        if not homes:
            homes = [self._for_new(key, ran)]
            self._given[key] = homes[0]
            if len(self._given) > _MOST_KEYS:
                self._given.popitem(last=False)
        if waited < self._patience:
            return [homes]
        idle = [
            replica
            for replica in ran
            if not queued(replica) and now - self._busy_at.get(replica, -math.inf) >= self._patience
        ]
        return [homes, idle] if idle else [homes]

    def is_home(self, replica: Replica, key: str, ran: Collection[str]) -> bool:
        """Whether prompts of the key wait for this replica, which has lately run the keys `ran`."""
        return key in ran or self._given.get(key) == replica

    def note_work(self, replica: Replica, now: float) -> None:
        """The replica began or ended something."""
        self._busy_at[replica] = now

    def _for_new(self, key: str, ran: Mapping[Replica, Collection[str]]) -> Replica:
        """Of those with no more than their share of keys, one that has run the key's model, or with the fewest."""
        given: defaultdict[Replica, set[str]] = defaultdict(set)
        for other, replica in self._given.items():
            given[replica].add(other)
        keys = {replica: given[replica].union(lately) for replica, lately in ran.items()}
        share = sum(map(len, keys.values())) // len(keys)
        model = _model(key)

        def rank(replica: Replica) -> tuple[bool, bool, int]:
            held = keys[replica]
            return len(held) > share, all(_model(other) != model for other in held), len(held)

        return min(keys, key=rank)


def _model(key: str) -> str:
    """A key ends with the shape of the latent (`routing_key`)."""
    return key.rpartition(" ")[0]

"""Which replica a prompt goes to: the one that has run its key, so that captured calls and loaded models serve again.

An extension of Ray Serve's request router: Serve keeps the queue, asks the replicas, and tells what each has run.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

_MOST_KEYS = 4096


class GraphRouter(MultiplexMixin, RequestRouter):
    """A key's prompts wait for the replica that has run the key, unless they and another replica have waited long.

    A new key goes to the replica with the fewest. Serve's own choice for multiplexed models knows of a key only once
    the replica has told of it, spreads a burst of one key meanwhile, and never lets a prompt wait longer than two
    seconds for a replica that is busy.

    patience: seconds for which a replica has had nothing to do, and a prompt has waited, before it takes that prompt.
    """

    max_num_routing_tasks_cap = 1000

    def initialize_state(self, patience: float = 5.0) -> None:
        self._patience = patience
        self._given: OrderedDict[str, ReplicaID] = OrderedDict()
        """Where each key was first sent to; its replica tells of it later."""
        self._busy_at: dict[ReplicaID, float] = {}
        """When each replica last began or ended something, by the monotonic clock."""

    @property
    def max_num_routing_tasks(self) -> int:
        # By default two for each replica: those of prompts that wait would keep others from a free replica.
        return self.max_num_routing_tasks_cap

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = pending_request.metadata.multiplexed_model_id if pending_request else ""
        if pending_request:
            pending_request.routing_context.should_backoff = True
        if not key:  # Serve takes the first of those that have as little to do
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        homes = [
            replica
            for replica in candidate_replicas
            if key in replica.multiplexed_model_ids or self._given.get(key) == replica.replica_id
        ]
        if not homes:
            homes = [min(candidate_replicas, key=self._keys_of)]
            self._given[key] = homes[0].replica_id
            if len(self._given) > _MOST_KEYS:
                self._given.popitem(last=False)
        if time.time() - pending_request.created_at < self._patience:
            return [homes]
        idle = [replica for replica in candidate_replicas if self._is_idle(replica.replica_id)]
        return [homes, idle] if idle else [homes]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._busy_at[replica_id] = time.monotonic()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._busy_at[replica_id] = time.monotonic()

    def _is_idle(self, replica_id: ReplicaID) -> bool:
        if self.replica_queue_len_cache.get(replica_id):
            return False
        return time.monotonic() - self._busy_at.get(replica_id, -math.inf) >= self._patience

    def _keys_of(self, replica: RunningReplica) -> int:
        given = {key for key, home in self._given.items() if home == replica.replica_id}
        return len(given | set(replica.multiplexed_model_ids))

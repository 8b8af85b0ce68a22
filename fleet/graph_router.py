"""Which replica a prompt goes to, within Ray Serve: it keeps the queue, asks the replicas, and tells what each has run.

The rule itself is in `homes`.
"""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .homes import Homes


class GraphRouter(MultiplexMixin, RequestRouter):
    """`Homes`, as an extension of Serve's request router.

    Serve's own choice for multiplexed models knows of a key only once the replica has told of it, spreads a burst of
    one key meanwhile, and never lets a prompt wait longer than two seconds for a replica that is busy.

    patience: as for `Homes`.
    """

    max_num_routing_tasks_cap = 1000

    def initialize_state(self, patience: float = 5.0) -> None:
        self._homes: Homes[ReplicaID] = Homes(patience)

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
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        ranks = self._homes.choose(
            key,
            time.time() - pending_request.created_at,
            {name: replica.multiplexed_model_ids for name, replica in candidates.items()},
            self.replica_queue_len_cache.get,
            time.monotonic(),
        )
        return [[candidates[name] for name in rank] for rank in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._homes.note_work(replica_id, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._homes.note_work(replica_id, time.monotonic())

"""Ray Serve's request router with the fleet's rule: Serve queues prompts and says which keys each replica has run."""

from __future__ import annotations

import random
import time

from ray.serve.request_router import MultiplexMixin, PendingRequest, RequestRouter, RunningReplica

from .routing import choose


class GraphRouter(MultiplexMixin, RequestRouter):
    """`routing.choose` over the model ids of Serve's multiplexing, which are the fleet's keys.

    Serve's own rule asks a replica that has the key only once: where that is busy, the prompt goes elsewhere.
    """

    def initialize_state(self, patience: float = 5.0) -> None:
        self._patience = patience

    @property
    def max_num_routing_tasks(self) -> int:
        """How many prompts are routed at once; by default two a replica, and prompts that wait would hold up others."""
        return 1000

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = pending_request.metadata.multiplexed_model_id if pending_request else ""
        if pending_request:
            pending_request.routing_context.should_backoff = True
        if not key:  # Serve takes the first of those that have as little to do
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        ran = {name: replica.multiplexed_model_ids for name, replica in candidates.items()}
        waited = time.time() - pending_request.created_at
        ranks = choose(key, waited, self._patience, ran, self.replica_queue_len_cache.get)
        return [[candidates[name] for name in rank] for rank in ranks]

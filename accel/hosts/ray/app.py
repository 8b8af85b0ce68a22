"""The Serve application: `serve run comfy_accel.hosts.ray.app:app comfyui=/ComfyUI results=/shared/results replicas=4`.

Annotations are not postponed here: Serve asks the builder's for the class of its settings.
"""

import os

from ray import serve
from ray.serve.config import RequestRouterConfig

from .front import Front
from .graph_router import GraphRouter
from .replica import Replica
from .settings import Settings


def app(settings: Settings) -> serve.Application:
    """The front, which clients talk to, over as many replicas as the settings say.

    Raises ValueError: a folder is not named by its whole path.
    """
    for name in ("comfyui", "results", "input"):
        path = getattr(settings, name)
        if path and not os.path.isabs(path):
            raise ValueError(f"{name} is {path}: give its whole path, since each machine begins elsewhere.")
    routed = {}
    if settings.route == "graph":
        routed["request_router_config"] = RequestRouterConfig(
            request_router_class=GraphRouter, request_router_kwargs={"patience": settings.patience_s}
        )
    replicas = serve.deployment(
        Replica,
        name="ComfyUI",
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.at_once,
        ray_actor_options={"num_gpus": settings.gpus, "num_cpus": settings.cpus},
        health_check_period_s=10,
        health_check_timeout_s=60,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=1,
        **routed,
    )
    front = serve.deployment(
        Front,
        name="Front",
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=1,
    )
    return front.bind(replicas.bind(settings.model_dump()), settings.model_dump())

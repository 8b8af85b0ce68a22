"""The Serve applications, for `serve run`:

comfy_accel_fleet.app:app comfyui=/ComfyUI results=/shared/results replicas=4
comfy_accel_fleet.app:pipeline pipeline=/models/sdxl replicas=4 gpus=1

Annotations are not postponed here: Serve reads the class of the settings from the builders' annotations.
"""

import os

from ray import serve
from ray.serve.config import RequestRouterConfig

from .front import Front
from .graph_router import GraphRouter
from .pipeline import PipelineFront, PipelineReplica
from .replica import Replica
from .settings import Fleet, PipelineSettings, Settings


def app(settings: Settings) -> serve.Application:
    """ComfyUI's API over as many ComfyUIs as the settings say.

    Raises ValueError: a path is not absolute.
    """
    for name in ("comfyui", "results", "input"):
        path = getattr(settings, name)
        if path and not os.path.isabs(path):
            raise ValueError(f"{name} is {path}: give an absolute path, which is the same on each machine.")
    return _application(settings, Front, Replica, "ComfyUI")


def pipeline(settings: PipelineSettings) -> serve.Application:
    """Requests in JSON, answered with a PNG, over as many diffusers pipelines as the settings say."""
    variables = {"runtime_env": {"env_vars": settings.environment}} if settings.environment else {}
    return _application(settings, PipelineFront, PipelineReplica, "Pipeline", **variables)


def _application(settings: Fleet, front: type, replica: type, name: str, **actor: dict) -> serve.Application:
    """The front that clients talk to, bound to its replicas; with `route: graph`, by our own request router."""
    routed = {}
    if settings.route == "graph":
        routed["request_router_config"] = RequestRouterConfig(
            request_router_class=GraphRouter, request_router_kwargs={"patience": settings.patience_s}
        )
    ending = {"graceful_shutdown_timeout_s": settings.drain_s, "graceful_shutdown_wait_loop_s": 1}
    replicas = serve.deployment(
        replica,
        name=name,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.at_once,
        ray_actor_options={"num_gpus": settings.gpus, "num_cpus": settings.cpus, **actor},
        health_check_period_s=10,
        health_check_timeout_s=60,
        **ending,
        **routed,
    )
    fronts = serve.deployment(
        front, name="Front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}, **ending
    )
    return fronts.bind(replicas.bind(settings.model_dump()), settings.model_dump())

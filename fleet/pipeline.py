"""A diffusers pipeline in each replica, and a front that takes JSON requests and answers with a PNG.

A request: {"prompt", "negative_prompt", "width", "height", "steps", "guidance", "seed"}, of which only the prompt is
required.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .counts import MET, Keys, States, counted
from .http import Json, answering, read_json, refusal
from .settings import PipelineSettings

log = logging.getLogger("ray.serve")

ENGINE = "comfy_accel" if __package__ == "comfy_accel_fleet" else "accel"
"""The engine's package: as the wheel names it, or as the folder beside this one in a checkout."""

_RUNS = 2
"""Most attempts at a request: one more after a replica ended under it."""

_LONGEST = 20_000
"""Most characters of a prompt: more than any text encoder reads, few enough to tokenize quickly."""

_NAMES = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
"""Ours → a pipeline's argument, where that differs."""


class Asked(BaseModel):
    """A request for one image. Sides in pixels; a missing seed is random, and reported in the header X-Seed."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(max_length=_LONGEST)
    negative_prompt: str | None = Field(None, max_length=_LONGEST)
    width: int | None = Field(None, ge=1, le=4096)
    height: int | None = Field(None, ge=1, le=4096)
    steps: int | None = Field(None, ge=1, le=1000)
    guidance: float | None = Field(None, allow_inf_nan=False)
    seed: int = Field(default_factory=lambda: secrets.randbelow(1 << 32), ge=0, lt=1 << 63)

    def key(self) -> str:
        """Equal for requests that run the same graphs; "" where the pipeline chooses the size."""
        return f"{self.width}x{self.height}" if self.width and self.height else ""

    def arguments(self) -> dict[str, Any]:
        """The pipeline's arguments, without its generator."""
        given = self.model_dump(exclude_none=True, exclude={"seed"})
        return {_NAMES.get(name, name): value for name, value in given.items()}


class GivenUp(Exception):
    """The client left, so nobody waits for the image."""


class PipelineReplica:
    """One accelerated pipeline, ready once its warm-up is done."""

    async def __init__(self, given: dict[str, Any]):  # type: ignore[misc]  # Serve awaits it
        settings = PipelineSettings(**given)
        self._names = {"replica": serve.get_replica_context().replica_id.unique_id, "pid": os.getpid()}
        self._images = 0
        # A pipeline makes one image after the other, and this replica answers meanwhile.
        self._thread = ThreadPoolExecutor(1)
        self._pipe = await self._apart(load, settings)
        self._takes = inspect.signature(self._pipe.__call__).parameters
        self._keys = Keys()

    async def image(self, given: dict[str, Any], key: str) -> tuple[str, Any, dict[str, Any]]:
        """("image", a PNG), or ("refused" or "failed", a sentence); each with this replica's `state` and whether it has
        run the key before ("met").

        given: fields of `Asked`. key: its key, "" for none.
        """
        asked = Asked(**given)
        done = {"met": await self._keys.met(key)}
        unknown = [name for name in asked.arguments() if name not in self._takes]
        given_up = threading.Event()
        try:
            if unknown:
                raise ValueError(f"{type(self._pipe).__name__} takes no {unknown[0]}")
            kind, value = "image", await self._apart(self._make, asked, given_up)
        except ValueError as error:
            kind, value = "refused", f"{error}."
        except asyncio.CancelledError:
            given_up.set()
            raise
        except Exception as error:  # whatever a model raises: an answer, since the same request would fail elsewhere
            log.exception("an image failed")
            kind, value = "failed", f"{type(error).__name__}: {error}"
        return kind, value, {**done, "replica": await self.state()}

    async def state(self) -> dict[str, Any]:
        """Counts of this replica since its start."""
        shared = engine("cache.graph_cache").shared

        store = shared.store.statistics() if shared.store is not None else None
        return {**self._names, "images": self._images, **counted(shared.statistics(), store)}

    def _make(self, asked: Asked, given_up: threading.Event) -> bytes:
        import torch

        def go_on(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if given_up.is_set():
                raise GivenUp
            return tensors

        followed = {"callback_on_step_end": go_on} if "callback_on_step_end" in self._takes else {}
        if given_up.is_set():
            raise GivenUp
        generator = torch.Generator().manual_seed(asked.seed)
        (image,) = self._pipe(**asked.arguments(), generator=generator, **followed).images
        png = io.BytesIO()
        image.save(png, "PNG")
        self._images += 1
        return png.getvalue()

    async def _apart(self, work: Callable, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def engine(module: str) -> Any:
    """A module of the engine, imported when it is needed: this one also runs where only the front does."""
    return importlib.import_module(f"{ENGINE}.{module}")


def load(settings: PipelineSettings) -> Any:
    """The pipeline, accelerated and warm."""
    import diffusers
    import torch

    accelerate_pipeline = engine("hosts.diffusers.pipeline").accelerate_pipeline
    warm_up = engine("hosts.diffusers.warm_up").warm_up

    dtype = getattr(torch, settings.dtype or ("float16" if settings.gpus else "float32"))
    pipe = diffusers.DiffusionPipeline.from_pretrained(settings.pipeline, torch_dtype=dtype, **settings.load)
    pipe.to("cuda" if settings.gpus else "cpu")
    pipe.set_progress_bar_config(disable=True)
    arguments = dict(settings.accelerate)
    if isinstance(arguments.get("deep_cache"), dict):
        settings_of = engine("step_cache.config").DeepCacheSettings
        arguments["deep_cache"] = settings_of(**arguments["deep_cache"])
    accelerate_pipeline(pipe, **arguments)
    if settings.warm_up:
        log.info("%s", warm_up(pipe, **settings.warm_up))
    return pipe


@serve.ingress()
class PipelineFront:
    """POST /image makes one image; GET /accel/state returns the front's counters and each replica's latest state."""

    def __init__(self, replicas: DeploymentHandle, given: dict[str, Any]):
        settings = PipelineSettings(**given)
        self._replicas = replicas
        self._by_graph = settings.route == "graph"
        self._counts: Counter[str] = Counter()
        self._states = States(settings.replicas)

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/image", answering(self._post_image), methods=["POST"]),
                Route("/accel/state", answering(self._get_state), methods=["GET"]),
            ]
        )

    async def _post_image(self, request: Request) -> Response:
        body = await read_json(request)
        try:
            asked = Asked.model_validate(body)
        except ValidationError as error:
            (first, *_) = error.errors()
            return refusal(f"{'.'.join(map(str, first['loc'])) or 'The body'}: {first['msg']}.")
        key = asked.key()
        handle = self._replicas.options(multiplexed_model_id=key if self._by_graph else "")
        for run in range(_RUNS):
            self._counts["runs"] += 1
            try:
                kind, value, done = await handle.image.remote(asked.model_dump(), key)
            except Exception as error:
                # Serve and Ray have a dozen exceptions for a replica that ended; all mean that it did not answer.
                log.warning("image, run %d: %s: %s", run + 1, type(error).__name__, error)
                continue
            self._counts[{"image": "answered"}.get(kind, kind)] += 1
            if kind == "image":
                self._counts[MET[done["met"]]] += 1
            self._states.heard(done["replica"])
            if kind != "image":
                return refusal(value, 400 if kind == "refused" else 500)
            names = {"X-Seed": str(asked.seed), "X-Replica": done["replica"]["replica"]}
            return Response(value, media_type="image/png", headers=names)
        self._counts["failed"] += 1
        return refusal(f"{_RUNS} replicas ended while they made the image.", 503)

    async def _get_state(self, request: Request) -> Response:
        return Json({"images": dict(self._counts), "replicas": self._states.known})

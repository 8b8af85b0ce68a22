"""A real ComfyUI in this process, without its server: `import comfy` and, after `pack.load`, this pack."""

import sys
from pathlib import Path
from unittest import mock

from .comfyui import tree


def boot(cpu: bool, *flags: str) -> Path:
    """Put ComfyUI's tree first on the path, let it read a command line of ours, and return the tree.

    cpu: keep to the CPU even where there is a GPU. flags: of ComfyUI; none: `--disable-cuda-malloc` on a GPU.

    Raises:
        Problem: there is no ComfyUI.
    """
    comfyui = tree()
    if str(comfyui) not in sys.path[:1]:
        sys.path.insert(0, str(comfyui))
    # Core's own attention is about 100 times slower on a CPU; CUDA graphs need torch's own allocator.
    flags = (*flags, "--cpu") if cpu else flags or ("--disable-cuda-malloc",)
    with mock.patch.object(sys, "argv", ["main.py", "--use-pytorch-cross-attention", *flags]):
        import comfy.options

        # Must come before the first import of comfy.cli_args, which reads sys.argv once.
        comfy.options.enable_args_parsing()
        import comfy.cli_args  # noqa: F401
    return comfyui

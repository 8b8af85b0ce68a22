"""A checkpoint that ComfyUI's own loader takes for SD1.5, made on the spot with random weights.

The UNet has SD1.5's width and four levels, but one ResBlock a level and the full width everywhere (74 M parameters);
the text encoder and the VAE are full size. Images are finite and mean nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

from dev import ROOT, WORK, Problem

from .comfyui import tree

FILE_NAME = "accel-synthetic-sd15.safetensors"
BYTES = 600_000_000

UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "channel_mult": [1, 1, 1, 1],
    "num_res_blocks": [1, 1, 1, 1],
    "transformer_depth": [1, 1, 1, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "num_heads": 8,
    "use_spatial_transformer": True,
    "context_dim": 768,
    "legacy": False,
}
VAE = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}


def checkpoint(folder: Path = WORK / "checkpoints", comfyui: Path | None = None) -> Path:
    """The synthetic checkpoint in `folder`: 560 MB, made in seconds the first time, the same bytes every time.

    Args:
        comfyui: the tree whose model classes name the weights; by default `dev.tools.comfyui.tree()`.
    """
    path = folder / FILE_NAME
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # In a process of its own: this one keeps its modules, and its `nodes`, free of ComfyUI's.
    command = [sys.executable, "-m", "dev.tools.synthetic", str(comfyui or tree()), str(path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Problem(f"The synthetic checkpoint ({BYTES // 10**6} MB in {folder}) could not be made: {reason}")
    return path


def _write(comfyui: Path, path: Path) -> None:
    """Make the file. Puts ComfyUI on this process's path, hence called by the child process alone."""
    import safetensors.torch
    import torch

    modules = _modules(comfyui)
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{prefix}.{name}": _random(name, tensor.shape, generator)
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
        # SD1.5 checkpoints have no text projection.
        if not name.startswith("text_projection")
    }
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        safetensors.torch.save_file(weights, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _modules(comfyui: Path) -> dict:
    """Prefix in a checkpoint → the module, without storage."""
    sys.path.insert(0, str(comfyui))
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import json

    import comfy.clip_model
    import comfy.ldm.models.autoencoder
    import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
    import comfy.ops
    import torch

    clip = json.loads((comfyui / "comfy" / "sd1_clip_config.json").read_text(encoding="utf-8"))
    kind = {"dtype": torch.float16, "device": "meta", "operations": comfy.ops.disable_weight_init}
    with torch.device("meta"):
        return {
            "model.diffusion_model": openaimodel.UNetModel(**UNET, **kind),
            "first_stage_model": comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=VAE, embed_dim=4),
            "cond_stage_model.transformer": comfy.clip_model.CLIPTextModel(clip, **kind),
        }


def _random(name: str, shape, generator):
    """Weights that keep activations finite: matrices scaled by fan-in, norms 1, biases 0."""
    import torch

    if len(shape) > 1:
        fan_in = shape[1:].numel()
        return (torch.randn(shape, generator=generator) / fan_in**0.5).half()
    return torch.full(shape, 1.0 if name.endswith("weight") else 0.0, dtype=torch.float16)


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Path(sys.argv[2]))

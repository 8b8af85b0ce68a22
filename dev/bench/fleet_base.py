"""A ComfyUI's base directory for `fleet`: the smallest model that core's loader knows, and prompts for it.

`python -m dev.bench.fleet_base FOLDER` makes it; in a process of its own, which ComfyUI's modules stay in.
"""

import sys
from pathlib import Path

from dev.tools import inprocess
from dev.tools.client import Graph
from dev.tools.comfyui import make_base

MODEL = "tiny-sd3.safetensors"
NODES = '''"""Random text features, and a latent shown as an image: text encoders and VAEs are larger than the model."""

import torch


class SomePrompt:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "bench"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def make(self, seed):
        generator = torch.Generator().manual_seed(seed)
        pooled = torch.randn(1, 32, generator=generator)
        return ([[torch.randn(1, 24, 48, generator=generator), {"pooled_output": pooled}]],)


class LatentAsImage:
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "show"
    CATEGORY = "bench"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    def show(self, samples):
        return (samples["samples"][:, :3].movedim(1, -1).float().sigmoid(),)


NODE_CLASS_MAPPINGS = {"SomePrompt": SomePrompt, "LatentAsImage": LatentAsImage}
'''


def graph(width: int, height: int, seed: int, backend: str = "eager", steps: int = 2) -> Graph:
    """A prompt in API format. width, height: pixels, at most 384; the latent has an eighth."""

    def node(class_type, **inputs):
        return {"class_type": class_type, "inputs": inputs, "_meta": {"title": class_type}}

    return {
        "unet": node("UNETLoader", unet_name=MODEL, weight_dtype="default"),
        "model": node(
            "AccelModel", model=["unet", 0], shapes="any size", backend=backend, on_trouble="stop with the reason"
        ),
        "positive": node("SomePrompt", seed=1),
        "negative": node("SomePrompt", seed=2),
        "latent": node("EmptySD3LatentImage", width=width, height=height, batch_size=1),
        "sampler": node(
            "KSampler",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **dict(seed=seed, steps=steps, cfg=4.0, sampler_name="euler", scheduler="normal", denoise=1.0),
        ),
        "image": node("LatentAsImage", samples=["sampler", 0]),
        "save": node("SaveImage", images=["image", 0], filename_prefix="fleet"),
    }


def make(base: Path) -> None:
    """Make the base directory; in a process that has ComfyUI's modules (`inprocess.boot`)."""
    import safetensors.torch
    import torch
    from kit.tiny_models import SD3, Family

    make_base(base)
    (base / "custom_nodes" / "fleet_nodes.py").write_text(NODES, encoding="utf-8")
    weights = Family("SD3", "SD3", SD3, 48, 32).load(torch.float32).model.diffusion_model.state_dict()
    folder = base / "models" / "diffusion_models"
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(weights, folder / MODEL)


if __name__ == "__main__":
    inprocess.boot(cpu=True)
    make(Path(sys.argv[1]))

"""Nodes of ComfyUI's core that return a MODEL, one of each sort, and how they are tried: on a tiny model of a family.

Imported by tests that have put a ComfyUI tree on the path. Nodes and families that this core lacks are left out of
`ROWS`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.gligen
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.samplers
import torch
from comfy_extras import nodes_model_patch

from kit.controls import network, wan_vae
from kit.core_families import OTHERS
from kit.deep_cache import SMALL
from kit.families import FAMILIES, Shapes, TinyFamily
from kit.other_nodes import caller, find
from kit.tiny_models import UNET, Family, randomize
from kit.zoo import Noise

CPU = torch.device("cpu")

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A node, or what one puts in the conditioning, on a model.

    node: module and class, as `nodes_pag.PerturbedAttentionGuidance`; "" for what is in the conditioning alone.
    inputs: of the node beside the model, from the model and the shapes of the latents. extras: for the conditioning.
    eager: codes of the reasons why blocks run uncompiled. changes: whether the image must be another than without the
    node. compiles: whether the node does. sample: in place of the family's own.
    """

    family: str
    node: str = ""
    inputs: Callable[[Any, Shapes], Inputs] = lambda model, shapes: {}
    extras: Callable[[Shapes], Inputs] = lambda shapes: {}
    eager: tuple[str, ...] = ()
    changes: bool = True
    compiles: bool = False
    batch: int = 1
    sample: Callable[..., torch.Tensor] | None = None

    @property
    def is_known(self) -> bool:
        """Whether this core has node and family."""
        if self.family not in FAMILIES_OF_NODES or not self.node:
            return self.family in FAMILIES_OF_NODES
        return find(self.node) is not None

    def on(self, model: Any, size: int = 0) -> Any:
        """The model with the node."""
        if not self.node:
            return model
        shapes = FAMILIES_OF_NODES[self.family].sizes[size]
        given = self.inputs(model, shapes)
        call = caller(self.node)
        known = inspect.signature(call).parameters  # older cores ask for less
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            given = {name: value for name, value in given.items() if name in known}
        if "model1" not in given:
            given["model"] = model
        with torch.inference_mode():
            out = call(**given)
        return getattr(out, "args", out)[0]

    def image(self, model: Any, size: int = 0, bare: bool = False) -> torch.Tensor:
        """The finished latents in one vector; chance falls alike in each. bare: without `extras`."""
        case = FAMILIES_OF_NODES[self.family]
        torch.manual_seed(0)
        if self.sample is not None:
            return self.sample(case, model, size)
        extras = {} if bare else self.extras(case.sizes[size])
        parts = case.sample(model, size, batch=self.batch, steps=4, **extras)
        return torch.cat([part.flatten() for part in parts])


# Families


_PICTURE = ((4, 16, 16),), ((4, 12, 20),)
_SAME_FRAMES = ((16, 3, 8, 8),), ((16, 3, 6, 10),)
_UNET_FAMILY = TinyFamily(Family("UNet", "SD15", UNET | SMALL, 768), _PICTURE)

_ALL = FAMILIES | {
    "UNet": _UNET_FAMILY,
    "Flux Kontext, two pictures": dataclasses.replace(FAMILIES["Flux Kontext"], extras=lambda shapes, noise: {}),
    "Wan, image to video": dataclasses.replace(FAMILIES["Wan 2.2 14B i2v"], sizes=_SAME_FRAMES, cfg=1.0),
    "Wan, long": dataclasses.replace(FAMILIES["Wan"], sizes=(((16, 5, 8, 8),), ((16, 6, 6, 10),))),
    "Wan, causal": dataclasses.replace(OTHERS["Wan causal"], sizes=_SAME_FRAMES, cfg=1.0),
    # For patches that take no odd sizes
    "Qwen-Image, even": dataclasses.replace(FAMILIES["Qwen-Image"], sizes=(((16, 1, 12, 12),), ((16, 1, 10, 16),))),
}
FAMILIES_OF_NODES = {name: case for name, case in _ALL.items() if case.is_known}


# Networks


def given(**inputs: Any) -> Callable[[Any, Shapes], Inputs]:
    return lambda model, shapes: inputs


def patch(net: torch.nn.Module) -> comfy.model_patcher.ModelPatcher:
    return comfy.model_patcher.ModelPatcher(net, load_device=CPU, offload_device=CPU)


def picture(frames: int = 1, height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(4))


@functools.cache
def other() -> Any:
    """A model of the same kind; all weights are smaller, as the difference of two equal norms makes no image."""
    model = _UNET_FAMILY.load(seed=5)
    for weight in model.model.parameters():
        weight.data.mul_(0.5)
    return model


def other_unet(**inputs: Any) -> Callable[[Any, Shapes], Inputs]:
    """The model and the other, to be merged."""
    return lambda model, shapes: {"model1": model, "model2": other()} | inputs


def uni3c(model: Any, shapes: Shapes) -> Inputs:
    sizes = dict(in_channels=36, conv_out_dim=48, dim=32, ffn_dim=40, num_heads=2, num_layers=4)
    sizes |= dict(time_embed_dim=96, out_proj_dim=96, add_channels=7, mid_channels=16)
    net = network(nodes_model_patch.comfy.ldm.wan.uni3c.WanUni3CControlnet, **sizes)
    video = {"vae": wan_vae(), "render_video": picture(9)}
    return video | {"model_patch": patch(net), "strength": 0.8, "start_percent": 0.0, "end_percent": 0.6}


def diffsynth(model: Any, shapes: Shapes) -> Inputs:
    """A ControlNet for Qwen-Image that comes as a patch: it runs between the model's blocks."""
    net = network(nodes_model_patch.QwenImageBlockWiseControlNet, num_layers=6, dim=64)
    return {"model_patch": patch(net), "vae": wan_vae(), "image": picture(1, 96, 96), "strength": 0.8, "mask": None}


def gligen(shapes: Shapes) -> Inputs:
    """An object's place in the picture, as core's GLIGENTextBoxApply puts it in the conditioning."""
    widths = (32, 64, 64, 64, 64, 32, 32)
    modules = [comfy.gligen.GatedSelfAttentionDense(width, 768, 4, width // 4) for width in widths]
    net = comfy.gligen.Gligen(modules, comfy.gligen.PositionNet(768, 768), 768).eval().requires_grad_(False)
    randomize(net, 3)
    for module in modules:
        module.alpha_attn.fill_(0.7)
        module.alpha_dense.fill_(0.4)
    return {"gligen": ("position", patch(net), [(Noise(4)(1, 768), 8, 8, 2, 2)])}


def two_pictures(shapes: Shapes) -> Inputs:
    noise = Noise(5)
    return {"reference_latents": [noise(1, 16, 10, 6), noise(1, 16, 7, 12)], "reference_latents_method": "offset"}


def block_by_block(case: TinyFamily, model: Any, size: int) -> torch.Tensor:
    """A video made frame by frame, each with what the blocks keep of the frames before."""
    shapes = case.sizes[size]
    latent = torch.zeros(1, *shapes[0])
    conds = [case.family.conditioning(case.tokens[0], seed) for seed in (1, 2)]
    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": 1})
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 4)
    noise = comfy.sample.prepare_noise(latent, 0)
    how = {"disable_pbar": True, "seed": 0}
    with torch.inference_mode():
        return comfy.sample.sample_custom(model, noise, case.cfg, sampler, sigmas, *conds, latent, **how).flatten()


# Rows

WINDOWS = dict(
    **dict(context_length=3, context_overlap=1, context_schedule="standard_static", context_stride=1),
    **dict(closed_loop=False, fuse_method="pyramid", dim=0, freenoise=False),
)
EAGER = ("patched",)


def on(family: str, node: str, **inputs: Any) -> Row:
    """A row whose inputs are plain values, beside whatever else a `Row` has."""
    how = {field.name: inputs.pop(field.name) for field in dataclasses.fields(Row) if field.name in inputs}
    return Row(family, node, given(**inputs), **how)


unet = functools.partial(on, "UNet")


def _rows() -> dict[str, Row]:
    layers = dict(double_layers="1", single_layers="1", scale=2.0, rescaling_scale=0.2)
    return {
        "PAG": unet("nodes_pag.PerturbedAttentionGuidance", scale=3.0),
        "SLG": on("Flux", "nodes_slg.SkipLayerGuidanceDiT", **layers, start_percent=0.0, end_percent=0.6),
        "ToMe": unet("nodes_tomesd.TomePatchModel", eager=EAGER, ratio=0.3),
        "downscale": unet(
            "nodes_model_downscale.PatchModelAddDownscale",
            **dict(block_number=1, downscale_factor=2.0, downscale_after_skip=True, downscale_method="bicubic"),
            **dict(upscale_method="bicubic", start_percent=0.0, end_percent=0.6),
        ),
        # Model patches, which call networks of their own between the model's blocks
        "Uni3C": Row("Wan, image to video", "nodes_model_patch.WanUni3CControlnetApply", uni3c),
        "Qwen-Image DiffSynth": Row("Qwen-Image, even", "nodes_model_patch.QwenImageDiffsynthControlnet", diffsynth),
        # In the conditioning
        "GLIGEN": Row("UNet", extras=gligen, eager=EAGER),
        "two pictures": Row("Flux Kontext, two pictures", extras=two_pictures),
        # Weights, and noise levels
        "merge": Row("UNet", "nodes_model_merging.ModelMergeSimple", other_unet(ratio=0.3)),
        "sampling, LCM": unet("nodes_model_advanced.ModelSamplingDiscrete", sampling="lcm", zsnr=False),
        # Windows, a video that is made frame by frame, and another compiler
        "windows": unet("nodes_context_windows.ContextWindowsManualNode", batch=5, changes=False, **WINDOWS),
        "windows, Wan": on(
            "Wan, long",
            "nodes_context_windows.WanContextWindowsManualNode",
            **WINDOWS | {"context_length": 9, "context_overlap": 4},
        ),
        "causal Wan": Row(
            "Wan, causal",
            "nodes_ar_video.ARVideoI2V",
            lambda model, shapes: dict(
                **dict(vae=wan_vae(), start_image=picture(), width=shapes[0][-1] * 8, height=shapes[0][-2] * 8),
                **dict(length=9, batch_size=1),
            ),
            eager=("changes_list",),
            sample=block_by_block,
        ),
        "core's compile node": unet(
            "nodes_torch_compile.TorchCompileModel",
            changes=False,
            compiles=True,
            backend="eager",
            eager=("compiled_around",),
        ),
    }


ROWS = {name: row for name, row in _rows().items() if row.is_known}

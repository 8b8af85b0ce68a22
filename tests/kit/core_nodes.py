"""Every node of ComfyUI's core that returns a MODEL, and how it is tried: on a tiny model of a family that it is for.

Imported by tests that have put a ComfyUI tree on the path. Nodes and families that this core lacks are left out of
`ROWS`; `nodes_of_core` reads from the source which there are.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.gligen
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.samplers
import folder_paths
import torch
from comfy_extras import nodes_model_patch

import nodes
from kit.controls import network, taesd, wan_vae
from kit.core_families import OTHERS
from kit.families import DITS, FAMILIES, Shapes, TinyFamily
from kit.other_nodes import VIDEO, caller, find
from kit.tiny_models import UNET, Family, conditioning, lora, randomize
from kit.zoo import RADIANCE, Noise

CPU = torch.device("cpu")

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A node, or what one puts in the conditioning, on a model.

    node: module and class, as `nodes_pag.PerturbedAttentionGuidance`; "" for what is in the conditioning alone.
    inputs: of the node beside the model, from the model and the shapes of the latents. extras: for the conditioning.
    eager: codes of the reasons why blocks run uncompiled. full: how the reason begins why DeepCache skips nothing.
    changes: whether the image must be another than without the node. compiles: whether the node does.
    sample: in place of the family's own.
    """

    family: str
    node: str = ""
    inputs: Callable[[Any, Shapes], Inputs] = lambda model, shapes: {}
    extras: Callable[[Shapes], Inputs] = lambda shapes: {}
    eager: tuple[str, ...] = ()
    full: str = ""
    changes: bool = True
    compiles: bool = False
    batch: int = 1
    steps: int = 4
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
        parts = case.sample(model, size, batch=self.batch, steps=self.steps, **extras)
        return torch.cat([part.flatten() for part in parts])


def nodes_of_core() -> list[str]:
    """All that return a MODEL, by core's source."""
    root = Path(nodes.__file__).parent
    return [name for path in (root / "nodes.py", *sorted((root / "comfy_extras").glob("*.py"))) for name in _of(path)]


def _of(path: Path) -> list[str]:
    classes = [part for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(part, ast.ClassDef)]
    found: dict[str, None] = {}
    for cls in classes:
        bases = [base.id for base in cls.bases if isinstance(base, ast.Name)]
        if any(map(_returns_model, ast.walk(cls))) or any(base in found for base in bases):
            found[cls.name] = None
    names = {f"{path.stem}.{name}": find(f"{path.stem}.{name}") for name in found}
    return [name for name, cls in names.items() if hasattr(cls, "execute") or hasattr(cls, "FUNCTION")]


def _returns_model(part: ast.AST) -> bool:
    if isinstance(part, ast.Assign) and getattr(part.targets[0], "id", "") == "RETURN_TYPES":
        return "MODEL" in [getattr(element, "value", None) for element in getattr(part.value, "elts", [])]
    return isinstance(part, ast.Call) and ast.unparse(part.func).endswith(".Model.Output")


# Families


def ramp(shapes: Shapes) -> torch.Tensor:
    """A noise mask from 0 at the left to 1 at the right."""
    *_, height, width = shapes[0]
    return torch.linspace(0, 1, width * 8).expand(1, 1, height * 8, -1).clone()


_UNET = UNET | {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1] * 4,
}
_SUPIR_XL = UNET | {
    "num_res_blocks": [2, 2, 2],
    "model_channels": 64,
    "transformer_depth": [0, 0, 1, 1, 1, 1],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "context_dim": 2048,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
    "num_heads": -1,
    "num_head_channels": 64,
    "use_linear_in_transformer": True,
}
_TRIPO = dict(
    **dict(q_token_length=48, model_channels=64, num_head_channels=32, cond_channels=48, num_blocks=5),
    **dict(num_refiner_blocks=1, cond2_channels=16),
)
_PICTURE = ((4, 16, 16),), ((4, 12, 20),)
_WAN = DITS["Wan"].family.config
_SAME_FRAMES = ((16, 3, 8, 8),), ((16, 3, 6, 10),)
_EVEN_FRAME = ((16, 1, 12, 12),), ((16, 1, 10, 16),)
"""For patches that take no odd sizes."""
_LONG = ((16, 5, 8, 8),), ((16, 6, 6, 10),)


def family(model_class: str, config: dict, context: int = 48, pooled: int | None = None) -> Family:
    return Family(model_class, model_class, config, context, pooled)


def first_frame(shapes: Shapes, noise: Noise) -> Inputs:
    """What an image-to-video model is given beside its latents."""
    return {"concat_latent_image": noise(1, *shapes[0]), "concat_mask": noise(1, 1, *shapes[0][1:])}


_UNET_FAMILY = TinyFamily(Family("UNet", "SD15", _UNET, 768), _PICTURE)

_ALL = FAMILIES | {
    "UNet": _UNET_FAMILY,
    "Lumina2, no mask": dataclasses.replace(FAMILIES["Lumina2"], extras=lambda shapes, noise: {}),
    "UNet, masked": dataclasses.replace(_UNET_FAMILY, mask=ramp),
    "SVD": TinyFamily(
        family("SVD_img2vid", UNET | VIDEO, 1024, 1280),
        _PICTURE,
        lambda shapes, noise: {"concat_latent_image": noise(1, *shapes[0])},
        tokens=(1, 1),
    ),
    "SDXL": TinyFamily(family("SDXL", _SUPIR_XL, 2048, 1280), _PICTURE),
    "Stable Cascade": OTHERS["Stable Cascade C"],
    "Chroma Radiance": TinyFamily(family("ChromaRadiance", RADIANCE, pooled=32), (((3, 96, 96),), ((3, 64, 128),))),
    "Flux, no CFG": dataclasses.replace(FAMILIES["Flux"], cfg=1.0),
    "Flux Kontext, two pictures": dataclasses.replace(FAMILIES["Flux Kontext"], extras=lambda shapes, noise: {}),
    "Wan, 160 wide": TinyFamily(
        family("WAN21_T2V", _WAN | {"in_dim": 36, "out_dim": 16, "dim": 160}), _SAME_FRAMES, first_frame, cfg=1.0
    ),
    "Wan, image to video": dataclasses.replace(FAMILIES["Wan 2.2 14B i2v"], sizes=_SAME_FRAMES, cfg=1.0),
    "Wan, long": dataclasses.replace(FAMILIES["Wan"], sizes=_LONG),
    "Qwen-Image, even": dataclasses.replace(FAMILIES["Qwen-Image"], sizes=_EVEN_FRAME),
    "Z-Image, even": dataclasses.replace(
        FAMILIES["Z-Image"],
        sizes=(((16, 12, 12),), ((16, 10, 16),)),
        family=family("ZImage", DITS["Z-Image"].family.config | dict(n_layers=7, n_refiner_layers=2)),
    ),
    "Anima, even": dataclasses.replace(FAMILIES["Anima"], sizes=_EVEN_FRAME, needs="comfy.ldm.anima.lllite"),
    "LTXV, long": dataclasses.replace(FAMILIES["LTXV"], sizes=_LONG, needs="comfy.ldm.lightricks.av_model"),
    "Wan Animate 2": OTHERS["Wan Animate 2"],
    "Wan, causal": dataclasses.replace(OTHERS["Wan causal"], sizes=_SAME_FRAMES, cfg=1.0),
    "HiDream-O1": dataclasses.replace(OTHERS["HiDream-O1"], sizes=(((3, 96, 96),), ((3, 96, 128),))),
    "TripoSplat": TinyFamily(
        family("TripoSplat", _TRIPO),
        (((48, 16), (1, 5)), ((48, 16), (1, 5))),
        lambda shapes, noise: {"reference_latents": [noise(1, 16, 4, 4)]},
        needs="comfy.ldm.triposplat.model",
    ),
}
FAMILIES_OF_NODES = {name: case for name, case in _ALL.items() if case.is_known}


# Networks and files


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


def from_file(folder: str, name: str, make: Callable[[Any], Any], **inputs: Any) -> Callable[[Any, Shapes], Inputs]:
    """The name of a file that core's loader finds. make: its content, from the model."""

    def inputs_of(model: Any, shapes: Shapes) -> Inputs:
        path = Path(folder_paths.get_temp_directory()) / folder / "core_nodes.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make(model), path)
        folder_paths.add_model_folder_path(folder, str(path.parent))
        return {name: path.name, "clip": None} | inputs

    return inputs_of


def hypernetwork(model: Any) -> dict:
    noise = Noise(3)

    def layers(width: int) -> dict:
        return {"0.weight": noise(width, width) / width, "0.bias": noise(width) * 0.02}

    return {width: [layers(width), layers(width)] for width in (32, 64, 768)}


def uso(model: Any, shapes: Shapes) -> Inputs:
    sizes = dict(siglip_token_nums=9, style_token_nums=4, siglip_token_dims=24, hidden_size=64)
    noise = Noise(2)
    vision = SimpleNamespace(all_hidden_states=noise(1, 22, 9, 24), penultimate_hidden_states=noise(1, 9, 24))
    net = network(nodes_model_patch.SigLIPMultiFeatProjModel, **sizes)
    return {"model_patch": patch(net), "clip_vision_output": vision}


def uni3c(model: Any, shapes: Shapes) -> Inputs:
    sizes = dict(in_channels=36, conv_out_dim=48, dim=32, ffn_dim=40, num_heads=2, num_layers=4)
    sizes |= dict(time_embed_dim=96, out_proj_dim=96, add_channels=7, mid_channels=16)
    net = network(nodes_model_patch.comfy.ldm.wan.uni3c.WanUni3CControlnet, **sizes)
    video = {"vae": wan_vae(), "render_video": picture(9)}
    return video | {"model_patch": patch(net), "strength": 0.8, "start_percent": 0.0, "end_percent": 0.6}


def talk(model: Any, shapes: Shapes) -> Inputs:
    sizes = dict(audio_window=5, intermediate_dim=16, in_dim=160, out_dim=24, context_tokens=4, num_layers=6)
    net = network(nodes_model_patch.MultiTalkModelPatch, **sizes)
    _, frames, height, width = shapes[0]
    noise = Noise(6)
    audio = {"encoded_audio_all_layers": [noise(1, 24, 768) for _ in range(13)]}
    return {
        **{"mode": {"mode": "single_speaker"}, "model_patch": patch(net), "vae": wan_vae(), "audio_scale": 0.8},
        **{"positive": conditioning(), "negative": conditioning(), "audio_encoder_output_1": audio},
        **{"width": width * 8, "height": height * 8, "length": frames * 4 - 3, "start_image": picture(5)},
        "motion_frame_count": 5,
    }


def llllite(model: Any, shapes: Shapes) -> Inputs:
    """As core reads it from a file: the layout is that of its tensors."""
    empty = torch.empty
    places = ("self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1")
    names = [f"lllite_dit_blocks_{block}_{place}" for block in range(4) for place in places]
    layout = {f"{name}.down.weight": empty(8, 96) for name in names}
    layout |= {f"{name}.cond_to_film.weight": empty(16, 16) for name in names}
    first = "lllite_conditioning1."
    layout |= {f"{first}conv1.weight": empty(8, 3, 4, 4), f"{first}conv3.weight": empty(16, 8, 4, 4)}
    layout |= {f"{first}proj.weight": empty(16, 16, 1, 1)}
    cls = nodes_model_patch.comfy.ldm.anima.lllite.AnimaLLLite
    net = network(cls, state_dict=layout, metadata={})
    return {"model_patch": patch(net), "image": picture(), "strength": 0.9, "start_percent": 0.0, "end_percent": 0.7}


def diffsynth(mask: bool = False, **config: Any) -> Callable[[Any, Shapes], Inputs]:
    """A ControlNet for Qwen-Image that comes as a patch: it runs between the model's blocks."""

    def inputs(model: Any, shapes: Shapes) -> Inputs:
        net = network(nodes_model_patch.QwenImageBlockWiseControlNet, num_layers=6, dim=64, **config)
        return {"model_patch": patch(net), "vae": wan_vae()} | control_picture(mask)

    return inputs


def z_image_fun(mask: bool = False, **config: Any) -> Callable[[Any, Shapes], Inputs]:
    """The inputs of a patch with Z-Image's control network."""

    def inputs(model: Any, shapes: Shapes) -> Inputs:
        cls = nodes_model_patch.comfy.ldm.lumina.controlnet.ZImage_Control
        net = network(cls, dim=288, n_heads=3, n_kv_heads=3, **config)
        return {"model_patch": patch(net), "vae": taesd(16)} | control_picture(mask)

    return inputs


def control_picture(is_masked: bool) -> Inputs:
    mask = torch.zeros(1, 96, 96)
    mask[:, 20:70, 30:80] = 1
    return {"image": picture(1, 96, 96), "strength": 0.8, "mask": mask if is_masked else None}


def supir(model: Any, shapes: Shapes) -> Inputs:
    """core's network, 64 channels wide where SDXL's has 320."""
    parts, made = nodes_model_patch.comfy.ldm.supir.supir_modules, {"operations": comfy.ops.disable_weight_init}
    net = torch.nn.Module()
    net.control_model = parts.GLVControl(model_channels=64, transformer_depth=(1, 1, 1), **made)
    widths, joined = [64] * 4 + [128] * 3 + [256] * 3, [64] * 2 + [128] * 3 + [256] * 4 + [0]
    adapters = [parts.ZeroSFT(width, width, more, **made) for width, more in zip(widths, joined, strict=True)]
    net.project_modules = torch.nn.ModuleList(adapters)
    for place in (6, 3):
        net.project_modules.insert(place, parts.ZeroCrossAttn(widths[place], joined[place], **made))
    randomize(net.eval().requires_grad_(False), 3)
    return {
        **{"model_patch": patch(net), "vae": taesd(4), "image": picture(1, shapes[0][1] * 8, shapes[0][2] * 8)},
        **{"strength_start": 1.0, "strength_end": 0.8, "restore_cfg": 4.0, "restore_cfg_s_tmin": 0.05},
    }


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


class Sound:
    """A VAE for sound, as far as the node asks."""

    audio_sample_rate = 16000

    @staticmethod
    def encode(waveform: torch.Tensor) -> torch.Tensor:
        return Noise(7)(1, 8, 4, 16)


def voice(model: Any, shapes: Shapes) -> Inputs:
    sound = {"sample_rate": 16000, "waveform": torch.zeros(1, 1, 16000)}
    return {"positive": [], "negative": [], "reference_audio": sound, "audio_vae": Sound()} | dict(
        identity_guidance_scale=3.0, start_percent=0.0, end_percent=0.6
    )


def heard(shapes: Shapes) -> Inputs:
    return {"ref_audio": {"tokens": Noise(7)(1, 4, 128)}}


def splats(model: Any, shapes: Shapes) -> Inputs:
    """Its VAE makes a preview after each step; where it cannot, the node says so and goes on."""
    decoder = SimpleNamespace(gaussians_per_point=32, gs=SimpleNamespace(model_channels=64))
    vae = SimpleNamespace(first_stage_model=decoder, vae_dtype=torch.float32, patcher=model)
    return {"vae": vae, "octree_level": 3, "num_gaussians": 64, "yaw": 0.0, "pitch": 0.0, "point_size": 1.0}


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
HALF = dict(start_percent=0.0, end_percent=0.6)
EAGER = ("patched",)
LOADERS = {
    *("nodes.CheckpointLoader", "nodes.CheckpointLoaderSimple", "nodes.DiffusersLoader", "nodes.UNETLoader"),
    *("nodes.unCLIPCheckpointLoader", "nodes_video_model.ImageOnlyCheckpointLoader"),
}
"""They give a model as it is in its file."""

NO_NODES = {"nodes_train.TrainLoraNode", "nodes_model_advanced.ModelSamplingDiscreteDistilled"}
"""What trains, and classes of sampling."""


def on(family: str, node: str, **inputs: Any) -> Row:
    """A row whose inputs are plain values, beside whatever else a `Row` has."""
    how = {field.name: inputs.pop(field.name) for field in dataclasses.fields(Row) if field.name in inputs}
    return Row(family, node, given(**inputs), **how)


unet = functools.partial(on, "UNet")


def _rows() -> dict[str, Row]:
    qwen_patch, z_patch = "nodes_model_patch.QwenImageDiffsynthControlnet", "nodes_model_patch.ZImageFunControlnet"
    inpaint = dict(additional_in_dim=17, refiner_control=True)
    merging, sampling = "nodes_model_merging.", "nodes_model_advanced."
    file = lambda model: lora(model, 5)  # noqa: E731
    loras = dict(strength_model=0.6, strength_clip=0.0)
    multiply = dict(q=1.1, k=0.9, v=1.2, out=0.8)
    free_u = dict(b1=1.3, b2=1.4, s1=0.9, s2=0.2)
    layers = dict(double_layers="1", single_layers="1", scale=2.0, rescaling_scale=0.2, **HALF)
    blocks = dict(ratio=0.4, **{name: 0.5 for name in ("time_embed.", "input_blocks.1.", "out.")})
    return {
        # Guidance, on a UNet where it is for any model
        "APG": unet("nodes_apg.APG", eta=0.8, norm_threshold=5.0, momentum=0.5),
        "CFG Zero*": unet("nodes_cfg.CFGZeroStar"),
        "CFG norm": unet("nodes_cfg.CFGNorm", strength=0.9),
        "CFG override": unet("nodes_custom_sampler.CFGOverride", cfg=1.0, start_percent=0.5, end_percent=1.0),
        "epsilon scaling": unet("nodes_eps.EpsilonScaling", scaling_factor=1.05),
        "temporal score rescaling": unet("nodes_eps.TemporalScoreRescaling", tsr_k=0.9, tsr_sigma=1.0),
        "FreSca": unet("nodes_fresca.FreSca", scale_low=1.1, scale_high=1.3, freq_cutoff=4),
        "tonemap": unet("nodes_latent.LatentApplyOperationCFG", operation=lambda latent, **others: latent * 0.8),
        "Mahiro": unet("nodes_mahiro.Mahiro"),
        "NAG": unet("nodes_nag.NAGuidance", eager=EAGER, nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
        "NAG, Flux": on("Flux", "nodes_nag.NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5, eager=EAGER),
        "PAG": unet("nodes_pag.PerturbedAttentionGuidance", scale=3.0),
        "PerpNeg": on("UNet", "nodes_perpneg.PerpNeg", empty_conditioning=conditioning(seed=6), neg_scale=0.8),
        "RenormCFG": on("Lumina2, no mask", "nodes_lumina2.RenormCFG", cfg_trunc=100.0, renorm_cfg=1.0),
        "RescaleCFG": unet(sampling + "RescaleCFG", multiplier=0.7),
        "SAG": unet("nodes_sag.SelfAttentionGuidance", scale=0.5, blur_sigma=2.0),
        "SLG, SD3": on(
            "SD3", "nodes_sd3.SkipLayerGuidanceSD3", layers="1", scale=3.0, start_percent=0.0, end_percent=0.6
        ),
        "SLG, Flux": on("Flux", "nodes_slg.SkipLayerGuidanceDiT", **layers),
        "SLG simple, Wan": on("Wan", "nodes_slg.SkipLayerGuidanceDiTSimple", double_layers="2", **HALF),
        "STG": on("LTXV", "nodes_lt.LTXVSpatioTemporalGuidance", blocks="2", scale=1.0, **HALF),
        "modality guidance": on("LTX 2", "nodes_lt.LTXVModalityGuidance", modality_scale=3.0, **HALF),
        "TCFG": unet("nodes_tcfg.TCFG"),
        "linear CFG over frames": unet("nodes_video_model.VideoLinearCFGGuidance", batch=3, min_cfg=1.0),
        "triangle CFG over frames": on("SVD", "nodes_video_model.VideoTriangleCFGGuidance", min_cfg=1.0, batch=3),
        # Attention and what is between blocks
        "FreeU": unet("nodes_freelunch.FreeU", **free_u),
        "FreeU V2": unet("nodes_freelunch.FreeU_V2", **free_u),
        "HyperTile": unet(
            "nodes_hypertile.HyperTile", eager=EAGER, tile_size=64, swap_size=2, max_depth=1, scale_depth=False
        ),
        "ToMe": unet("nodes_tomesd.TomePatchModel", eager=EAGER, ratio=0.3),
        "downscale": unet(
            "nodes_model_downscale.PatchModelAddDownscale",
            **dict(block_number=1, downscale_factor=2.0, downscale_after_skip=True, downscale_method="bicubic"),
            **dict(upscale_method="bicubic", start_percent=0.0, end_percent=0.6),
        ),
        "hypernetwork": Row(
            "UNet",
            "nodes_hypernetwork.HypernetworkLoader",
            from_file("hypernetworks", "hypernetwork_name", hypernetwork, strength=0.7),
            eager=EAGER,
        ),
        "attention backend": unet(
            sampling + "ModelAttentionBackend",
            changes=False,
            attention="pytorch attention",
        ),
        "rotary scale": on(
            "Flux", "nodes_rope.ScaleROPE", scale_x=1.5, shift_x=0.5, scale_y=1.2, shift_y=0.0, scale_t=1.0, shift_t=0.0
        ),
        "Flux.2 KV cache": Row("Flux.2 Klein", "nodes_flux.FluxKVCache", eager=EAGER),
        "Radiance options": on(
            "Chroma Radiance",
            "nodes_chroma_radiance.ChromaRadianceOptions",
            preserve_wrapper=True,
            start_sigma=1.0,
            end_sigma=0.0,
            nerf_tile_size=7,
            force_sequential_txt_ids=True,
            changes=False,
            full="another node (comfy_extras) makes the model's calls",
        ),
        "seam smoothing": on(
            "HiDream-O1",
            "nodes_hidream_o1.HiDreamO1PatchSeamSmoothing",
            start_percent=0.4,
            end_percent=1.0,
            pattern="symmetric",
            passes="2",
            blend="average",
            strength=1.0,
        ),
        # Model patches
        "USO": Row("Flux, no CFG", "nodes_model_patch.USOStyleReference", uso),
        "Uni3C": Row("Wan, image to video", "nodes_model_patch.WanUni3CControlnetApply", uni3c),
        "InfiniteTalk": Row("Wan, 160 wide", "nodes_wan.WanInfiniteTalkToVideo", talk, eager=EAGER),
        "Anima LLLite": Row("Anima, even", "nodes_model_patch.AnimaLLLiteApply", llllite, eager=EAGER),
        # Between blocks, as core's loader configures them
        "Qwen-Image DiffSynth": Row("Qwen-Image, even", qwen_patch, diffsynth()),
        "Qwen-Image DiffSynth inpaint": Row("Qwen-Image, even", qwen_patch, diffsynth(True, additional_in_dim=4)),
        "Z-Image Fun": Row("Z-Image, even", z_patch, z_image_fun()),
        "Z-Image Fun 2.0": Row("Z-Image, even", z_patch, z_image_fun(n_control_layers=15, **inpaint)),
        "Z-Image Fun 2.0 inpaint": Row("Z-Image, even", z_patch, z_image_fun(True, n_control_layers=3, **inpaint)),
        "SUPIR": Row("SDXL", "nodes_model_patch.SUPIRApply", supir),
        "Wan Animate 2, cached": on(
            "Wan Animate 2",
            "nodes_wan.WanAnimate2Cache",
            device="cpu",
            dtype="default",
            eager=("no_block_runs",),
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
        "reference voice": Row("LTX 2", "nodes_lt.LTXVReferenceAudio", voice, heard),
        "splat preview": Row("TripoSplat", "nodes_triposplat.TripoSplatSamplingPreview", splats, changes=False),
        # In the conditioning
        "GLIGEN": Row("UNet", extras=gligen, eager=EAGER),
        "two pictures": Row("Flux Kontext, two pictures", extras=two_pictures),
        # Weights
        "self-attention multiplied": unet("nodes_attention_multiply.UNetSelfAttentionMultiply", **multiply),
        "cross-attention multiplied": unet("nodes_attention_multiply.UNetCrossAttentionMultiply", **multiply),
        "temporal attention multiplied": on(
            "SVD",
            "nodes_attention_multiply.UNetTemporalAttentionMultiply",
            self_structural=1.1,
            self_temporal=0.8,
            cross_structural=0.9,
            cross_temporal=1.2,
            batch=3,
        ),
        "LoRA": Row("UNet", "nodes.LoraLoader", from_file("loras", "lora_name", file, **loras)),
        "LoRA, model only": Row("Wan", "nodes.LoraLoaderModelOnly", from_file("loras", "lora_name", file, **loras)),
        "LoRA bypassed": Row(
            "UNet",
            "nodes_lora_debug.LoraLoaderBypass",
            from_file("loras", "lora_name", file, **loras),
        ),
        "LoRA bypassed, model only": Row(
            "Wan",
            "nodes_lora_debug.LoraLoaderBypassModelOnly",
            from_file("loras", "lora_name", file, **loras),
        ),
        "trained LoRA": Row(
            "UNet", "nodes_train.LoraModelLoader", lambda model, shapes: {"lora": file(model), "strength_model": 0.6}
        ),
        "merge": Row("UNet", merging + "ModelMergeSimple", other_unet(ratio=0.3)),
        "subtract": Row("UNet", merging + "ModelSubtract", other_unet(multiplier=0.8)),
        "add": Row("UNet", merging + "ModelAdd", other_unet()),
        "merge blocks": Row("UNet", merging + "ModelMergeBlocks", other_unet(**blocks)),
        # Noise levels and types
        "sampling, discrete": unet(sampling + "ModelSamplingDiscrete", sampling="v_prediction", zsnr=True),
        "sampling, LCM": unet(sampling + "ModelSamplingDiscrete", sampling="lcm", zsnr=False),
        "sampling, EDM": unet(sampling + "ModelSamplingContinuousEDM", sampling="eps", sigma_max=80.0, sigma_min=0.01),
        "sampling, V": unet(
            sampling + "ModelSamplingContinuousV", sampling="v_prediction", sigma_max=80.0, sigma_min=0.03
        ),
        "sampling, Cascade": on("Stable Cascade", sampling + "ModelSamplingStableCascade", shift=1.5),
        "sampling, SD3": on("SD3", sampling + "ModelSamplingSD3", shift=2.0),
        "sampling, AuraFlow": on("Z-Image", sampling + "ModelSamplingAuraFlow", shift=1.7),
        "sampling, Flux": on(
            "Flux Kontext", sampling + "ModelSamplingFlux", max_shift=2.0, base_shift=0.7, width=96, height=96
        ),
        "sampling, LTXV": on("LTXV", "nodes_lt.ModelSamplingLTXV", max_shift=1.5, base_shift=0.8),
        "sampling, MiniMax": on("MiniMax H3", "nodes_minimax_h3.MiniMaxH3SigmaShift", shift_video=5.0, shift_audio=2.0),
        "noise scale": on("SD3", sampling + "ModelNoiseScale", noise_scale=1.3),
        "compute type": unet(sampling + "ModelComputeDtype", dtype="bf16"),
        "differential diffusion": on(
            "UNet, masked", "nodes_differential_diffusion.DifferentialDiffusion", strength=0.8
        ),
        # Windows, caches, devices, compilers
        "windows": unet("nodes_context_windows.ContextWindowsManualNode", batch=5, changes=False, **WINDOWS),
        "windows, Wan": on(
            "Wan, long",
            "nodes_context_windows.WanContextWindowsManualNode",
            **WINDOWS | {"context_length": 9, "context_overlap": 4},
        ),
        "windows, LTXV": on(
            "LTXV, long",
            "nodes_context_windows.LTXVContextWindowsNode",
            **WINDOWS | {"context_length": 17, "context_overlap": 8},
        ),
        "EasyCache": unet(
            "nodes_easycache.EasyCacheNode",
            steps=10,
            **dict(reuse_threshold=0.2, start_percent=0.1, end_percent=0.95, verbose=False),
            full="EasyCache or LazyCache skips steps of its own",
        ),
        "LazyCache": unet(
            "nodes_easycache.LazyCacheNode",
            steps=10,
            **dict(reuse_threshold=0.2, start_percent=0.1, end_percent=0.95, verbose=False),
            full="EasyCache or LazyCache skips steps of its own",
        ),
        "core's compile node": unet(
            "nodes_torch_compile.TorchCompileModel",
            changes=False,
            compiles=True,
            backend="eager",
            eager=("compiled_around",),
        ),
        "several GPUs": unet("nodes_multigpu.MultiGPUCFGSplitNode", changes=False, max_gpus=2),
        "device": unet("nodes_multigpu.SelectModelDeviceNode", changes=False, device="cpu"),
        "block swap": Row("Wan", "nodes_nop.wanBlockSwap", changes=False),
    }


ALL_ROWS = _rows()
ROWS = {name: row for name, row in ALL_ROWS.items() if row.is_known}
if "comfy_force_cast_weights" not in inspect.getsource(comfy.model_patcher):
    del ROWS["compute type"]  # weights that are cast look like those of a model that is loaded in part: run uncompiled

"""Tiny instances of every sort of control object of ComfyUI's core, and realistic calls of them.

`CONTROLS` maps a name to a `TinyControl`. Imported by tests that have put a ComfyUI tree on the path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.cldm.cldm
import comfy.cldm.dit_embedder
import comfy.cldm.mmdit
import comfy.controlnet
import comfy.latent_formats
import comfy.ldm.flux.controlnet
import comfy.ldm.hydit.controlnet
import comfy.ldm.qwen_image.controlnet
import comfy.ldm.wan.vae
import comfy.ops
import comfy.sd
import comfy.taesd.taesd
import torch
from comfy.t2i_adapter.adapter import Adapter, Adapter_light

from kit import tiny_models
from kit.families import CONTROLLED, DITS
from kit.zoo import Noise, Size

CPU = torch.device("cpu")
SMALL = {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 0, 0],
    "transformer_depth_middle": -1,
}
"""A UNet of two levels; three kinds of blocks in its ControlNet."""


@dataclass(frozen=True)
class TinyControl:
    """A sort of control object.

    build: one with random weights, as core's loader gives it. model: the ModelPatcher it is for. inputs: from a
        size to the noisy latent and the conditioning that `get_control` is given. vae: what encodes its hint.
    kinds: of blocks, that are found in it. types: of control, for a union. mask: whether it takes one.
    """

    build: Callable[[], Any]
    model: Callable[[], Any]
    inputs: Callable[[Size, Noise], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    kinds: int
    vae: Callable[[], Any] | None = None
    types: tuple[int, ...] | None = None
    mask: bool = False

    def hinted(self, control: Any, hint: torch.Tensor, strength: float = 0.8, percent: tuple = (0.0, 1.0)) -> Any:
        """A copy of the control with a hint [B, 3, H, W], as core's nodes make it."""
        if self.types is not None:
            control = control.copy()
            control.set_extra_arg("control_type", list(self.types))
        concat = [torch.ones(1, 1, *hint.shape[2:])] if self.mask else []
        vae = self.vae() if self.vae else None
        return control.copy().set_cond_hint(hint, strength, percent, vae=vae, extra_concat=concat)


CONTROLS: dict[str, TinyControl] = {}


def network(cls: type, seed: int = 3, dtype: torch.dtype = torch.float32, **config: Any) -> torch.nn.Module:
    net = cls(**{"operations": comfy.ops.disable_weight_init, **config}, dtype=dtype, device=CPU).eval()
    tiny_models.randomize(net, seed)
    return net.requires_grad_(False)


def random_weights(net: torch.nn.Module, seed: int = 5) -> dict[str, torch.Tensor]:
    tiny_models.randomize(net, seed)
    return net.state_dict()


def unet_control(seed: int = 3, operations: Any = comfy.ops.disable_weight_init, dtype=torch.float32, **changes: Any):
    """core's ControlNet over a network of SD1.5's layout, as `tiny_models.unet` has it."""
    config = {**tiny_models.unet_config(**changes), "hint_channels": 3}
    del config["out_channels"]
    net = network(comfy.cldm.cldm.ControlNet, seed, dtype, operations=operations, **config)
    cast = torch.float32 if operations is comfy.ops.manual_cast else None
    return comfy.controlnet.ControlNet(net, load_device=CPU, manual_cast_dtype=cast)


def watched(control: Any) -> Any:
    """The ControlNet, its copies counting their network's calls in `control.calls`."""
    control.calls = calls = []
    control.control_model.register_forward_hook(lambda *args: calls.append(None))
    return control


def control_net(seed: int = 3, **changes: Any) -> Any:
    return watched(unet_control(seed, **changes))


def control_lora(rank: int = 4, seed: int = 7, **changes: Any):
    """A Control-LoRA's file for `tiny_models.unet`: hint and output layers whole, the others' differences."""
    net = unet_control(seed, **changes).control_model
    generator, file = torch.Generator().manual_seed(seed), {"lora_controlnet": torch.tensor([])}
    for name, weight in net.state_dict().items():
        if name.startswith(("input_hint_block", "zero_convs", "middle_block_out")) or weight.ndim < 2:
            file[name] = weight
        else:
            rest, path = weight[0].numel(), name.removesuffix(".weight")
            file[f"{path}.up"] = torch.randn(len(weight), rank, generator=generator) / rank**0.5
            file[f"{path}.down"] = torch.randn(rank, rest, generator=generator) / (10 * rest**0.5)
    return comfy.controlnet.ControlLora(file)


def adapter(xl: bool = False, seed: int = 5):
    """A T2I-Adapter for 32 channels, by core's loader; it pools as those for SD1.5 and SDXL do."""
    cin = 768 if xl else 192
    net = Adapter(channels=[32, 64, 128, 128], nums_rb=2, cin=cin, ksize=1, sk=True, use_conv=False, xl=xl)
    return comfy.controlnet.load_t2i_adapter(random_weights(net, seed))


def light_adapter():
    net = Adapter_light(cin=192, channels=[320, 640, 1280, 1280], nums_rb=4)
    return comfy.controlnet.load_t2i_adapter(random_weights(net))


@functools.cache
def taesd(channels: int):
    """core's VAE around a tiny autoencoder."""
    return comfy.sd.VAE(sd=random_weights(comfy.taesd.taesd.TAESD(latent_channels=channels)))


@functools.cache
def wan_vae():
    """core's VAE of five dimensions, 8 channels wide."""
    ups = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True]}
    return comfy.sd.VAE(sd=random_weights(comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, **ups)))


@functools.cache
def unet(is_small: bool = False):
    """The UNet that the controls are for, or one of `SMALL` size."""
    return tiny_models.unet(**(SMALL if is_small else {}))


def image(channels: int, context: int, even: bool = False, frames: tuple[int, ...] = (), **others: tuple[int, ...]):
    """A latent of [B, channels, (frames,) H, W], a context of [B, tokens, context] and other tensors of [B, ...].

    even: the network takes no odd sizes, in core neither.
    """

    def inputs(size: Size, noise: Noise):
        height, width = (side + side % 2 * even for side in (size.height, size.width))
        cond = {"c_crossattn": noise(size.batch, size.tokens, context)}
        cond.update({name: noise(size.batch, *shape) for name, shape in others.items()})
        return noise(size.batch, channels, *frames, height, width), cond

    return inputs


def _unets() -> None:
    sd15, small = image(4, 768), functools.partial(unet, True)
    plain = functools.partial(unet_control, **SMALL)
    CONTROLS["ControlNet"] = TinyControl(plain, small, sd15, kinds=3)
    CONTROLS["ControlNet of three levels"] = TinyControl(unet_control, unet, sd15, kinds=5)
    CONTROLS["Control-LoRA"] = TinyControl(functools.partial(control_lora, **SMALL), small, sd15, kinds=3)
    cast = functools.partial(unet_control, dtype=torch.float16, operations=comfy.ops.manual_cast, **SMALL)
    CONTROLS["ControlNet, fp16 cast to fp32"] = TinyControl(cast, small, sd15, kinds=3)
    in_bf16 = functools.partial(unet_control, dtype=torch.bfloat16, **SMALL)
    CONTROLS["ControlNet in bf16"] = TinyControl(in_bf16, small, sd15, kinds=3)
    union = dict(
        model_channels=320,
        num_res_blocks=[1],
        channel_mult=[1],
        transformer_depth=[1],
        transformer_depth_middle=1,
        num_classes="sequential",
        adm_in_channels=32,
        union_controlnet_num_control_type=6,
    )
    build = functools.partial(unet_control, **union)
    CONTROLS["Union"] = TinyControl(build, unet, image(4, 768, y=(32,)), kinds=2, types=(3,))
    CONTROLS["Union that guesses"] = TinyControl(build, unet, image(4, 768, y=(32,)), kinds=2, types=())
    CONTROLS["T2I-Adapter"] = TinyControl(adapter, small, sd15, kinds=4)
    even = image(4, 768, even=True)
    CONTROLS["T2I-Adapter XL"] = TinyControl(functools.partial(adapter, xl=True), small, even, kinds=3)
    CONTROLS["T2I-Adapter light"] = TinyControl(light_adapter, small, sd15, kinds=4)


def _transformers() -> None:
    def control(net: torch.nn.Module, cls: type = comfy.controlnet.ControlNet, **settings: Any):
        return cls(net, load_device=CPU, **settings)

    def flux(latent: bool, **config: Any):
        net = network(comfy.ldm.flux.controlnet.ControlNetFlux, **CONTROLLED.family.config, **config)
        given = {"compression_ratio": 1, "latent_format": comfy.latent_formats.Flux()} if latent else {}
        is_masked = config.get("control_latent_channels") == 17
        return control(net, extra_conds=["y", "guidance"], concat_mask=is_masked, **given)

    odd, even = (image(16, 64, even=is_even, y=(32,), guidance=()) for is_even in (False, True))
    vae = functools.partial(taesd, 16)

    load_flux, load_sd3 = functools.cache(CONTROLLED.load), functools.cache(DITS["SD3"].load)

    def add(name: str, kinds: int, latent: bool = False, types=None, mask=False, **config: Any) -> None:
        build = functools.partial(flux, latent, **config)
        inputs = odd if latent else even
        CONTROLS[name] = TinyControl(build, load_flux, inputs, kinds, vae if latent else None, types, mask)

    add("Flux XLabs", 2)
    add("Flux MistoLine", 2, mistoline=True)
    add("Flux Union", 2, latent=True, types=(2,), latent_input=True, num_union_modes=7, control_latent_channels=16)
    add("Flux inpaint", 2, latent=True, mask=True, latent_input=True, control_latent_channels=17)

    sd3 = {name: value for name, value in DITS["SD3"].family.config.items() if name not in ("num_blocks", "qk_norm")}

    def mmdit():
        net = network(comfy.cldm.mmdit.ControlNet, num_blocks=2, control_latent_channels=16, **sd3)
        return control(net, compression_ratio=1, latent_format=comfy.latent_formats.SD3())

    def sd35(is_double: bool):
        sizes = dict(img_size=None, patch_size=2, in_chans=16, num_layers=2, main_model_double=2)
        heads = dict(attention_head_dim=64, num_attention_heads=2, adm_in_channels=32, double_y_emb=is_double)
        net = network(comfy.cldm.dit_embedder.ControlNetEmbedder, **sizes, **heads)
        given = {"compression_ratio": 1, "latent_format": comfy.latent_formats.SD3()}
        return control(net, comfy.controlnet.ControlNetSD35, preprocess_image=lambda pixels: 1.0 - pixels, **given)

    inputs = image(16, 48, y=(32,))
    CONTROLS["SD3"] = TinyControl(mmdit, load_sd3, inputs, 1, vae)
    CONTROLS["SD3.5"] = TinyControl(functools.partial(sd35, False), load_sd3, inputs, 1, vae)
    CONTROLS["SD3.5, two embeddings"] = TinyControl(functools.partial(sd35, True), load_sd3, inputs, 1, vae)

    def hunyuan():
        sizes = dict(hidden_size=64, num_heads=2, text_states_dim=48, text_states_dim_t5=64)
        net = network(comfy.ldm.hydit.controlnet.HunYuanControlNet, **sizes)
        texts = ["text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5"]
        given = {"compression_ratio": 1, "latent_format": comfy.latent_formats.SDXL()}
        return control(net, extra_conds=texts, **given)

    def texts(size: Size, noise: Noise):  # of fixed lengths: 77 for one encoder, 256 for the other
        masks = {
            "text_embedding_mask": torch.ones(size.batch, 77),
            "text_embedding_mask_t5": torch.ones(size.batch, 256),
        }
        t5 = {"encoder_hidden_states_t5": noise(size.batch, 256, 64)}
        given = {"c_crossattn": noise(size.batch, 77, 48), **masks, **t5}
        return noise(size.batch, 4, size.height, size.width), given

    CONTROLS["HunyuanDiT"] = TinyControl(hunyuan, unet, texts, 1, functools.partial(taesd, 4))


def _qwen() -> None:
    module, inputs = comfy.ldm.qwen_image.controlnet, image(16, 48, frames=(1,))
    config = {**DITS["Qwen-Image"].family.config, "num_layers": 2}

    def instantx(is_inpaint: bool):
        net = network(module.QwenImageControlNetModel, extra_condition_channels=4 * is_inpaint, **config)
        given = {"compression_ratio": 1, "latent_format": comfy.latent_formats.Wan21(), "extra_conds": []}
        return comfy.controlnet.ControlNet(net, concat_mask=is_inpaint, load_device=CPU, **given)

    load = functools.cache(DITS["Qwen-Image"].load)
    CONTROLS["Qwen-Image"] = TinyControl(functools.partial(instantx, False), load, inputs, 1, wan_vae)
    CONTROLS["Qwen-Image inpaint"] = TinyControl(functools.partial(instantx, True), load, inputs, 1, wan_vae, mask=True)
    if hasattr(comfy.controlnet, "load_controlnet_qwen_fun"):  # since 0.3.75

        def fun():
            sizes = dict(inner_dim=64, num_attention_heads=2, attention_head_dim=32)
            return comfy.controlnet.load_controlnet_qwen_fun(
                network(module.QwenImageFunControlNetModel, **sizes).state_dict()
            )

        CONTROLS["Qwen-Image Fun"] = TinyControl(fun, load, inputs, 2, wan_vae)


_unets()
_transformers()
_qwen()

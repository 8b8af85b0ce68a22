"""Small VAEs of ComfyUI's own classes with random weights, recognised and wrapped by its real `comfy.sd.VAE`.

Import it after `inprocess.boot`. Where core recognises a layout at one width alone, only its channels are made fewer on
the way into its class; what it derives from the weights (ratios, channels, estimates) is its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.ldm.cosmos.vae
import comfy.ldm.hunyuan3d.vae
import comfy.ldm.lightricks.vae.causal_video_autoencoder
import comfy.ldm.models.autoencoder
import comfy.ldm.wan.vae
import comfy.sd
import comfy.taesd.taesd
import torch

from kit.tiny_models import randomize

KL = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 1, 1, 1]} | {
    **{"num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
}
"""SD1.5's parts (and with other latent channels Flux's), 32 wide on every level: one kind of block to compile."""

SD15 = {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2}
"""What its own layout has instead."""

COSMOS = {"z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3} | {
    **{"out_channels": 3, "channels": 16, "channels_mult": [2, 2, 2], "num_res_blocks": 1, "attn_resolutions": [32]},
    **{"dropout": 0.0, "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8},
}

WAN = {"dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []} | {
    "temperal_downsample": [False, True, True]
}

REFINER = {"block_out_channels": [64] * 5, "in_channels": 3, "out_channels": 3, "num_res_blocks": 1} | {
    **{"ffactor_spatial": 16, "ffactor_temporal": 4, "downsample_match_channel": True, "upsample_match_channel": True}
}
"""HunyuanVideo 1.5's, which hands earlier frames from block to block in lists."""

SHAPE = {"num_latents": 16, "embed_dim": 8, "width": 64, "heads": 4, "num_decoder_layers": 2, "num_encoder_layers": 1}
"""Hunyuan3D's."""

LTX = {"_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3} | {
    **{"latent_channels": 128, "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4},
    **{"latent_log_var": "uniform", "use_quant_conv": False, "causal_decoder": False, "base_channels": 8},
    "blocks": [
        *(["res_x", 1], ["compress_all", 1], ["res_x_y", 1], ["res_x", 1], ["compress_all", 1], ["res_x", 1]),
        *(["compress_all", 1], ["res_x", 1]),
    ],
}


def sd15(dtype: torch.dtype | None = None, seed: int = 0, **layout: Any) -> comfy.sd.VAE:
    """Four latent channels, eight pixels each way; dtype None is core's choice. layout: what differs from `KL`."""
    return _kl(4, {**KL, "z_channels": 4, **layout}, dtype, seed)


def flux(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    """Sixteen latent channels, and no layers around encoder and decoder."""
    autoencoding = comfy.ldm.models.autoencoder
    params = {**KL, "z_channels": 16}
    model = autoencoding.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": params},
        decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": params},
    )
    with _narrower(comfy.sd, "AutoencodingEngine", _with_params(KL)):
        return comfy.sd.VAE(sd=_weights(model, seed), dtype=dtype)


def svd(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    """SD1.5's encoder with Stable Video Diffusion's decoder, which is told by an option how many frames there are."""
    encoder = {**KL, "z_channels": 4}
    model = comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": encoder},
        decoder_config={
            "target": "comfy.ldm.modules.temporal_ae.VideoDecoder",
            "params": {**encoder, "video_kernel_size": [3, 1, 1], "alpha": 0.0},
        },
    )
    with _narrower(comfy.sd, "AutoencodingEngine", _with_params(KL)):
        return comfy.sd.VAE(sd=_weights(model, seed), dtype=dtype)


def taesd(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    return comfy.sd.VAE(sd=_weights(comfy.taesd.taesd.TAESD(), seed), dtype=dtype)


def wan(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    """Wan 2.1's, which is Qwen-Image's too: 5-D latents, earlier frames in a list."""
    return comfy.sd.VAE(sd=_weights(comfy.ldm.wan.vae.WanVAE(**WAN), seed), dtype=dtype)


def hunyuan_video(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    return _kl(16, {**KL, "z_channels": 16, "conv3d": True, "time_compress": 4}, dtype, seed)


def hunyuan_video_15(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    narrower = _with_params(REFINER)
    params, part = {**REFINER, "z_channels": 32}, "comfy.ldm.hunyuan_video.vae_refiner"
    model = comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": f"{part}.Encoder", "params": params},
        decoder_config={"target": f"{part}.Decoder", "params": params},
    )
    with _narrower(comfy.sd, "AutoencodingEngine", narrower):
        return comfy.sd.VAE(sd=_weights(model, seed), dtype=dtype)


def ltx(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    model = comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(version=0, config=LTX)
    with torch.no_grad():
        for name, buffer in model.per_channel_statistics.named_buffers():
            buffer.fill_(1.0 if name == "std-of-means" else 0.0)
    return comfy.sd.VAE(sd=_weights(model, seed), dtype=dtype, metadata={"config": json.dumps({"vae": LTX})})


def cosmos(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    tokenizer = comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer
    weights = _weights(tokenizer(**COSMOS), seed)
    weights["decoder.unpatcher3d.wavelets"] = torch.zeros(2)  # checkpoints have it, and core looks for it
    narrower = {name: COSMOS[name] for name in ("channels", "channels_mult", "num_res_blocks")}
    with _narrower(comfy.ldm.cosmos.vae, tokenizer.__name__, lambda real: lambda **given: real(**given | narrower)):
        return comfy.sd.VAE(sd=weights, dtype=dtype)


def hunyuan_3d(dtype: torch.dtype | None = None, seed: int = 0) -> comfy.sd.VAE:
    """Latents [B, 8, tokens]; its decoder has options."""
    module = comfy.ldm.hunyuan3d.vae
    weights = _weights(module.ShapeVAE(**SHAPE), seed)
    with _narrower(module, "ShapeVAE", lambda real: lambda: real(**SHAPE)):
        return comfy.sd.VAE(sd=weights, dtype=dtype)


IMAGE = {"sd15": sd15, "flux": flux, "svd": svd, "taesd": taesd}
VIDEO = {"wan": wan, "hunyuan_video": hunyuan_video, "hunyuan_video_15": hunyuan_video_15, "ltx": ltx, "cosmos": cosmos}


def latent(vae: comfy.sd.VAE, height: int, width: int, batch: int = 1, frames: int = 1, seed: int = 0) -> torch.Tensor:
    """A random latent [B, C, H, W], for a video VAE [B, C, T, H, W]; sizes in latent pixels."""
    sizes = (frames, height, width) if vae.latent_dim == 3 else (height, width)
    return torch.randn(batch, vae.latent_channels, *sizes, generator=torch.Generator().manual_seed(seed))


def _kl(channels: int, params: dict[str, Any], dtype: torch.dtype | None, seed: int) -> comfy.sd.VAE:
    model = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=params, embed_dim=channels)

    def narrower(real: Callable) -> Callable:
        # Newer cores take a decoder that is narrower than the encoder for one of another layout.
        return lambda ddconfig, embed_dim, **_: real(ddconfig={**ddconfig, **params}, embed_dim=embed_dim)

    with _narrower(comfy.sd, "AutoencoderKL", narrower):
        return comfy.sd.VAE(sd=_weights(model, seed), dtype=dtype)


def _with_params(changes: dict[str, Any]) -> Callable[[Callable], Callable]:
    def narrower(real: Callable) -> Callable:
        def make(regularizer_config: dict, encoder_config: dict, decoder_config: dict) -> torch.nn.Module:
            parts = ({**part, "params": {**part["params"], **changes}} for part in (encoder_config, decoder_config))
            encoder, decoder = parts
            return real(regularizer_config=regularizer_config, encoder_config=encoder, decoder_config=decoder)

        return make

    return narrower


@contextmanager
def _narrower(owner: Any, name: str, narrower: Callable[[Callable], Callable]) -> Iterator[None]:
    """While it lasts, core's class `owner.name` is made with fewer channels than core asks for."""
    real = getattr(owner, name)
    setattr(owner, name, narrower(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def _weights(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    randomize(model, seed)
    return dict(model.state_dict())

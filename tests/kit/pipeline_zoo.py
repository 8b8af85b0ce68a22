"""Whole pipelines of diffusers' own classes, tiny and random, with a VAE and without text encoders.

Imported by tests that have made sure that diffusers is there. An image of W x H pixels has a latent of W / 4 x H / 4.
"""

import json

import diffusers
import torch
from comfy_accel.accel.cache.graph_cache import shared

from kit import deep_transformers

diffusers.logging.set_verbosity_error()  # it warns at every image that a VAE changes its dtype

WIDTH = 16
"""Of text features, pooled ones too."""

VAE = {
    "block_out_channels": (8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 32,
}
UNET = {"sample_size": 8, "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": WIDTH}
SD = {
    "block_out_channels": (8, 8),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 4,
}
SDXL = {
    "block_out_channels": (8, 8, 8),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": 2,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
}
SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
"""Of Stable Diffusion's schedulers."""

_TRANSFORMERS = {
    "StableDiffusion3": ({"patch_size": 1, "num_layers": 2}, 3.0),
    "Flux": (
        {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
        | {"guidance_embeds": False},
        1.0,
    ),
    "Wan": ({"in_channels": 16, "out_channels": 16, "num_layers": 2}, 7.0),
}
"""Beginning of a pipeline's name → what differs from `deep_transformers.KINDS`, and the shift of its scheduler."""


def seeded(make):
    """What `make` makes, with the same weights every time."""
    torch.manual_seed(0)
    made = make()
    return made.eval() if isinstance(made, torch.nn.Module) else made


def vae(channels=4, **changes):
    return seeded(lambda: diffusers.AutoencoderKL(latent_channels=channels, **VAE, **changes))


def controlnet(unet, seed=0):
    torch.manual_seed(seed)
    made = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8, 16)).eval()
    for parameter in made.parameters():
        if not parameter.any():  # its last layers are zero until they have learned
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def pipeline(kind, schedule=None, **parts):
    """A pipeline of the class named `kind`, with the scheduler of that name; `parts` replace or add components."""
    make = getattr(diffusers, kind)
    if kind.startswith(tuple(_TRANSFORMERS)):
        made = _with_transformer(make, parts)
    else:
        made = _stable_diffusion(make, SDXL if kind.startswith("StableDiffusionXL") else SD, parts)
    if schedule is not None:
        made.scheduler = getattr(diffusers, schedule).from_config(made.scheduler.config)
    made.set_progress_bar_config(disable=True)
    return made


def tokenizer(folder):
    """CLIP's, with a vocabulary of single characters that is written to the folder."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(str(folder), model_max_length=77)


def text_encoder(vocabulary):
    from transformers import CLIPTextConfig, CLIPTextModel

    special = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2}
    return seeded(lambda: CLIPTextModel(CLIPTextConfig(vocab_size=vocabulary, **special, **size)))


def prompt(pipe, batch=1):
    """Arguments that stand for `batch` prompts and their negatives, the same every time."""
    name = type(pipe).__name__
    random = torch.Generator().manual_seed(3)
    pooled = "XL" in name or "3" in name or name.startswith("Flux")
    made = {}
    for prefix in ("", "negative_"):
        made[f"{prefix}prompt_embeds"] = torch.randn(batch, 5, WIDTH, generator=random)
        if pooled:
            made[f"{prefix}pooled_prompt_embeds"] = torch.randn(batch, WIDTH, generator=random)
    if name.startswith("Flux"):  # is guided without negatives
        made = {key: value for key, value in made.items() if not key.startswith("negative_")}
    return made


def several_controlnets():
    """A pipeline with two."""
    pipe = pipeline("StableDiffusionPipeline")
    nets = [controlnet(pipe.unet, seed) for seed in (0, 1)]
    return pipeline("StableDiffusionControlNetPipeline", **{**pipe.components, "controlnet": nets})


def arguments(pipe, width=32, height=32, steps=2, batch=1):
    """Those of a call for `batch` prompts, with whatever else the pipeline takes, the same every time."""
    kind = type(pipe).__name__
    made = {"width": width, "height": height, "num_inference_steps": steps, "output_type": "pt", **prompt(pipe, batch)}
    picture = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(7))
    if "Img2Img" in kind:
        made |= {"image": picture, "num_inference_steps": 2 * steps, "strength": 0.5}
    if "Inpaint" in kind:
        made |= {"image": picture, "mask_image": picture[:, :1].round()}
    if "ControlNet" in kind:
        nets = getattr(pipe.controlnet, "nets", None)
        made["control_image" if "Img2Img" in kind else "image"] = picture if nets is None else [picture] * len(nets)
    if kind.startswith("Wan"):
        made["num_frames"] = 5
    if "Img2Img" in kind:  # of the size of its picture
        del made["width"], made["height"]
    return made


def image(pipe, width=32, height=32, steps=2, batch=1, seed=1, **given):
    """What one call gives, the same for the same arguments: latents, if nothing else is asked for."""
    made = {**arguments(pipe, width, height, steps, batch), "output_type": "latent"}
    return pipe(**{**made, "generator": torch.Generator().manual_seed(seed), **given})[0]


def compiled_image(pipe, **given):
    """An image in which graphs ran."""
    before = shared.statistics()["hits"]
    made = image(pipe, **given)
    assert shared.statistics()["hits"] > before
    return made


def eager_image(pipe, **given):
    """An image in which none did."""
    before = shared.statistics()["hits"]
    made = image(pipe, **given)
    assert shared.statistics()["hits"] == before
    return made


def _stable_diffusion(make, layout, parts):
    unet = parts.pop("unet", None) or seeded(lambda: diffusers.UNet2DConditionModel(**UNET, **layout))
    absent = dict.fromkeys(["text_encoder", "tokenizer"])
    if layout is SDXL:
        absent |= dict.fromkeys(["text_encoder_2", "tokenizer_2"])
    else:
        absent |= {**dict.fromkeys(["safety_checker", "feature_extractor"]), "requires_safety_checker": False}
    if "ControlNet" in make.__name__ and "controlnet" not in parts:
        parts["controlnet"] = controlnet(unet)
    scheduler = diffusers.EulerDiscreteScheduler(**SCHEDULE)
    return make(**{"vae": vae(), "unet": unet, "scheduler": scheduler, **absent, **parts})


def _with_transformer(make, parts):
    kind, (changes, shift) = next(item for item in _TRANSFORMERS.items() if make.__name__.startswith(item[0]))
    name, config, *_ = deep_transformers.KINDS[kind]
    made = {
        "vae": _wan_vae() if kind == "Wan" else vae(shift_factor=0.1, scaling_factor=1.5),
        "transformer": seeded(lambda: getattr(diffusers, name)(**config | changes)),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
    }
    return make(**made | deep_transformers.absent(make) | parts)


def _wan_vae():
    sizes = dict(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return seeded(lambda: diffusers.AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True]))

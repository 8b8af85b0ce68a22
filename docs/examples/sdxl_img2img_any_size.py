"""SDXL image-to-image at one size after the other, with one compilation for all of them.

    python docs/examples/sdxl_img2img_any_size.py --model PATH --image photo.png --sizes 1024x1024 512x2048 720x960

PATH is a pipeline's folder on this machine (`save_pretrained`), or a .safetensors file whose configuration is in
the hub's cache; nothing is fetched. Without --model a tiny pipeline with random weights shows what is compiled, and
its images are noise. Needs the packages comfy-accel (this repository's wheel), diffusers and Pillow.
"""

import argparse
import time
from pathlib import Path

import comfy_accel
import diffusers
import PIL.Image
import torch
from torch._dynamo.utils import counters


def main(arguments=None):
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = load(options.model, device) if options.model else tiny_pipeline()
    pipe.scheduler = diffusers.LCMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    prompt = {"prompt": options.prompt} if pipe.text_encoder else random_prompt()
    start = PIL.Image.open(options.image).convert("RGB") if options.image else PIL.Image.linear_gradient("L")

    skipping = comfy_accel.DeepCacheSettings(options.quality) if options.quality else None
    comfy_accel.accelerate_pipeline(pipe, ignores=("vae",), deep_cache=skipping, backend=options.backend)
    print(comfy_accel.warm_up(pipe, image=start.convert("RGB").resize(options.sizes[0]), **prompt))

    options.output.mkdir(parents=True, exist_ok=True)
    for width, height in options.sizes:
        compiled, began = counters["stats"]["unique_graphs"], time.perf_counter()
        images = pipe(
            image=start.convert("RGB").resize((width, height)),
            strength=0.5,
            num_inference_steps=options.steps,
            num_images_per_prompt=options.images,
            generator=torch.Generator().manual_seed(options.seed),
            **prompt,
        ).images
        seconds, compiled = time.perf_counter() - began, counters["stats"]["unique_graphs"] - compiled
        for number, image in enumerate(images):
            image.save(options.output / f"{width}x{height}-{number}.png")
        print(f"{width}x{height}: {len(images)} images in {seconds:.2f} s, {compiled} graphs compiled")


def load(model, device):
    """The pipeline at that path: as its own files say, in half precision on a GPU."""
    kind = diffusers.StableDiffusionXLImg2ImgPipeline
    read = kind.from_single_file if model.is_file() else kind.from_pretrained
    dtype = torch.float16 if device == "cuda" else torch.float32
    return read(str(model), torch_dtype=dtype, local_files_only=True).to(device)


def tiny_pipeline():
    """SDXL's layout, 32 channels wide, with random weights and without text encoders."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=2,
        cross_attention_dim=32,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
    )
    absent = dict.fromkeys(["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1
    )
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        vae=vae.eval(), unet=unet.eval(), scheduler=scheduler, add_watermarker=False, **absent
    )


def random_prompt():
    """Features [1, tokens, 32] and [1, 32] that stand for a prompt and its negative."""
    random = torch.Generator().manual_seed(1)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return {name: torch.randn((1, 32) if "pooled" in name else (1, 77, 32), generator=random) for name in names}


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: a tiny one with random weights")
    parser.add_argument("--image", type=Path, help="to start from; default: a gradient")
    parser.add_argument("--prompt", default="a photograph of a lake in the mountains")
    parser.add_argument("--sizes", type=size, nargs="+", metavar="WxH", help="width x height, in pixels")
    parser.add_argument("--images", type=int, default=1, help="of each size; default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="of which half are run; default: %(default)s")
    parser.add_argument(
        "--quality", type=float, metavar="DB", help="what DeepCache plans for, such as 40; without, it is off"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--output", type=Path, default=Path("images"), help="a folder; default: %(default)s")
    options = parser.parse_args(arguments)
    for path in filter(None, (options.model, options.image)):
        if not path.exists():
            parser.error(f"{path} does not exist")
    large, small = ("1024x1024", "512x2048", "720x960", "896x768", "1280x720"), ("256x256", "128x512", "184x240")
    options.sizes = options.sizes or [size(text) for text in (large if options.model else small)]
    return options


def size(text):
    width, _, height = text.partition("x")
    return int(width), int(height)


if __name__ == "__main__":
    main()

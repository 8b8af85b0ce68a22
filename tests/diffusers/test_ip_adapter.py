"""IP-Adapters, whose scales are numbers on the attention: eager images, and no graph for another scale or mask."""

import diffusers
import pytest
import torch
from comfy_accel.accel import accelerate_pipeline
from comfy_accel.accel.cache.graph_cache import shared
from comfy_accel.accel.core.fallbacks import fallbacks
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from kit import deep_transformers, tiny_pipelines
from kit.compiled import graphs
from kit.tiny_pipelines import difference

EMBEDDED = 8
STEPS = 2
LAYOUT = {
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
}
"""Few kinds of blocks."""


def adapter(unet, seed, tokens=4):
    """Random weights, named as in an adapter's file."""
    random = torch.Generator().manual_seed(seed)
    width, layers = unet.config.cross_attention_dim, {}
    crossed = [part for path, part in unet.named_modules() if path.endswith("attn2")]
    for at, part in enumerate(crossed):
        for name in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * at + 1}.{name}.weight"] = torch.randn(part.inner_dim, width, generator=random)
    projected = {"proj.weight": (tokens * width, EMBEDDED), "proj.bias": (tokens * width,)}
    image = {name: torch.randn(*shape, generator=random) for name, shape in projected.items()}
    return {"image_proj": image | {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}} | {
        "ip_adapter": layers
    }


class Both:
    """Two equal pipelines, one of them accelerated."""

    def __init__(self):
        shared.clear()
        self.pipes = tuple(tiny_pipelines.pipeline(layout=LAYOUT) for _ in range(2))
        accelerate_pipeline(self.pipes[1], backend="eager")

    def load(self, *seeds):
        for pipe in self.pipes:
            states = [adapter(pipe.unet, seed) for seed in seeds]
            pipe.unet._load_ip_adapter_weights(states, low_cpu_mem_usage=False)

    def images(self, scale, count=1, masks=None, **call):
        random = torch.Generator().manual_seed(5)
        call["ip_adapter_image_embeds"] = [torch.randn(2, 1, EMBEDDED, generator=random) for _ in range(count)]
        if masks is not None:
            call["cross_attention_kwargs"] = {"ip_adapter_masks": masks}
        made = []
        for pipe in self.pipes:
            pipe.set_ip_adapter_scale(scale)
            made.append(tiny_pipelines.sample(pipe, steps=STEPS, **call))
        plain, compiled = made
        assert difference(compiled, plain) < 1e-5
        return plain


def test_scales_and_masks_of_image_prompts_compile_nothing_once_they_are_there():
    both = Both()
    both.load(1, 2)
    first = both.images([0.6, 0.2], count=2)
    known = graphs()
    for scales in ([0.1, 0.9], [0.0, 0.0], [{"up": {"block_1": [0.0, 1.0]}}, 0.2]):
        assert difference(both.images(scales, count=2), first) > 1e-3
    assert graphs() == known
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., :32] = 1
    both.images([0.6, 0.2], count=2, masks=[mask, 1 - mask])
    known = graphs()
    both.images([0.1, 0.9], count=2, masks=[1 - mask, mask], height=96, width=64)
    assert graphs() == known and fallbacks.rows() == []


def flux(transformer):
    """An adapter of random weights on a Flux, and what a call is given for it."""
    random, width, heads = (
        torch.Generator().manual_seed(2),
        transformer.inner_dim,
        transformer.config.joint_attention_dim,
    )
    layers = {}
    for at in range(transformer.config.num_layers):
        for name in ("to_k_ip", "to_v_ip"):
            layers[f"{at}.{name}.weight"] = torch.randn(width, heads, generator=random)
            layers[f"{at}.{name}.bias"] = torch.randn(width, generator=random)
    image = {"proj.weight": torch.randn(4 * heads, EMBEDDED, generator=random), "proj.bias": torch.zeros(4 * heads)}
    image |= {"norm.weight": torch.ones(heads), "norm.bias": torch.zeros(heads)}
    transformer._load_ip_adapter_weights([{"image_proj": image, "ip_adapter": layers}], low_cpu_mem_usage=False)
    given = [torch.randn(1, 1, EMBEDDED, generator=random)]
    return {"ip_adapter_image_embeds": given, "negative_ip_adapter_image_embeds": given}


def sd3(transformer):
    """An adapter of random weights on a Stable Diffusion 3, and what a call is given for it."""
    width = transformer.inner_dim
    made = {
        name: deep_transformers.seeded(
            lambda: SD3IPAdapterJointAttnProcessor2_0(width, width, transformer.config.attention_head_dim, 24), seed=at
        )
        for at, name in enumerate(transformer.attn_processors)
    }
    transformer.set_attn_processor(made)
    asked = {"embed_dim": EMBEDDED, "output_dim": width, "hidden_dim": 24, "heads": 1, "num_queries": 3, "depth": 1}
    transformer.image_proj = deep_transformers.seeded(lambda: IPAdapterTimeImageProjection(**asked))
    return {"ip_adapter_image_embeds": torch.randn(2, 5, EMBEDDED, generator=torch.Generator().manual_seed(3))}


@pytest.mark.parametrize(
    ("kind", "load"), [("FluxPipeline", flux), ("StableDiffusion3Pipeline", sd3)], ids=["Flux", "SD3"]
)
def test_scales_of_image_prompts_of_a_transformer_compile_nothing_once_they_are_there(kind, load):
    shared.clear()
    pipes = [deep_transformers.pipeline(kind) for _ in "ab"]
    given = [load(pipe.transformer) for pipe in pipes][0]
    accelerate_pipeline(pipes[1], backend="eager")
    known, images = 0, []
    for scale, size in ((1.0, {}), (0.3, {}), (0.0, {}), (0.7, {"height": 96, "texts": (7, 7)}), (0.5, {"batch": 2})):
        for pipe in pipes:
            pipe.set_ip_adapter_scale(scale)
        plain, compiled = (deep_transformers.sample(pipe, steps=STEPS, **given, **size) for pipe in pipes)
        assert torch.equal(compiled, plain), (scale, size)
        images.append(plain)
        known = known or graphs()
        assert graphs() == known > 0, (scale, size)
    assert difference(images[0], images[1]) > 1e-3 < difference(images[1], images[2])
    assert fallbacks.rows() == []


def test_blocks_are_compiled_again_after_a_cache_of_diffusers_own():
    pipe = accelerate_pipeline(deep_transformers.pipeline("FluxPipeline"), backend="eager")
    before, known = deep_transformers.sample(pipe), graphs()
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))
    deep_transformers.sample(pipe)
    assert {row["reason"] for row in fallbacks.rows()} != set()
    pipe.transformer.disable_cache()
    fallbacks.clear()
    assert torch.equal(deep_transformers.sample(pipe), before)
    assert graphs() == known and fallbacks.rows() == []

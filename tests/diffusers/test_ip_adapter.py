"""IP-Adapters, whose scales are numbers on a UNet's attention: eager images, and no graph for another scale or mask."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from comfy_accel.accel import accelerate_pipeline  # noqa: E402
from comfy_accel.accel.cache.graph_cache import shared  # noqa: E402
from comfy_accel.accel.core.fallbacks import fallbacks  # noqa: E402
from diffusers.models.attention_processor import AttnProcessor2_0  # noqa: E402
from kit import deep_transformers, tiny_pipelines  # noqa: E402
from kit.compiled import graphs  # noqa: E402
from kit.tiny_pipelines import difference  # noqa: E402

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
    both.load(1)
    first = both.images(1.0)
    known = graphs()
    for scale in (0.3, 0.0, {"up": {"block_1": [0.0, 1.0]}}):
        assert difference(both.images(scale), first) > 1e-3
    assert graphs() == known
    both.load(1, 2)
    both.images([0.6, 0.2], count=2)
    known = graphs()
    both.images([0.1, 0.9], count=2)
    assert graphs() == known
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., :32] = 1
    both.images([0.6, 0.2], count=2, masks=[mask, 1 - mask])
    known = graphs()
    both.images([0.1, 0.9], count=2, masks=[1 - mask, mask], height=96, width=64)
    assert graphs() == known and fallbacks.rows() == []


@pytest.mark.thorough  # graphs of its own; unloaded LoRAs and caches leave those of before in quick tests
def test_unloaded_adapter_leaves_the_graphs_of_before():
    both = Both()
    before = [tiny_pipelines.sample(pipe, steps=STEPS) for pipe in both.pipes]
    known = graphs()
    both.load(1)
    both.images(1.0)
    made = graphs()
    for pipe in both.pipes:
        pipe.unet.encoder_hid_proj = None
        pipe.unet.register_to_config(encoder_hid_dim_type=None)
        pipe.unet.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(tiny_pipelines.sample(both.pipes[1], steps=STEPS), before[1])
    assert graphs() == made > known


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

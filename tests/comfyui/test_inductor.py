"""The few blocks that are really compiled in tests: what the backends that only capture cannot show."""

import comfy.ops
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock, EmbedND
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.hosts.comfyui.models.accelerate import block_layers
from comfy_accel.accel.modules.substitution import Order, substitute
from kit import tiny_models
from kit.compiled import graphs

INDUCTOR = CompileSettings(backend="inductor")


class DoubleStream(torch.nn.Module):
    """Two of Flux's joint-attention blocks, which slice image and text apart at a size that varies."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            DoubleStreamBlock(
                64, 2, 2.0, qkv_bias=True, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
            )
            for _ in range(2)
        )
        tiny_models.randomize(self)
        self.eval().requires_grad_(False)

    def forward(self, img, txt, vec, pe):
        for block in self.blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        return img, txt


def test_joint_attention_blocks_compile_once_and_match_eager():
    model, embed = DoubleStream(), EmbedND(32, 10000, [8, 12, 12])
    layers = block_layers(model, INDUCTOR, GraphCache())
    with torch.inference_mode():
        for batch, image, text in [(2, 16, 8), (1, 20, 7), (3, 9, 12)]:
            given = (
                torch.randn(batch, image, 64),
                torch.randn(batch, text, 64),
                torch.randn(batch, 64),
                embed(torch.rand(batch, image + text, 3)),
            )
            expected = model(*given)
            with substitute(layers, Order.COMPILED):
                actual = model(*given)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert fallbacks.rows() == []
    assert graphs() == 1

"""A model of which more or less is on the device: what is compiled again, counted.

On the CPU the parts that are loaded and those that are not share a device, so a block of both is compiled, once for
each way it can be split; where devices differ, it runs eagerly.
"""

import pytest
import tiny_models
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.fingerprint.survey import survey
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from torch._dynamo.utils import counters


@pytest.fixture
def model():
    counters.clear()
    fallbacks.clear()
    return tiny_models.res_blocks(model_channels=64)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_partial_load_compiles_once_for_each_path_and_leaves_whole_blocks_as_they_were(model):
    cache = GraphCache()
    network = model.model.diffusion_model
    whole = {region.path: region.kind for region in survey(network).regions}
    x, t, context = torch.randn(2, 4, 12, 15), torch.tensor([5.0, 5.0]), torch.randn(2, 77, tiny_models.CONTEXT_DIM)

    def load(share: float) -> set:
        """Load this share of the weights and run; the kinds of what is not loaded whole."""
        model.detach()
        limit = int(model.model_size() * share)
        model.load(torch.device("cpu"), lowvram_model_memory=limit, full_load=share == 1)
        parted = set()
        for region in survey(network).regions:
            if any(hasattr(part, "prev_comfy_cast_weights") for part in region.block.modules()):
                parted.add(region.kind)
            else:
                assert region.kind == whole[region.path]
        with torch.inference_mode():
            plain = model.model.apply_model(x, t, c_crossattn=context, transformer_options={})
            options = {"wrappers": accelerate(model, CompileSettings(backend="eager"), cache).wrappers}
            assert torch.equal(model.model.apply_model(x, t, c_crossattn=context, transformer_options=options), plain)
        return parted

    try:
        paths = set(whole.values())
        for share in (1, 0.995, 0.2):  # all; all but a part of one block; the largest parts alone
            paths |= load(share)
        assert 0 < graphs() <= len(paths)
        before = graphs()
        for share in (0.2, 1, 0.995):
            load(share)
        assert graphs() == before and fallbacks.rows() == []
    finally:
        model.detach()

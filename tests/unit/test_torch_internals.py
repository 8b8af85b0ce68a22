"""Torch without one of its private names: blocks run compiled another way, or eagerly for one reason, and rightly."""

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core import torch_internals
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.core.fallbacks import fallbacks
from comfy_accel.accel.dispatch.batch_dry_run import BatchDryRun
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.fingerprint.survey import survey
from thorough import thorough_except


def test_every_name_is_known():
    """What a new torch lacks; each says when it was first there, and what is lost without it."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    expected = [name for name in torch_internals.ALL if tuple(map(int, name.since.split("."))) <= version]
    assert [str(name) for name in expected if not name.is_there] == []
    assert [name for name in torch_internals.ALL if not name.without] == []
    assert {value for value in vars(torch_internals).values() if type(value) is torch_internals.Internal} == set(
        torch_internals.ALL
    )


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)])

    def forward(self, x):
        return self.blocks[0](x)


# One for each thing that may be lost is quick.
QUICK = (
    *(torch_internals.AOT_CELLS, torch_internals.GUARD_FILTER, torch_internals.MARK_DYNAMIC, torch_internals.FAKE_MODE),
    torch_internals.TENSOR_GUARDS,
)


@pytest.mark.parametrize("name", thorough_except(torch_internals.ALL, *QUICK), ids=str)
@torch.inference_mode()
def test_renamed_in_a_new_torch_each_name_leaves_the_output_right(name, hide):
    hide(name)
    fallbacks.clear()
    model = Model().eval().requires_grad_(False)
    region, *_ = survey(model).regions
    dry_run = BatchDryRun(model, {region.block: lambda call: list(call[0])})
    runner = BlockRunner(region, GraphCache(), CompileSettings(backend="eager"), dry_run=dry_run)
    for shape in ((1, 3, 8), (1, 5, 8), (2, 4, 8)):
        x = torch.randn(shape)
        assert torch.equal(dry_run(lambda x: runner(model.blocks[0], x), x), model(x))
    assert len({row["reason"] for row in fallbacks.rows()}) <= 1

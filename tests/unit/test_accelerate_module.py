"""A model of another pack, with a sampler of its own: its blocks run compiled in place."""

import copy
import gc
import weakref

import pytest
import torch
from comfy_accel.accel.hosts.diffusers import pipeline as host
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, e):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x) * (1 + e))))


class VideoModel(nn.Module):
    """As packs have them that wrap a model of their own: a list of blocks, and a call that is no diffusers model's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.eval().requires_grad_(False)

    def forward(self, frames, t):
        x, e = self.embed(frames.flatten(1, 3)), t[:, None, None].expand(-1, 1, 16)
        for block in self.blocks:
            x = block(x, e)
        return self.head(x).view_as(frames)


def sample(model, shape, steps=3):
    """A sampler of the pack's own."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for level in torch.linspace(1, 0.2, steps):
            x = x - 0.2 * model(x, level.expand(len(x)))
    return x


SHAPES = ((1, 3, 4, 5, 4), (2, 3, 4, 5, 4), (1, 2, 7, 3, 4))
"""[B, F, H, W, C]"""


def test_blocks_are_compiled_once_for_every_size_and_batch(cache):
    model = VideoModel()
    plain = [sample(model, shape) for shape in SHAPES]
    assert host.accelerate_module(model, backend="eager") is model
    for shape, expected in zip(SHAPES, plain, strict=True):
        with host.one_run():
            out = sample(model, shape)
        torch.testing.assert_close(out, expected)
    told = cache.statistics()
    assert told["compilations"] == 1 and told["hits"] >= 3 * 3 * 3 - 1


def test_restored_module_is_as_it_was_and_another_weight_counts(cache):
    model = host.accelerate_module(VideoModel(), backend="eager")
    sample(model, SHAPES[0])
    other = VideoModel()
    for weight in other.parameters():
        weight.mul_(1.5)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(sample(model, SHAPES[0]), sample(other, SHAPES[0]))
    assert cache.statistics()["compilations"] == 1
    host.restore_module(model)
    assert vars(model).keys() == vars(other).keys()
    assert torch.equal(sample(model, SHAPES[0]), sample(other, SHAPES[0]))
    assert cache.statistics()["compilations"] == 1


def test_module_is_freed_and_a_copy_is_not_accelerated(cache):
    model = host.accelerate_module(VideoModel(), backend="eager")
    sample(copy.deepcopy(model), SHAPES[0])
    assert cache.statistics()["compilations"] == 0
    sample(model, SHAPES[0])
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_what_cannot_be_accelerated_is_refused_in_a_sentence(cache):
    with pytest.raises(TypeError, match="expected a torch.nn.Module, not a list"):
        host.accelerate_module([])
    with pytest.raises(ValueError, match="backend is 'fast'; it must be one of: "):
        host.accelerate_module(VideoModel(), backend="fast")
    whole = VideoModel()
    whole.compile()
    with pytest.raises(ValueError, match="VideoModel is compiled as a whole already"):
        host.accelerate_module(whole)

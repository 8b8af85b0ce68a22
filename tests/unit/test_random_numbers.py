"""Compiling draws no random number: one seed gives one image, whichever way a graph came to be."""

import random

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from kit.blocks import Block, runner
from kit.stores import saving

GENERATOR = torch.Generator()


def drawing(function):
    class Draws(Block):
        def forward(self, x):
            return super().forward(x) + function(x)

    return Draws()


DRAWS = {
    "for a shape": lambda x: torch.rand(x.shape),
    "like the input": torch.rand_like,
    "in place": lambda x: torch.empty_like(x).normal_(),
    "a permutation": lambda x: x[torch.randperm(x.shape[0])],
    "with a generator": lambda x: torch.rand(x.shape, generator=GENERATOR),
    "in Python": lambda x: x * random.random(),
    "nothing": lambda x: x,
}


def seeded():
    torch.manual_seed(1)
    random.seed(1)
    GENERATOR.manual_seed(1)


def following():
    return torch.rand(1).item(), random.random(), torch.rand(1, generator=GENERATOR).item()


def images(block, call, counts=(2, 1, 2)):
    """What calls give, and the numbers that come next."""
    seeded()
    with torch.no_grad():
        return [call(block, torch.ones(rows, 3, 4)) for rows in counts], following()


WAYS = {"compiled": {}, "timed": {"measured": True}, "loaded": {"backend": "inductor"}}
LOADED = "in place", "in Python", "nothing"
"""What is drawn by graphs that are saved and loaded."""


@pytest.mark.parametrize(
    ("way", "draws"), [(way, draws) for way in WAYS for draws in DRAWS if way != "loaded" or draws in LOADED]
)
def test_a_compiled_block_draws_what_the_block_draws_and_nothing_more(draws, way, tmp_path):
    block = drawing(DRAWS[draws])
    expected = images(block, lambda block, x: block(x))
    for _ in range(1 + (way == "loaded")):
        torch._dynamo.reset()
        cache = saving(tmp_path) if way == "loaded" else GraphCache()
        stand_in = runner(block, cache, **WAYS[way])
        for _ in range(2):  # graphs are new in the first
            found = images(block, stand_in)
            torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
            assert found[1] == expected[1]


def test_compilers_that_draw_leave_random_numbers_as_they_were():
    def backend(graph, examples):
        torch.rand(3), random.random()
        return graph

    block = drawing(DRAWS["nothing"])
    assert images(block, runner(block, backend=backend))[1] == images(block, lambda block, x: block(x))[1]


def test_two_blocks_that_are_compiled_under_one_seed_are_not_taken_for_each_other(tmp_path, monkeypatch):
    """Torch names graphs in its cache on disk after one of Python's random numbers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for draws in ("nothing", "like the input"):
        block = drawing(DRAWS[draws])
        expected = images(block, lambda block, x: block(x))
        torch.testing.assert_close(images(block, runner(block, backend="inductor")), expected)

"""Every node of core that returns a MODEL, beside Accelerate Model and DeepCache, in either order of the nodes."""

import functools

import pytest
import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.hosts.comfyui.models.accelerate import accelerate
from comfy_accel.accel.hosts.comfyui.models.deep_cache import apply_deep_cache
from comfy_accel.accel.report.run_record import records
from comfy_accel.accel.step_cache.config import DeepCacheSettings
from kit.compiled import graphs
from kit.core_nodes import ALL_ROWS, FAMILIES_OF_NODES, LOADERS, NO_NODES, ROWS, nodes_of_core
from kit.deep_cache import last_run
from kit.step_cache import every
from kit.thorough import thorough_except

QUICK = ["GLIGEN", "merge", "Uni3C", "Z-Image Fun 2.0"]
"""Guidance and windows beside DeepCache are in test_deep_cache_beside_other_nodes.py."""

TOLERANCE = 1e-5
"""Of the largest value: a copy made contiguous is summed in another order."""

EXTRAPOLATED = 1e-3
"""With DeepCache, which goes on along the line through two predictions, and so with their differences."""

models = functools.cache(lambda family: FAMILIES_OF_NODES[family].load())
caches = functools.cache(lambda family: GraphCache())
"""One for each family: what a node leaves alone is compiled once."""


def fast(row, model):
    return accelerate(model, CompileSettings(backend="eager"), caches(row.family))


def assert_close(one, other, tolerance=TOLERANCE):
    assert one.isfinite().all() and (one - other).abs().max() <= tolerance * other.abs().max()


def skips():
    return bool(last_run()) and last_run()["skipped_steps"] > 0


@pytest.mark.parametrize("name", thorough_except(ROWS, *QUICK, "PAG", "windows"))
def test_compiled_blocks_beside_a_node_give_the_eager_image_and_compile_nothing_at_a_second_size(name):
    row = ROWS[name]
    model, made, said = models(row.family), [], set()
    for size in (0, 1):
        expected = row.image(row.on(model, size), size)
        assert not row.changes or not torch.equal(row.image(model, size, bare=True), expected)
        for patched in (fast(row, row.on(model, size)), row.on(fast(row, model), size)):
            assert_close(row.image(patched, size), expected)
            made.append(graphs())
            run = records.last()
            said.update(why.code for why in run.why_uncompiled())
            assert run.totals.compiled_calls or said
    assert made[0] == made[-1] or row.compiles
    assert said == set(row.eager)


@pytest.mark.parametrize("name", thorough_except(ROWS, *QUICK))
def test_deep_cache_beside_a_node_skips_alike_in_either_order_or_says_why_it_does_not(name):
    row = ROWS[name]
    model = models(row.family)
    plain = row.image(row.on(model))
    for off in (apply_deep_cache(row.on(model), every(1)), row.on(apply_deep_cache(model, every(1)))):
        assert torch.equal(row.image(off), plain)
    records.clear()
    deep = row.image(apply_deep_cache(row.on(model), every(2)))
    assert deep.isfinite().all()
    if row.full:
        assert records.last().skipping.why_full.startswith(row.full)
        assert_close(deep, plain)
    else:
        assert not torch.equal(deep, plain)
    assert skips() != bool(row.full)
    assert_close(row.image(row.on(apply_deep_cache(model, every(2)))), deep, EXTRAPOLATED)
    assert skips() != bool(row.full)
    for both in (
        fast(row, apply_deep_cache(row.on(model), every(2))),
        row.on(apply_deep_cache(fast(row, model), every(2))),
    ):
        assert_close(row.image(both), deep, EXTRAPOLATED)
        assert skips() != bool(row.full)
    # Nothing is near enough to be skipped; what full steps show is compared all the same.
    assert torch.equal(row.image(apply_deep_cache(row.on(model), DeepCacheSettings(quality=200.0))), plain)
    assert row.full or records.last().skipping.why_full is None
    assert torch.equal(row.image(row.on(model)), plain)


def test_every_node_of_core_that_returns_a_model_is_tried():
    tried = {row.node for row in ALL_ROWS.values()} | LOADERS | NO_NODES
    assert [name for name in nodes_of_core() if name not in tried] == []

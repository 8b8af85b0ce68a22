"""Nodes of core that return a MODEL, one of each sort, beside Accelerate Model and DeepCache, in either order."""

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
from kit.core_nodes import FAMILIES_OF_NODES, ROWS
from kit.deep_cache import last_run
from kit.step_cache import every
from kit.thorough import thorough_except, todays

QUICK = {"GLIGEN", "merge", *todays(list(ROWS), 3)}
"""The others in turns. Guidance and windows beside DeepCache are in test_deep_cache_beside_other_nodes.py too."""

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


@pytest.mark.parametrize("name", thorough_except(ROWS, *QUICK))
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
def test_deep_cache_beside_a_node_skips_alike_in_either_order(name):
    row = ROWS[name]
    model = models(row.family)
    plain = row.image(row.on(model))
    for off in (apply_deep_cache(row.on(model), every(1)), row.on(apply_deep_cache(model, every(1)))):
        assert torch.equal(row.image(off), plain)
    deep = row.image(apply_deep_cache(row.on(model), every(2)))
    assert deep.isfinite().all() and not torch.equal(deep, plain) and last_run()["skipped_steps"]
    for both in (
        row.on(apply_deep_cache(model, every(2))),
        fast(row, apply_deep_cache(row.on(model), every(2))),
        row.on(apply_deep_cache(fast(row, model), every(2))),
    ):
        assert_close(row.image(both), deep, EXTRAPOLATED)
        assert last_run()["skipped_steps"]
    # Nothing is near enough to be skipped; what full steps show is compared all the same.
    records.clear()
    assert torch.equal(row.image(apply_deep_cache(row.on(model), DeepCacheSettings(quality=200.0))), plain)
    assert records.last().skipping.why_full is None
    assert torch.equal(row.image(row.on(model)), plain)

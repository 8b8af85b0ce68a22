"""The cache as rows: of thousands of entries a few, quickly, and each has a name that stays."""

import time

import pytest
import torch
from comfy_accel.accel.cache.entry import Entry, Use
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile.compiled_graph import CompiledGraph
from comfy_accel.accel.fingerprint.kinds import GraphKey, Kind
from comfy_accel.accel.hosts.comfyui.server.panel import cache_table
from comfy_accel.accel.signature.tensors import TensorSpec

MANY = 5000


def key(number=0, sizes=None):
    weights = tuple(f"layer.{index}.weight" for index in range(20))
    specs = tuple(TensorSpec(torch.float16, torch.device("cpu"), 4, "contiguous") for _ in weights)
    return GraphKey(Kind("Block", f"digest {number}", weights), ("tensor",), specs, "inductor", sizes)


def fill(cache, keys, name="Block"):
    for one in keys:
        with cache.lease() as lease:
            cache.find(one, name, lambda graph: True, lambda: CompiledGraph(len, bool, nbytes=10), lease)
            lease.uses = (Use("SD15", (8, 8), 1),)


@pytest.fixture(scope="module")
def full():
    cache = GraphCache(max_entries=MANY)
    for number in range(MANY - 5):  # by `find`, each would look whether all still fit
        entry = Entry(key(number), "Block", [CompiledGraph(len, bool, nbytes=10)], uses=(Use("SD15", (8, 8), 1),))
        cache._entries[entry.key] = entry
    fill(cache, (key(MANY + number) for number in range(5)), "Transformer")
    return cache


def test_rows_are_bounded_and_the_latest_and_totals_are_of_all(full):
    found, totals = cache_table(full, 200), full.statistics()
    assert len(found["table"]) == 200 and found["rows_total"] == totals["entries"] == MANY
    assert totals["bytes"] == MANY * 10
    assert [row["name"] for row in found["table"]][-5:] == ["Transformer"] * 5
    assert cache_table(full, 0)["table"] == []


def test_thousands_of_entries_are_told_quickly(full):
    cache_table(full, 200)
    started = time.process_time()
    cache_table(full, 200)
    assert time.process_time() - started < 0.5


def test_entry_is_named_the_same_in_every_cache():
    one, other = GraphCache(), GraphCache()
    for cache in (one, other):
        fill(cache, [key(1), key(2)])
    names = [row["id"] for row in cache_table(one)["table"]]
    assert names == [row["id"] for row in cache_table(other)["table"]] and len(set(names)) == 2


def test_row_says_what_the_graph_is_for():
    cache = GraphCache()
    fill(cache, [key(1), key(2, (torch.Size((2, 3)), torch.Size(())))])
    any_size, exact = cache_table(cache)["table"]
    assert (any_size["sizes"], exact["sizes"]) == ("any", [[2, 3], []])
    assert (exact["dtype"], exact["device"], exact["backend"]) == ("float16", "cpu", "inductor")
    assert exact["source"] == "compiled" and exact["model"] == "SD15"
    assert exact["used_at"] == [{"latent": [8, 8], "batch": 1, "context": None}]
    cache.find("a", "A", len, lambda: pytest.fail("compiled"), load_graph=lambda: CompiledGraph(len, bool))
    assert cache_table(cache)["table"][-1]["source"] == "disk"

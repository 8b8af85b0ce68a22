"""What the fleet's measurement takes for a failure."""

import contextlib
import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest

from dev.bench import fleet

LOAD = dict(route="graph", prompts=200, answered=200, failed=0, run_again=2, images=200, duplicates=0, met_graph=0.9)
COLD = dict(store="shared", replicas=3, compilations=fleet.KINDS, loaded=4)
PUBLISHED = dict(prompts=4, answered=4, images=4, half_published=0)


@pytest.mark.parametrize(
    ("load", "cold", "left", "sentence"),
    [
        ({}, {}, 0, None),
        ({"answered": 199}, {}, 0, "199 of 200 prompts were answered"),
        ({"failed": 1}, {}, 0, "1 failed"),
        ({"images": 201}, {}, 0, "201 images of 200 prompts"),
        ({"duplicates": 1}, {}, 0, "1 of them twice"),
        ({"run_again": 0}, {}, 0, "nothing was shown"),
        ({}, {"compilations": 3 * fleet.KINDS + 1}, 0, "beside a shared store"),
        ({}, {"store": "none", "compilations": 3 * fleet.KINDS}, 0, None),
        ({}, {}, 2, "2 processes were left behind"),
    ],
)
def test_measurement_fails_where_something_was_lost_or_made_twice(load, cold, left, sentence):
    said = fleet.failure([LOAD | load], [COLD | cold], [], left)
    assert said is None if sentence is None else sentence in said


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"fault": "comfyui", "run_again": 2}, None),
        ({"fault": "comfyui", "run_again": 4}, "4 prompts ran again"),
        ({"fault": "comfyui", "run_again": 1, "answered": 3}, "3 of 4 prompts"),
        ({"fault": "comfyui", "run_again": 1, "half_published": 1}, "4 of 4 prompts"),
        ({"fault": "shutdown", "seconds": 5}, None),
        ({"fault": "shutdown", "seconds": fleet.DRAIN_S}, "it took"),
    ],
)
def test_measurement_fails_where_a_fault_lost_something_or_was_waited_for_in_vain(row, sentence):
    said = fleet.failure([], [], [PUBLISHED | row], left=0)
    assert said is None if sentence is None else sentence in said


def test_sizes_are_twelve_that_the_model_takes():
    assert len(set(fleet.SIZES)) == 12
    assert all(side % 8 == 0 and 64 <= side <= 384 for size in fleet.SIZES for side in size)


def test_what_another_store_holds_is_not_said_of_a_start_without_one(tmp_path, monkeypatch):
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "a.graph").write_bytes(b"x" * 500_000)
    state = {"replica": "a", "compilations": 2, "loaded": 0, "store": {}}
    replicas = SimpleNamespace(state=SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda timeout_s: state)))
    monkeypatch.setattr(fleet, "running_fleet", lambda *given, **settings: contextlib.nullcontext(replicas))
    rows = [fleet._cold(SimpleNamespace(replicas=1), tmp_path, tmp_path, "", store) for store in fleet.STORES]
    assert {row["store"]: row["store_mb"] for row in rows} == {"shared": 0.5, "none": 0}


@pytest.mark.skipif(os.name == "nt", reason="no orphans")
def test_process_that_lost_its_parent_is_left_behind(tmp_path):
    made = subprocess.run("sleep 100 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, check=True)
    orphan = psutil.Process(int(made.stdout))
    others = fleet.left_of(tmp_path, [], seconds=0)  # of tests before
    assert fleet.left_of(tmp_path, [orphan], seconds=0) == others + 1
    os.kill(orphan.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while fleet._runs(orphan) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fleet.left_of(tmp_path, [orphan], seconds=0) <= others


def test_figures_of_the_page_are_those_of_the_rows():
    page = (fleet.ROOT / "docs" / "lab" / "fleet.md").read_text(encoding="utf-8")
    rows = json.loads((fleet.ROOT / "docs" / "lab" / "fleet.json").read_text(encoding="utf-8"))["rows"]
    by_graph, by_chance = (next(row for row in rows if row.get("route") == route) for route in fleet.ROUTES)
    killed = f"{by_graph['answered']} answered, {by_graph['run_again']} of them run again, {by_graph['images']} images"
    assert (
        killed in page
        and f"{by_graph['met_graph']} of them" in page
        and f"by chance {by_chance['met_graph']:.2f}" in page
    )

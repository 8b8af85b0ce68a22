"""What a simulated fleet costs, where that is from, and what is concluded."""

import argparse
import json

import pytest

from bench import fleet_scale
from tools import Problem

COLD = [
    dict(layout="SDXL", contender="ours", first_call_s=50.0, eager_s=2.0, compilations=4),
    dict(layout="SDXL", contender="core", first_call_s=90.0, eager_s=2.0, compilations=1),
]
RESTART = [
    dict(model="unet", mode="warm_process", first_image_s=0.5, loaded=0),
    dict(model="unet", mode="store", first_image_s=2.5, loaded=4),
]
LOAD = dict(route="graph", prompts=200, met_graph=0.92, seconds=120.0, replicas=3)
FLEET = [LOAD, dict(store="shared", replicas=3, compilations=2, store_mb=0.5), dict(store="none", store_mb=0.0)]
CARD = [
    dict(part="steps", contender="cuda-graphs", batch=1, captures=1, compilations=3, steps_per_s=10.0),
    dict(part="session", contender="cuda-graphs", captures=1, compilations=0, stall_s=0.7),
    dict(part="session", contender="cuda-graphs", captures=1, compilations=3, stall_s=70.0),
    dict(part="sizes40", contender="cuda-graphs", captures=1, compilations=0, number=1, graphs_mb=120.0),
    dict(part="steps", contender="eager", batch=1, captures=0, compilations=0, steps_per_s=7.0),
]


@pytest.fixture
def files(tmp_path):
    def write(gpu=None, **rows):
        for name, listed in rows.items():
            content = {"machine": {"gpu": gpu if name == "card" else None}, "rows": listed}
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return sorted(tmp_path.glob("*.json"))

    return write


def test_costs_are_those_of_the_rows_and_their_source_is_named(files):
    known = fleet_scale.read(files(cold=COLD, restart=RESTART, fleet=FLEET), {})
    (sdxl,) = known.architectures
    assert (sdxl.name, sdxl.graphs, sdxl.compile_s, sdxl.load_s) == ("SDXL", 4, 12.0, 0.5)
    assert known.values["graph_mb"] == 0.25
    assert known.sources["load_s"][1].startswith("restart.json (CPU)")
    assumed = {name: value for name, (value, _) in fleet_scale.ASSUMED.items() if name != "graph_mb"}
    assert known.values == {**assumed, "graph_mb": 0.25}
    listed = {row["name"]: row["from"] for row in fleet_scale.given(known)}
    assert all(listed[name] == "**assumed**" for name in assumed)
    assert "assumed" not in listed["graph_mb"]


def test_rows_of_a_card_take_the_place_of_assumptions_and_what_is_named_goes_before_both(files):
    written = files("A card", cold=COLD, restart=RESTART, fleet=FLEET, card=CARD)
    known = fleet_scale.read(written, {"capture_mb": 5.0})
    assert (known.values["image_s"], known.values["capture_s"], known.values["capture_mb"]) == (2.0, 0.7, 5.0)
    assert "card.json (A card)" in known.sources["image_s"][1]
    assert "capture_mb" not in known.sources
    on_a_cpu = fleet_scale.read(files(None, card=CARD), {})
    assert on_a_cpu.values["image_s"] == fleet_scale.ASSUMED["image_s"][0]


@pytest.mark.parametrize("missing", ["cold", "restart"])
def test_missing_measurement_is_named(files, missing):
    rows = {"cold": COLD, "restart": RESTART, "fleet": FLEET}
    with pytest.raises(Problem, match=f"no rows of bench {missing}"):
        fleet_scale.read(files(**{name: rows[name] if name != missing else [] for name in rows}), {})


def test_assumptions_are_numbers_that_there_are():
    assert fleet_scale.assumed(["models=5", "load=0.5"]) == {"models": 5, "load": 0.5}
    with pytest.raises(Problem, match="no assumption size"):
        fleet_scale.assumed(["size=5"])
    with pytest.raises(Problem, match="write a number"):
        fleet_scale.assumed(["models=many"])
    with pytest.raises(Problem, match="load is above 0"):
        fleet_scale.assumed(["load=0"])
    with pytest.raises(Problem, match="capture_s is at least 0"):
        fleet_scale.assumed(["capture_s=-1"])
    assert fleet_scale.assumed(["capture_s=0"]) == {"capture_s": 0}


@pytest.mark.parametrize(
    ("better", "worse", "least"),
    [
        ({1: 10, 4: 5, 16: 5}, {1: 10, 4: 10, 16: 10}, 4),
        ({1: 5, 4: 10, 16: 5}, {1: 10, 4: 10, 16: 10}, 16),  # not below
        ({1: 5, 4: 5, 16: 10}, {1: 10, 4: 10, 16: 10}, None),
        ({1: 0, 4: 0}, {1: 0, 4: 0}, 1),
    ],
)
def test_what_pays_does_so_at_all_larger_sizes_too(better, worse, least):
    assert fleet_scale.pays_from(better, worse) == least


def test_page_plots_and_rows_are_written_and_the_same_each_time(files, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_scale, "CHANGED_AT", 2)
    monkeypatch.setattr(fleet_scale, "CHANGES", fleet_scale.CHANGES[:2])
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    fleet_scale.add_arguments(parser)
    costs = [str(file) for file in files(cold=COLD, restart=RESTART, fleet=FLEET)]
    pages = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        few = ["--workers", "1", "4", "--assume", "prompts=20", "models=4"]
        fleet_scale.run(parser.parse_args(["--simulate", *few, "--costs", *costs, "--out", str(folder)]))
        pages.append((folder / "scale.md").read_text(encoding="utf-8"))
        assert {file.name for file in folder.iterdir()} == {
            *("scale.md", "scale.json", "scale-waiting.png", "scale-met.png")
        }
    assert pages[0] == pages[1]
    assert "(CPU);\n`image_s`, `model_s`, `capture_s`, `capture_mb` are assumed, not measured" in pages[0]
    measured = fleet_scale.read(files("A card", card=CARD), {})
    fleet_scale.save(tmp_path / "b", json.loads((tmp_path / "a" / "scale.json").read_text())["rows"], measured)
    assert "\n`model_s` are assumed, not measured" in (tmp_path / "b" / "scale.md").read_text(encoding="utf-8")
    rows = json.loads((tmp_path / "a" / "scale.json").read_text())["rows"]
    (check,) = [row for row in rows if row["part"] == "check"]
    assert check["measured"] == 0.92
    assert check["simulated"] == pytest.approx(0.94, abs=0.02)  # of 12 keys, all but the first of each

"""`dev.py bench session --quick`: after the first image nothing is compiled, whatever the session asks for."""

import json
import os
import subprocess
import sys

import pytest
import torch
from kit import tiny_models

from dev import ROOT
from dev.bench.compilations import RecompileLimit, empty_inductor_cache
from dev.bench.session import Session
from dev.bench.session_plan import STEPS, TOLERANCE

pytestmark = pytest.mark.thorough  # a whole bench as a subprocess, and two of its steps with core's node

MODELS = ("SD1.5 UNet", "Flux DiT")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The bench's rows by (model, contender), in the order of its steps. In a process of its own, as users run it."""
    path = tmp_path_factory.mktemp("session") / "rows.json"
    arguments = ["--quick", "--dtype", "fp32", "--contenders", "ours", "--json", str(path)]
    command = [sys.executable, "-m", "dev.bench.session", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert path.is_file(), ended.stderr[-2000:]
    assert ended.returncode == 0, ended.stderr.splitlines()[-1]
    grouped = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        grouped.setdefault((row["model"], row["contender"]), []).append(row)
    return grouped


@pytest.mark.parametrize("model", MODELS)
def test_ours_compiles_in_the_first_step_and_nowhere_else(rows, model):
    ours = rows[model, "ours"]
    assert [row["step"] for row in ours] == [step.name for step in STEPS]
    assert ours[0]["compilations"] > 0
    assert {row["step"]: row["compilations"] for row in ours[1:] if row["compilations"]} == {}
    assert not any(row["graph_breaks"] or row["uncompiled"] for row in ours)


@pytest.mark.parametrize("model", MODELS)
def test_ours_equals_eager_within_tolerance_in_every_step(rows, model):
    assert {row["step"]: row for row in rows[model, "ours"] if row["relative_diff"] > TOLERANCE[row["dtype"]]} == {}


def test_cores_node_compiles_again_at_another_size():
    """Two steps of it alone: the whole session takes minutes."""
    with empty_inductor_cache(), RecompileLimit() as limit, torch.inference_mode():
        session = Session(tiny_models.FLUX_FAMILY, "core", "fp32", quick=True, limit=limit)
        images = {step.name: torch.ones(()) for step in STEPS}
        counted = [session.row(step, images)["compilations"] for step in STEPS[:2]]
    assert all(counted)

"""A fleet's replica, without Serve."""

import os

import pytest

pytest.importorskip("ray.serve", reason="an optional package of 200 MB")

# ruff: noqa: E402
from comfy_accel.accel.hosts.ray import replica as fleet_replica


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners")
def test_temporary_folder_that_is_somebody_elses_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_replica.tempfile, "tempdir", str(tmp_path))
    ours = fleet_replica._own_folder().parent
    assert ours.parent == tmp_path and ours.stat().st_mode & 0o77 == 0
    left = ours / "999999999-0"  # no process has such a number
    left.mkdir()
    assert fleet_replica._own_folder().parent == ours and not left.exists()
    user = os.getuid()
    monkeypatch.setattr(fleet_replica.os, "getuid", lambda: user + 1)
    (tmp_path / f"comfy-accel-ray-{user + 1}").mkdir()  # by us, in the name of another
    (tmp_path / f"comfy-accel-ray-{user + 1}" / "999999999-0").mkdir()
    other = fleet_replica._own_folder().parent
    assert other.name != f"comfy-accel-ray-{user + 1}" and other.stat().st_mode & 0o77 == 0
    assert (tmp_path / f"comfy-accel-ray-{user + 1}" / "999999999-0").exists()

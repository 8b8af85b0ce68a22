"""A fleet's replica, without Serve."""

import os
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="an optional package of 200 MB")

# ruff: noqa: E402
from fleet import replica as fleet_replica
from fleet.comfyui_process import Gone


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners")
def test_temporary_folder_that_is_somebody_elses_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_replica.tempfile, "tempdir", str(tmp_path))
    ours = fleet_replica._own_folder().parent
    assert ours.parent == tmp_path and ours.stat().st_mode & 0o77 == 0
    here = fleet_replica._own_folder().name.partition("-")[2].rpartition("-")[0]
    assert os.uname().nodename in here or not os.path.isdir("/proc")
    # No process has such a number.
    left, *others = (ours / f"999999999-{where}-0" for where in (here, f"{here}1", f"another-{here.split('-')[-1]}"))
    for folder in (left, *others):
        folder.mkdir()
    assert fleet_replica._own_folder().parent == ours and not left.exists()
    assert all(folder.exists() for folder in others)  # of a container, or a machine, with numbers of its own
    user = os.getuid()
    monkeypatch.setattr(fleet_replica.os, "getuid", lambda: user + 1)
    (tmp_path / f"comfy-accel-ray-{user + 1}").mkdir()  # by us, in the name of another
    (tmp_path / f"comfy-accel-ray-{user + 1}" / f"999999999-{here}-0").mkdir()
    other = fleet_replica._own_folder().parent
    assert other.name != f"comfy-accel-ray-{user + 1}" and other.stat().st_mode & 0o77 == 0
    assert (tmp_path / f"comfy-accel-ray-{user + 1}" / f"999999999-{here}-0").exists()


@pytest.mark.parametrize("looks", [0, 3])
async def test_replica_whose_comfyui_ended_under_a_prompt_ends_before_the_front_hears_of_it(
    tmp_path, monkeypatch, looks
):
    """Or the front sends the prompt to it again. looks: after which the process is seen to have ended."""

    class ComfyUI:
        work, made, asked = tmp_path / "work", {}, 0

        @property
        def ended(self):
            self.asked += 1
            return self.asked > looks

        def read_log(self):
            return ""

        async def run(self, prompt_id, body):
            yield "accepted", {}
            raise Gone("ComfyUI went away")

    monkeypatch.setattr(fleet_replica.os, "_exit", sys.exit)
    alone = type("Alone", (fleet_replica.Replica,), {"__del__": lambda replica: None})
    replica = alone.__new__(alone)
    vars(replica).update(
        _comfyui=ComfyUI(),
        _results=SimpleNamespace(entry=lambda prompt_id: None),
        _keys=fleet_replica.Keys.__new__(fleet_replica.Keys),
        _names={"replica": "a", "pid": 1},
    )
    with pytest.raises(SystemExit):
        async for _ in replica.run("id", "", {}):
            pass

"""Bundles and files that somebody made to have their code run: nothing opens them before a person says so."""

import json
import os
import pickle

import pytest
import torch
from comfy_accel.accel.compile import block_compiler
from comfy_accel.accel.core import torch_internals
from comfy_accel.accel.fingerprint.block_call import Call
from comfy_accel.accel.store import bundle as store_bundle
from kit.stores import built, key, reasons, run_command, save, store


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


def load_for_real(home):
    """What a run does when it meets the kind: the store, and where that opens something, torch's own reading of it."""
    worker = store(home)

    def build(data, facts):
        return block_compiler.load_block(torch.nn.Identity(), Call(key().kind, ("tuple", ("tensor",))), data, facts)

    assert built(worker, build) is None
    return reasons(worker)[0]


@pytest.fixture
def hostile(tmp_path):
    """(bundle, mark): a bundle whose one graph leaves the mark if it is opened, in the way that torch opens one."""
    by_running = torch_internals.lacking(torch_internals.AHEAD_OF_TIME) is not None
    data = (b"" if by_running else b"\n") + pickle.dumps(Hostile(tmp_path / "mark"))
    save(store(tmp_path / "attacker"), data=data)
    assert run_command(tmp_path / "attacker", "export", tmp_path / "hostile") == 0
    return tmp_path / "hostile", tmp_path / "mark"


def test_hostile_bundle_is_not_opened_unless_it_is_trusted(tmp_path, hostile):
    bundle, mark = hostile
    assert run_command(tmp_path / "victim", "import", bundle) == 1
    assert "nothing was saved" in load_for_real(tmp_path / "victim")
    for seal in ("0" * 64, "", None, 5, ["0"]):  # unpacked into the folder, with seals of the attacker's choice
        unpack(bundle, tmp_path / "victim" / "graphs", seal)
        assert "another installation" in load_for_real(tmp_path / "victim")
        assert run_command(tmp_path / "victim", "verify") == 1
        assert run_command(tmp_path / "victim", "list") == 0
    assert not mark.exists()
    # And it is hostile: whoever trusts it runs it.
    assert run_command(tmp_path / "victim", "import", bundle, "--trust") == 0
    assert "cannot be loaded" in load_for_real(tmp_path / "victim")
    assert mark.exists()


def test_hostile_bytes_beside_a_manifest_of_ours_are_not_opened(tmp_path, hostile):
    bundle, mark = hostile
    save(store(tmp_path / "victim"))
    (file,) = (tmp_path / "victim" / "graphs").glob("*.bin")
    ((_, data),) = store_bundle.read(bundle)
    for fitting in (data, data[:4]):  # of another size, and of the size that the manifest tells
        file.write_bytes(fitting)
        assert load_for_real(tmp_path / "victim")
    assert not mark.exists()


def unpack(bundle, folder, seal):
    folder.mkdir(parents=True, exist_ok=True)
    for entry, data in store_bundle.read(bundle):
        (folder / f"{entry.stem}.bin").write_bytes(data)
        (folder / f"{entry.stem}.json").write_text(json.dumps({**json.loads(entry.canonical()), "seal": seal}))


def test_no_command_unpickles(tmp_path, hostile):
    bundle, mark = hostile
    for command in (["list"], ["verify"], ["export", tmp_path / "again"]):
        assert run_command(tmp_path / "attacker", *command) == 0
    assert run_command(tmp_path / "worker", "import", bundle, "--trust") == 0
    assert run_command(tmp_path / "worker", "prune", "--max-mb", 0) == 0
    assert not mark.exists()

"""Bundles, and the command that makes and takes them."""

import io
import os
import pickle
import sys

import pytest
import torch
from comfy_accel.accel import __main__
from comfy_accel.accel.compile import block_compiler
from comfy_accel.accel.fingerprint.block_call import Call
from comfy_accel.accel.store import bundle as store_bundle
from comfy_accel.accel.store import location, manifest
from comfy_accel.accel.store.folder import Folder
from kit.stores import built, key, load, reasons, run_command, save, store


@pytest.fixture
def bundle(tmp_path):
    """A bundle that another installation made of two graphs."""
    for name, data in (("a", b"code of a"), ("b", b"code of b")):
        save(store(tmp_path / "builder"), name, data)
    assert run_command(tmp_path / "builder", "export", tmp_path / "bundle") == 0
    return tmp_path / "bundle"


def line(text):
    """A manifest as it stands in a bundle, with its checksum."""
    return manifest._checksum(text) + b" " + text + b"\n"


def change(bundle, edit):
    """The bundle with each manifest and each graph's bytes run through edit("manifest" or "data", bytes)."""
    content = [store_bundle.HEAD]
    for entry, data in list(store_bundle.read(bundle)):
        content += [line(edit("manifest", entry.line().partition(b" ")[2][:-1])), edit("data", data)]
    bundle.write_bytes(b"".join([*content, store_bundle.END]))


def test_trusted_bundle_is_loaded_on_another_machine_and_no_export_overwrites_it(tmp_path, bundle, capsys):
    assert run_command(tmp_path / "worker", "import", bundle, "--trust") == 0
    assert load(store(tmp_path / "worker"), "a")[0] == b"code of a"
    assert load(store(tmp_path / "worker"), "b")[0] == b"code of b"
    assert "2 graphs imported" in capsys.readouterr().out
    before = bundle.read_bytes()
    assert run_command(tmp_path / "worker", "export", bundle) == 1
    assert bundle.read_bytes() == before and "exists" in capsys.readouterr().err


def in_manifest(old, new):
    """The change that puts a text into each manifest."""
    return lambda part, data: data.replace(old, new) if part == "manifest" else data


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda part, data: data[:-1] + b"x" if part == "data" else data, "have changed"),
        (lambda part, data: data[:-1] if part == "data" else data, "have changed"),
        (lambda part, data: b"[]" if part == "manifest" else data, "damaged"),
        (in_manifest(b'"key": "', b'"key": "../../'), "damaged"),
        (in_manifest(b'"format": 5', b'"format": 6'), "format"),
        (in_manifest(b'"torch": "', b'"torch": 5, "x": "'), "damaged"),
        (in_manifest(b'"size": 9', b'"size": -9'), "-9 bytes"),
        (in_manifest(b'"size": 9', b'"size": 1e9'), "damaged"),
        (in_manifest(b'"size": 9', b'"size": 900000000'), "bytes of 900000000"),
        (lambda part, data: b"[" * 10**5 if part == "manifest" else data, "damaged"),
    ],
)
def test_damaged_bundle_brings_nothing(tmp_path, bundle, capsys, edit, said):
    change(bundle, edit)
    assert run_command(tmp_path / "worker", "import", bundle, "--trust") == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("worker/graphs/*"))


def test_every_truncated_bundle_is_found_to_be_one(tmp_path, bundle):
    whole = bundle.read_bytes()
    sound = list(store_bundle.read(bundle))
    for length in range(len(whole)):
        bundle.write_bytes(whole[:length])
        try:
            *found, last = store_bundle.read(bundle)
        except store_bundle.BadBundle as bad:
            assert str(bad) == "it is not a bundle" and length < len(store_bundle.HEAD)
        else:
            kept = [item for item in found if not isinstance(item, store_bundle.Outcome)]
            assert kept == sound[: len(kept)] and last.reason
    bundle.write_bytes(whole[:-1])
    assert run_command(tmp_path / "worker", "import", bundle, "--trust") == 1
    assert len(list(tmp_path.glob("worker/graphs/*"))) == 2  # only the end is missing


def test_every_flipped_bit_of_a_bundle_ends_in_a_sentence(tmp_path, capsys):
    save(store(tmp_path / "builder"))
    bundle = tmp_path / "bundle"
    run_command(tmp_path / "builder", "export", bundle)
    whole = bundle.read_bytes()
    (sound,) = store_bundle.read(bundle)
    ends = {}
    for bit in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        bundle.write_bytes(changed)
        try:
            found = list(store_bundle.read(bundle))
        except store_bundle.BadBundle as bad:
            ends[str(bad)] = changed
        else:
            (reason,) = [item.reason for item in found if isinstance(item, store_bundle.Outcome)]
            assert found[0] == sound or len(found) == 1
            ends[reason] = changed
    assert len(ends) == 3
    for changed in ends.values():
        bundle.write_bytes(changed)
        assert run_command(tmp_path / "worker", "import", bundle, "--trust") == 1
        assert capsys.readouterr().err.strip()


def test_what_never_ends_is_refused_at_once_and_a_sparse_file_does_not_fill_the_memory(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", "/dev/zero"):
        assert run_command(tmp_path / "worker", "import", endless) == 1
        assert "not a regular file" in capsys.readouterr().err
    for head, says in ((b"", "it is not a bundle"), (store_bundle.HEAD, "is damaged")):
        (tmp_path / "sparse").write_bytes(head)
        with open(tmp_path / "sparse", "r+b") as file:
            file.truncate(40 << 30)
        assert run_command(tmp_path / "worker", "import", tmp_path / "sparse") == 1
        assert says in "".join(capsys.readouterr())


def test_store_stays_within_its_bytes_and_a_bundle_that_is_larger_is_refused(tmp_path, monkeypatch, capsys):
    for name in ("old", "new"):
        save(store(tmp_path / name), name, data=bytes(700 << 10))
        run_command(tmp_path / name, "export", tmp_path / f"{name} bundle")
    run_command(tmp_path / "worker", "import", tmp_path / "old bundle", "--trust")
    monkeypatch.setenv(location.LIMIT_VARIABLE, "1")
    assert run_command(tmp_path / "worker", "import", tmp_path / "new bundle", "--trust") == 0
    assert [load(store(tmp_path / "worker"), name) is None for name in ("old", "new")] == [True, False]
    save(store(tmp_path / "new"), data=bytes(700 << 10))
    run_command(tmp_path / "new", "export", tmp_path / "large")
    assert run_command(tmp_path / "another", "import", tmp_path / "large", "--trust") == 1
    assert "raise its limit first" in capsys.readouterr().err
    assert not (tmp_path / "another" / "graphs").exists()
    monkeypatch.setenv(location.LIMIT_VARIABLE, "0")  # saves nothing, and that was not saving
    assert run_command(tmp_path / "another", "import", tmp_path / "large", "--trust") == 0
    assert load(store(tmp_path / "another")) is not None


def test_bundle_of_another_torch_is_a_miss_that_names_it(tmp_path, bundle):
    here = torch.__version__.encode()
    change(bundle, in_manifest(b'"torch": "' + here, b'"torch": "2.99.0'))
    assert run_command(tmp_path / "worker", "import", bundle, "--trust") == 0
    worker = store(tmp_path / "worker")
    assert load(worker, "a") is None
    assert reasons(worker)[0].startswith("saved with another torch (2.99.0 ")


def test_export_that_is_stopped_leaves_no_file(tmp_path, monkeypatch):
    save(store(tmp_path / "builder"))

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "read_data", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_command(tmp_path / "builder", "export", tmp_path / "bundle")
    assert [file.name for file in tmp_path.iterdir()] == ["builder"]


def test_folder_with_letters_that_the_output_has_not_is_listed(tmp_path, monkeypatch):
    home, out = tmp_path / "图像", io.BytesIO()
    save(store(home), "a")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "cp1252", write_through=True))
    monkeypatch.setattr(sys, "argv", ["accel", "store", "--home", str(home), "list"])
    assert __main__.main() == 0
    assert b"1 graph," in out.getvalue() and b"\\u56fe\\u50cf" in out.getvalue()


def test_one_graph_that_cannot_be_read_stops_no_command(tmp_path, capsys):
    for name in "abc":
        save(store(tmp_path), name, name.encode())
    link, damaged, _ = sorted((tmp_path / "graphs").iterdir())
    link.unlink()
    link.symlink_to("nowhere")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert run_command(tmp_path, "list") == 0
    assert run_command(tmp_path, "export", tmp_path / "bundle") == 1
    told = capsys.readouterr()
    assert "1 graph exported" in told.out and "has 0 bytes of 1" in told.err  # a link is no file of the store
    Folder(tmp_path / "graphs").prune(1 << 20)


def test_text_of_a_bundle_does_not_reach_the_terminal_as_it_is(tmp_path, bundle, capsys):
    change(bundle, in_manifest(b"Block", b"\\u001b[2J"))
    run_command(tmp_path / "worker", "import", bundle)
    assert "\x1b" not in capsys.readouterr().out


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


def load_for_real(home):
    """Why a run that meets the kind does not load it, in the way that torch reads a graph."""
    worker = store(home)

    def build(data, facts):
        return block_compiler.load_block(torch.nn.Identity(), Call(key().kind, ("tuple", ("tensor",))), data, facts)

    assert built(worker, build) is None
    return reasons(worker)[0]


def test_hostile_bundle_runs_nothing_before_a_person_has_trusted_it(tmp_path, capsys):
    mark, bundle = tmp_path / "mark", tmp_path / "hostile"
    save(store(tmp_path / "attacker"), data=pickle.dumps(Hostile(mark)))
    for command in (["list"], ["export", bundle]):
        assert run_command(tmp_path / "attacker", *command) == 0
    capsys.readouterr()
    assert run_command(tmp_path / "victim", "import", bundle) == 1
    assert "A bundle is code" in capsys.readouterr().err
    assert "nothing was saved" in load_for_real(tmp_path / "victim") and not (tmp_path / "victim").exists()
    assert run_command(tmp_path / "victim", "import", bundle, "--trust") == 0
    assert not mark.exists()
    # And it is hostile: whoever trusts it runs it.
    assert "cannot be loaded" in load_for_real(tmp_path / "victim") and mark.exists()

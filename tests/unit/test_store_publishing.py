"""Graphs that somebody published: signed, believed by name, and taken over where they fit."""

import json
import os
import shutil
import sys
import time

import pytest
from comfy_accel.accel.store import key as store_key
from comfy_accel.accel.store import publishing
from comfy_accel.accel.store.folder import LocalFolder
from comfy_accel.accel.store.publishing import CannotPublish, Label, read_trusted, trust
from kit.stores import load, run_command, save, store

posix = pytest.mark.skipif(os.name != "posix", reason="only there a file says who may write it")
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason="an optional package")


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """Folder of a publisher's installation, which has two graphs and has pushed them; its public key."""
    monkeypatch.delenv("ACCEL_STORE", raising=False)  # others turn the store off for all of their tests
    home = tmp_path / "publisher"
    for name in "ab":
        save(store(home), name, data=name.encode())
    public = publishing.new_key(home / "private")
    assert run_command(home, "push", tmp_path / "shelf", "--key", home / "private") == 0
    return home, public


@pytest.fixture
def shelf(tmp_path, publisher):
    return tmp_path / "shelf"


@pytest.fixture
def reader(tmp_path, publisher):
    """Folder of another installation, which trusts the publisher."""
    home = tmp_path / "reader"
    trust(home / "publishers.json", "Ada", publisher[1])
    return home


def label_file(shelf):
    (file,) = shelf.glob("*.json")
    return file


def relabel(shelf, change, private=None):
    """Change the label's JSON; sign it again, under the names that it then has, if a private key's file is given."""
    file = label_file(shelf)
    signed = json.loads(file.read_text())
    earlier = Label(**signed["label"]).bundle
    change(signed)
    if private is not None:
        label = Label(**signed["label"])
        signer = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private.read_text()))
        signed["signature"] = signer.sign(label.canonical()).hex()
        signed["key"] = signer.public_key().public_bytes_raw().hex()
        file = file.rename(shelf / f"{label.stem}.json")
        (shelf / earlier).rename(shelf / label.bundle)
    file.write_text(json.dumps(signed))


def refused(home, shelf, capsys, match):
    """Whether pulling says one sentence that matches, and leaves the store without a graph."""
    capsys.readouterr()
    assert run_command(home, "pull", shelf) == 1
    told = capsys.readouterr()
    (sentence,) = told.err.strip().splitlines()
    assert match in sentence and sentence.endswith(".")
    assert "0 graphs pulled" in told.out
    assert load(store(home)) is None and not list((home / "graphs").glob("*"))


def test_graphs_of_a_trusted_publisher_are_loaded_with_a_secret_of_our_own(reader, shelf, capsys):
    assert run_command(reader, "pull", shelf) == 0
    assert "2 graphs by Ada" in capsys.readouterr().out
    here = store(reader)
    assert load(here, "a")[0] == b"a" and load(here, "b")[0] == b"b"
    assert run_command(reader, "verify") == 0


def test_label_names_what_the_graphs_need(shelf):
    label = json.loads(label_file(shelf).read_text())["label"]
    assert {"torch", "system", "device", "python", "engine"} <= set(label["environment"])
    assert label["kinds"] == ["Block"]


def test_publisher_who_is_not_trusted_is_refused_by_key(tmp_path, publisher, shelf, capsys):
    refused(tmp_path / "nobody", shelf, capsys, f"the key {publisher[1]}, which nobody here trusts")


def test_bundle_without_a_signature_is_refused(reader, shelf, capsys):
    relabel(shelf, lambda signed: signed.pop("signature"))
    refused(reader, shelf, capsys, "nobody signed it")
    label_file(shelf).unlink()
    assert run_command(reader, "pull", shelf) == 0 and "0 graphs pulled" in capsys.readouterr().out


def test_signature_of_another_is_refused(tmp_path, reader, publisher, shelf, capsys):
    """Both as who it is, and under the trusted publisher's key."""
    publishing.new_key(tmp_path / "mallory")
    relabel(shelf, lambda signed: None, tmp_path / "mallory")
    refused(reader, shelf, capsys, "which nobody here trusts")
    relabel(shelf, lambda signed: signed.update(key=publisher[1]))
    refused(reader, shelf, capsys, "its signature is not Ada's: somebody changed it")


def test_file_that_cannot_be_read_keeps_no_other_bundle_away(reader, shelf, capsys):
    (shelf / f"graphs-{'0' * 16}.json").write_bytes(b" " * (publishing.LARGEST_LABEL + 1))
    assert run_command(reader, "pull", shelf) == 0
    told = capsys.readouterr()
    assert "2 graphs pulled" in told.out and "cannot be read" in told.err


def test_bundle_that_is_gone_is_refused(reader, shelf, capsys):
    """As for a moment while the publisher replaces it."""
    (file,) = shelf.glob("*.bundle")
    file.unlink()
    refused(reader, shelf, capsys, f"{file.name} cannot be read")


@pytest.mark.parametrize(
    "change",
    [
        lambda signed: signed["label"]["environment"].update(torch="0.1"),
        lambda signed: signed["label"].update(serial=2**40),
        lambda signed: signed["label"].update(sha256="0" * 64),
        lambda signed: signed["label"].update(size=1),
        lambda signed: signed["label"].update(kinds=["Other"]),
        lambda signed: signed.update(signature="00" * 64),
        lambda signed: signed.update(signature="no hex"),
    ],
)
def test_label_that_was_changed_is_refused(reader, shelf, capsys, change):
    relabel(shelf, change)
    refused(reader, shelf, capsys, "its signature is not Ada's")


def test_bundle_beyond_the_limit_is_not_pushed_and_says_so_when_pulled(
    publisher, reader, shelf, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(publishing, "LARGEST_BUNDLE", 100)
    assert run_command(publisher[0], "push", tmp_path / "other", "--key", publisher[0] / "private") == 1
    assert "the bundle has more than" in capsys.readouterr().err
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").iterdir())
    refused(reader, shelf, capsys, "bytes, more than 100")


@pytest.mark.parametrize("place", [0, 200, -1])
def test_bundle_that_was_changed_is_refused(reader, shelf, capsys, place):
    (file,) = shelf.glob("*.bundle")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    refused(reader, shelf, capsys, "its bundle is not the one that was signed")


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        ("system", "linux riscv64 glibc-2.39", "saved with another system (linux riscv64"),
        ("torch", "2.0.0 abc", "saved with another torch (2.0.0"),
        ("device", "cuda:0 NVIDIA H200 (9, 0) toolkit 12.8 triton 3.6.0", "another device (cuda:0 NVIDIA H200 (9, 0)"),
        ("device", "cpu AVX2 000000000000 8 threads", "another device (cpu AVX2"),
    ],
)
def test_bundle_for_another_machine_is_refused(reader, publisher, shelf, capsys, name, other, says):
    relabel(shelf, lambda signed: signed["label"]["environment"].update({name: other}), publisher[0] / "private")
    refused(reader, shelf, capsys, says)


def test_graph_of_another_machine_under_a_label_that_fits_is_refused(reader, publisher, shelf, capsys):
    """A publisher's mistake, or worse: what the label does not speak of is not taken over with it."""
    relabel(shelf, lambda signed: signed["label"]["environment"].update(options="other"), publisher[0] / "private")
    refused(reader, shelf, capsys, "was made elsewhere than its label says")


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"label": 5}',
        '{"label": {"environment": {}, "sha256": "../x", "size": 0, "kinds": [], "serial": 1}}',
        '{"label": {"environment": {}, "sha256": "' + "0" * 64 + '", "size": 0, "kinds": []}}',
        "[" * 60_000,
    ],
)
def test_label_that_is_damaged_is_refused(reader, shelf, capsys, damage):
    label_file(shelf).write_text(damage)
    refused(reader, shelf, capsys, "its label is damaged")


def test_number_of_threads_does_not_keep_a_bundle_away(publisher, shelf, reader):
    """They are those of ComfyUI, which the command does not know; the store asks again before it loads."""
    environment = json.loads(label_file(shelf).read_text())["label"]["environment"]
    assert store_key.misfit(environment) is None
    more = environment["device"].replace(" threads", "9 threads")
    assert more != environment["device"] and store_key.misfit({**environment, "device": more}) is None


def test_pushing_again_replaces_what_was_there_of_the_same_environment(publisher, shelf, reader):
    home, _ = publisher
    save(store(home), "c", data=b"c")
    assert run_command(home, "push", shelf, "--key", home / "private") == 0
    assert len(list(shelf.iterdir())) == 2
    assert run_command(reader, "pull", shelf) == 0 and load(store(reader), "c")[0] == b"c"


def test_graphs_of_another_publisher_are_not_replaced(publisher, shelf, tmp_path, capsys):
    before = {file.name: file.read_bytes() for file in shelf.iterdir()}
    other = tmp_path / "other"
    save(store(other))
    publishing.new_key(other / "private")
    assert run_command(other, "push", shelf, "--key", other / "private") == 1
    assert "another publisher's: push elsewhere" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in shelf.iterdir()} == before


def push_again(publisher, shelf, *stems):
    """Publish anew, without these of the publisher's graphs."""
    home, _ = publisher
    for stem in stems:
        for end in (".json", ".bin"):
            (home / "graphs" / (stem + end)).unlink()
    assert run_command(home, "push", shelf, "--key", home / "private") == 0


def put_back(earlier, shelf):
    shutil.rmtree(shelf)
    shutil.copytree(earlier, shelf)


def test_withdrawn_graph_that_somebody_puts_back_is_refused(publisher, shelf, reader, tmp_path, capsys, monkeypatch):
    withdrawn = sorted(file.stem for file in (publisher[0] / "graphs").glob("*.json"))[0]
    earlier = shutil.copytree(shelf, tmp_path / "earlier")
    monkeypatch.setattr(time, "time", lambda: 4e8)  # nor does a publisher's clock that was set back make one older
    push_again(publisher, shelf, withdrawn)
    assert run_command(reader, "pull", shelf) == 0
    put_back(earlier, shelf)
    capsys.readouterr()
    assert run_command(reader, "pull", shelf) == 1
    told = capsys.readouterr()
    assert "0 graphs pulled" in told.out and not (reader / "graphs" / f"{withdrawn}.json").exists()
    assert "it is older (number " in told.err
    assert f"if its publisher says that it is the latest, take {label_file(shelf).stem} out of {reader}" in told.err
    (line,) = json.loads((reader / "pulled.json").read_text())
    assert line == f"{publisher[1]} {label_file(shelf).stem}"
    (reader / "pulled.json").write_text("{}")
    assert run_command(reader, "pull", shelf) == 0 and load(store(reader), "a") and load(store(reader), "b")


def test_what_was_pulled_before_is_pulled_again_and_what_is_newer_too(publisher, shelf, reader, capsys):
    for _ in range(2):
        assert run_command(reader, "pull", shelf) == 0
        push_again(publisher, shelf)
        assert run_command(reader, "pull", shelf) == 0
    assert capsys.readouterr().out.count("2 graphs pulled") == 4


def test_label_under_another_name_is_not_counted_twice(reader, shelf, capsys):
    shutil.copy(label_file(shelf), shelf / f"graphs-{'0' * 16}.json")
    assert run_command(reader, "pull", shelf) == 0
    told = capsys.readouterr()
    assert "2 graphs pulled" in told.out and "is not what its name says" in told.err


@posix
@pytest.mark.parametrize("name", ["publishers.json", "pulled.json"])
@pytest.mark.parametrize("whose", ["written by others", "of another user", "a link"])
def test_list_that_others_may_have_written_is_not_believed(reader, shelf, tmp_path, capsys, name, whose):
    assert run_command(reader, "pull", shelf) == 0
    shutil.rmtree(reader / "graphs")
    if whose == "a link":
        (reader / name).rename(tmp_path / "elsewhere")
        (reader / name).symlink_to(tmp_path / "elsewhere")
    elif whose == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(reader / name, 65534, 65534)
    else:
        (reader / name).chmod(0o664)
    capsys.readouterr()
    assert run_command(reader, "pull", shelf) == 1
    says = f"{name} is a link" if whose == "a link" else f"{name} can be changed by others: chmod 644 it and own it"
    assert says in capsys.readouterr().err
    assert not (reader / "graphs").exists()
    if name == "publishers.json":
        assert run_command(reader, "trust", "Bob", "0" * 64) == 1


@posix
def test_list_is_believed_that_was_made_while_files_are_open_to_a_group(reader, publisher, shelf):
    before = os.umask(0o002)
    try:
        assert run_command(reader, "trust", "Bob", "0" * 64) == 0
    finally:
        os.umask(before)
    assert run_command(reader, "pull", shelf) == 0


@posix
def test_private_key_that_others_can_read_signs_nothing(publisher, tmp_path, capsys):
    home, _ = publisher
    (home / "private").chmod(0o640)
    assert run_command(home, "push", tmp_path / "other", "--key", home / "private") == 1
    assert "private can be read by others: chmod 600 it and own it." in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_name_stands_for_one_key(reader, publisher, capsys):
    with pytest.raises(CannotPublish, match="Ada is trusted here with another key"):
        trust(reader / "publishers.json", "Ada", "0" * 64)
    trust(reader / "publishers.json", "Ada", publisher[1].upper())
    assert read_trusted(reader / "publishers.json") == {"Ada": publisher[1]}
    for name, key in (("", "0" * 64), ("a\nb", "0" * 64), ("Bob", "0" * 63), ("Bob", "")):
        with pytest.raises(CannotPublish):
            trust(reader / "publishers.json", name, key)
    assert run_command(reader, "trust") == 0
    assert f"{publisher[1]}  Ada" in capsys.readouterr().out
    assert run_command(reader, "trust", "Bob") == 1
    (reader / "publishers.json").write_text("[]")
    assert run_command(reader, "trust") == 1


def test_private_key_is_its_owners_alone_and_is_never_replaced(publisher, capsys):
    home, public = publisher
    if os.name == "posix":
        assert (home / "private").stat().st_mode & 0o777 == 0o600
    assert run_command(home, "key", home / "private") == 1
    capsys.readouterr()
    assert run_command(home, "key", home / "other") == 0
    assert capsys.readouterr().out.splitlines()[-1] != public
    (home / "wrong").touch(0o600)
    (home / "wrong").write_text("no key")
    assert run_command(home, "push", home / "shelf", "--key", home / "wrong") == 1
    assert "holds no private key of ours" in capsys.readouterr().err
    assert not (home / "shelf").exists()


def test_without_the_package_one_sentence_says_what_to_install(reader, shelf, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    assert run_command(reader, "pull", shelf) == 1
    assert "pip install cryptography" in capsys.readouterr().err
    assert load(store(reader)) is None


def test_shelf_may_be_an_object_store(tmp_path, publisher, reader):
    pytest.importorskip("fsspec", reason="an optional package")
    home, _ = publisher
    address = f"memory://{tmp_path.name}"
    assert run_command(home, "push", address, "--key", home / "private") == 0
    assert run_command(reader, "pull", address) == 0
    assert load(store(reader), "a")[0] == b"a"
    assert not list(LocalFolder(tmp_path / "shelf").unfinished())

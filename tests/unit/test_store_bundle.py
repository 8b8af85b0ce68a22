"""Bundles, and the command that makes and takes them."""

import io
import json
import os
import pickle
import zipfile

import pytest
from comfy_accel.accel import store_command, store_location, store_trust
from store_kit import load, reasons, save, store


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (store_trust.KEY_VARIABLE, store_location.VARIABLE, store_location.LIMIT_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def run(home, *arguments):
    return store_command.main(["--home", str(home), *map(str, arguments)])


@pytest.fixture
def bundle(tmp_path):
    """A bundle that another installation made of two graphs."""
    for name, data in (("a", b"code of a"), ("b", b"code of b")):
        save(store(tmp_path / "builder"), name, data)
    assert run(tmp_path / "builder", "export", tmp_path / "bundle") == 0
    return tmp_path / "bundle"


def change(bundle, edit):
    """The bundle with each of its files' bytes run through edit(name, bytes); None leaves the file out."""
    with zipfile.ZipFile(bundle) as old:
        content = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(bundle, "w") as new:
        for name, data in content.items():
            if (data := edit(name, data)) is not None:
                new.writestr(name, data)


def test_trusted_bundle_is_loaded_on_another_machine(tmp_path, bundle, capsys):
    assert run(tmp_path / "worker", "import", bundle, "--trust") == 0
    assert load(store(tmp_path / "worker"), "a")[0] == b"code of a"
    assert load(store(tmp_path / "worker"), "b")[0] == b"code of b"
    assert "2 graphs imported" in capsys.readouterr().out


def test_without_trust_nothing_is_imported_and_the_reason_is_said(tmp_path, bundle, capsys):
    assert run(tmp_path / "worker", "import", bundle) == 1
    assert not (tmp_path / "worker").exists()
    assert "--trust" in capsys.readouterr().err


def test_bundle_unpacked_into_the_folder_is_not_opened(tmp_path, bundle):
    folder = tmp_path / "worker" / "graphs"
    with zipfile.ZipFile(bundle) as content:
        content.extractall(folder)
    for file in folder.glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "seal": "0" * 64}))
    worker = store(tmp_path / "worker")
    assert load(worker, "a") is None
    assert "another installation" in reasons(worker)[0]


def test_no_command_unpickles(tmp_path, capsys):
    mark = tmp_path / "mark"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    save(store(tmp_path / "builder"), data=pickle.dumps(Hostile()))
    bundle = tmp_path / "bundle"
    for command in (["list"], ["verify"], ["export", bundle]):
        assert run(tmp_path / "builder", *command) == 0
    assert run(tmp_path / "worker", "import", bundle) == 1
    assert run(tmp_path / "worker", "import", bundle, "--trust") == 0
    assert run(tmp_path / "worker", "prune", "--max-mb", 0) == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda name, data: data[:-1] + b"x" if name.endswith(".bin") else data, "have changed"),
        (lambda name, data: data[:-1] if name.endswith(".bin") else data, "bytes of"),
        (lambda name, data: None if name.endswith(".bin") else data, "missing"),
        (lambda name, data: b"[]" if name.endswith(".json") else data, "damaged"),
        (lambda name, data: data.replace(b'"key":"', b'"key":"../../') if name.endswith(".json") else data, "damaged"),
        (lambda name, data: data.replace(b'"format":1', b'"format":2') if name.endswith(".json") else data, "format"),
    ],
)
def test_damaged_bundle_brings_nothing(tmp_path, bundle, capsys, edit, said):
    change(bundle, edit)
    assert run(tmp_path / "worker", "import", bundle, "--trust") == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("worker/graphs/*"))


def test_every_truncated_bundle_ends_in_a_sentence(tmp_path, bundle, capsys):
    whole = bundle.read_bytes()
    for length in range(0, len(whole), 97):
        bundle.write_bytes(whole[:length])
        assert run(tmp_path / "worker", "import", bundle, "--trust") == 1
        assert "is not a bundle." in capsys.readouterr().err


def test_bundle_that_unpacks_to_more_than_it_may_is_refused(tmp_path, monkeypatch, capsys):
    from comfy_accel.accel import store_bundle

    monkeypatch.setattr(store_bundle, "LARGEST_MANIFEST", 1000)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("a" * 24 + "-" + "b" * 12 + ".json", b" " * 10**6)
    (tmp_path / "bundle").write_bytes(bomb.getvalue())
    assert run(tmp_path / "worker", "import", tmp_path / "bundle", "--trust") == 1
    assert "larger than" in capsys.readouterr().err


def test_kinds_named_are_exported_alone(tmp_path, capsys):
    save(store(tmp_path))
    assert run(tmp_path, "export", tmp_path / "none", "--kind", "Other") == 0
    assert "0 graphs exported" in capsys.readouterr().out
    assert run(tmp_path, "export", tmp_path / "one", "--kind", "Block") == 0
    assert "1 graphs exported" in capsys.readouterr().out


def test_export_never_overwrites(tmp_path, bundle, capsys):
    before = bundle.read_bytes()
    assert run(tmp_path / "builder", "export", bundle) == 1
    assert bundle.read_bytes() == before
    assert "exists" in capsys.readouterr().err


def test_verify_names_what_is_damaged(tmp_path, capsys):
    save(store(tmp_path), "a")
    save(store(tmp_path), "b", b"other")
    assert run(tmp_path, "verify") == 0
    next((tmp_path / "graphs").glob("*.bin")).write_bytes(b"changed")
    assert run(tmp_path, "verify") == 1
    told = capsys.readouterr()
    assert "1 graphs sound, 1 not" in told.out and "bytes of" in told.err


def test_list_shows_what_there_is_and_prune_deletes_it(tmp_path, capsys):
    save(store(tmp_path))
    assert run(tmp_path, "list") == 0
    assert "1 graphs" in capsys.readouterr().out
    assert run(tmp_path, "prune", "--max-mb", 0) == 0
    assert load(store(tmp_path)) is None


def test_text_of_a_bundle_does_not_reach_the_terminal_as_it_is(tmp_path, bundle, capsys):
    change(bundle, lambda name, data: data.replace(b"Block", b"\\u001b[2J") if name.endswith(".json") else data)
    run(tmp_path / "worker", "import", bundle)
    assert "\x1b" not in capsys.readouterr().out


def test_without_a_place_the_command_asks_for_one(capsys):
    assert store_command.main(["list"]) == 1
    assert "--home" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "expected"), [("off", None), ("OFF", None), ("", "graphs"), ("/x/y", "/x/y")])
def test_environment_moves_the_graphs_or_turns_the_store_off(tmp_path, monkeypatch, value, expected):
    monkeypatch.setenv(store_location.VARIABLE, value)
    folder = store_location.folder(tmp_path)
    assert folder is None if expected is None else str(folder).endswith(expected)
    assert store_location.secret(tmp_path) == tmp_path / "secret"


def test_secret_stays_where_it_is_when_the_graphs_move(tmp_path, monkeypatch):
    monkeypatch.setenv(store_location.VARIABLE, str(tmp_path / "shared"))
    assert run(tmp_path / "home", "verify") == 0
    assert [file.name for file in (tmp_path / "home").iterdir()] == ["secret"]

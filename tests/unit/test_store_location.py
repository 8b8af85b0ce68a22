"""Where the store is: what the environment says, what a person has set, and which ComfyUI a command means."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.store import attach, cli, location, signing
from comfy_accel.accel.store import home as store_home
from comfy_accel.accel.store.folder import LocalFolder
from comfy_accel.accel.store.graph_store import GraphStore
from store_kit import load, reasons, run_command, save, store

pytestmark = pytest.mark.usefixtures("plain_environment")

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key of sixteen letters"


def server(home):
    """A store as ComfyUI has it."""
    return GraphStore(location.folder(home), location.secret(home))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("off", None), ("OFF", None), ("", "graphs"), ("/x/y", "/x/y"), ("file:///x/%79", "/x/y")],
)
def test_environment_moves_the_graphs_or_turns_the_store_off(tmp_path, monkeypatch, value, expected):
    monkeypatch.setenv(location.VARIABLE, value)
    folder = location.folder(tmp_path)
    assert folder is None if expected is None else str(folder).endswith(expected)
    assert location.secret(tmp_path) == tmp_path / "secret"


def test_nothing_is_read_before_the_folder_is_used(tmp_path):
    home = tmp_path / "home"
    run_command(home, "move", tmp_path / "other")
    touched = []

    def hear(event, arguments):
        if hearing and event in ("open", "os.scandir", "os.listdir", "os.mkdir"):
            touched.append(str(arguments[0]))

    hearing = True
    sys.addaudithook(hear)
    folder = location.folder(home)
    assert not [path for path in touched if str(home) in path]
    assert str(folder) == str(tmp_path / "other")
    assert [path for path in touched if str(home) in path]
    hearing = False


def test_moved_graphs_are_used_and_the_secret_stays(tmp_path, capsys):
    home, other = tmp_path / "home", tmp_path / "other disk" / "graphs"
    assert save(server(home), "a") and save(server(home), "b")
    assert run_command(home, "move", other) == 0
    assert f"2 graphs moved from {home / 'graphs'} to {other}" in capsys.readouterr().out
    assert sorted(file.name for file in home.iterdir()) == ["graphs", "secret", "settings.json"]
    assert not list((home / "graphs").iterdir())
    assert json.loads((home / "settings.json").read_text()) == {"folder": str(other)}
    assert load(server(home), "a") is not None and save(server(home), "c")
    assert len(list(other.glob("*.json"))) == 3
    assert run_command(home, "verify") == 0
    assert run_command(home, "move", other) == 1
    assert "already" in capsys.readouterr().err


def test_path_is_taken_from_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(tmp_path / "home", "move", "near") == 0
    monkeypatch.chdir(os.sep)
    assert str(location.folder(tmp_path / "home")) == str(tmp_path / "near")


def test_move_that_fails_changes_nothing(tmp_path, capsys):
    home = tmp_path / "home"
    save(server(home))
    (tmp_path / "file").touch()
    assert run_command(home, "move", tmp_path / "file") == 1
    assert capsys.readouterr().err.strip()
    assert load(server(home)) is not None
    assert not (home / "settings.json").exists()


@pytest.mark.parametrize(
    ("command", "variable", "value"),
    [(("move", "/x"), location.VARIABLE, "/y"), (("limit", "5"), location.LIMIT_VARIABLE, "7")],
)
def test_environment_wins_and_nothing_is_set_beside_it(tmp_path, monkeypatch, capsys, command, variable, value):
    monkeypatch.setenv(variable, value)
    assert run_command(tmp_path, *command) == 1
    assert f"{variable} is set" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_environment_wins_over_what_was_set(tmp_path, monkeypatch):
    run_command(tmp_path, "move", tmp_path / "set")
    run_command(tmp_path, "limit", "5")
    assert location.max_bytes(tmp_path) == 5 << 20
    monkeypatch.setenv(location.VARIABLE, str(tmp_path / "environment"))
    monkeypatch.setenv(location.LIMIT_VARIABLE, "7")
    assert str(location.folder(tmp_path)) == str(tmp_path / "environment")
    assert location.max_bytes(tmp_path) == 7 << 20
    monkeypatch.setenv(location.LIMIT_VARIABLE, "many")
    assert location.max_bytes(tmp_path) == 5 << 20
    assert location.max_bytes(None) == 2 << 30


@pytest.mark.skipif(os.name != "posix", reason="only there a mode says who can read")
def test_settings_are_their_owners_alone(tmp_path):
    run_command(tmp_path, "move", "s3://me:password@host/graphs")
    assert (tmp_path / "settings.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"folder": 5}', '{"folder": "here"}', '{"max_mb": -1}', '{"max_mb": "5"}', "[" * 10**4]
)
def test_damaged_settings_are_a_reason_and_never_a_guess(tmp_path, capsys, text):
    save(server(tmp_path))
    (tmp_path / "settings.json").write_text(text)
    damaged = server(tmp_path)
    assert load(damaged) is None and not save(damaged)
    assert all("settings.json is damaged" in reason for reason in reasons(damaged)) and reasons(damaged)
    assert "settings.json is damaged" in damaged.statistics()["folder"]
    for command in (["list"], ["limit", "5"], ["prune"], ["move", str(tmp_path / "x")]):
        assert run_command(tmp_path, *command) == 1
        assert "settings.json is damaged: mend or delete it" in capsys.readouterr().err


def test_limit_of_nothing_deletes_nothing(tmp_path, monkeypatch, capsys):
    save(store(tmp_path))
    for set_it in (lambda: run_command(tmp_path, "limit", "0"), lambda: monkeypatch.setenv("ACCEL_STORE_MB", "0")):
        set_it()
        assert run_command(tmp_path, "prune") == 1
        assert "--max-mb" in capsys.readouterr().err
    assert load(store(tmp_path)) is not None
    assert run_command(tmp_path, "prune", "--max-mb", "0") == 0
    assert load(store(tmp_path)) is None


def test_without_a_place_the_command_asks_for_one(monkeypatch, capsys):
    for command in (["list"], ["move", "x"], ["limit", "5"]):
        assert cli.main(command) == 1
        assert "--user-directory" in capsys.readouterr().err
    monkeypatch.setenv(location.VARIABLE, "off")
    assert cli.main(["list"]) == 1
    assert "turns the store off" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--home", "--user-directory", "--base-directory"])
def test_options_name_the_home_before_and_after_the_command(tmp_path, capsys, option):
    home = {"--home": "", "--user-directory": "__accel", "--base-directory": "user/__accel"}[option]
    save(store(tmp_path / home))
    for order in ([option, str(tmp_path), "verify"], ["verify", option, str(tmp_path)]):
        assert cli.main(order) == 0
        told = capsys.readouterr().out
        assert "1 graphs sound" in told and str(tmp_path / home / "secret") in told


def test_user_directory_is_stronger_than_the_base_as_in_comfyui(tmp_path, capsys):
    arguments = ["--user-directory", str(tmp_path / "user"), "--base-directory", str(tmp_path / "base")]
    assert cli.main(["list", *arguments]) == 0
    assert str(tmp_path / "user" / "__accel" / "graphs") in capsys.readouterr().out


def test_nothing_is_sealed_with_a_secret_that_comfyui_does_not_know(tmp_path, monkeypatch, capsys):
    save(store(tmp_path / "builder"))
    bundle = tmp_path / "bundle"
    run_command(tmp_path / "builder", "export", bundle)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv(location.VARIABLE, str(tmp_path / "shared"))
    assert cli.main(["import", "--trust", str(bundle)]) == 1
    assert "ACCEL_STORE_KEY" in capsys.readouterr().err
    assert not (tmp_path / "shared").exists() and not (tmp_path / "me").exists()
    monkeypatch.setenv(signing.KEY_VARIABLE, KEY)
    assert cli.main(["import", "--trust", str(bundle)]) == 0
    assert "Sealed with the key in ACCEL_STORE_KEY." in capsys.readouterr().out
    assert load(server(tmp_path / "any worker")) is not None


@pytest.fixture
def comfyui(tmp_path):
    """(folder of a ComfyUI, how to run the command from a folder of it); the pack in it is a copy or a link."""
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    (tmp_path / "ComfyUI" / "user").mkdir()

    def command(folder, *arguments, **environment):
        process = subprocess.run(
            [sys.executable, "-m", "accel", "store", *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "PWD": str(folder), **environment},  # as a shell does
            capture_output=True,
            text=True,
        )
        return process.returncode, process.stdout, process.stderr

    return tmp_path / "ComfyUI", command


@pytest.mark.parametrize("linked", [False, True])
def test_command_in_the_packs_folder_finds_its_comfyui(tmp_path, comfyui, linked):
    folder, command = comfyui
    pack = folder / "custom_nodes" / "pack"
    if linked:
        pack.symlink_to(ROOT)
    else:
        shutil.copytree(ROOT / "accel", pack / "accel", ignore=shutil.ignore_patterns("__pycache__"))
    home = folder / "user" / "__accel"
    save(store(tmp_path / "builder"))
    run_command(tmp_path / "builder", "export", tmp_path / "bundle")

    code, _, said = command(pack, "import", tmp_path / "bundle", "--trust")
    assert code == 1 and "--user-directory" in said  # ComfyUI may have been started with another user folder
    assert not home.exists()
    code, told, _ = command(pack, "import", tmp_path / "bundle", "--trust", "--user-directory", folder / "user")
    assert code == 0 and str(home / "secret") in told
    assert load(server(home)) is not None
    code, told, _ = command(pack, "import", tmp_path / "bundle", "--trust")
    assert code == 0 and str(home / "secret") in told  # the one that is there is the one to use
    code, told, _ = command(pack, "list")
    assert code == 0 and f"1 graphs, 0.0 MB in {home / 'graphs'}" in told


def test_folder_is_an_ordinary_one_for_those_who_use_it(tmp_path):
    """What a home says is what a folder does, file by file."""
    folder, plain = location.HomeFolder(tmp_path), LocalFolder(tmp_path / "graphs")
    folder.write("ab", b"data")
    assert folder.read("ab", 4) == plain.read("ab", 4) == b"data"
    folder.touch("ab")
    assert list(folder.files("a")) == list(plain.files("a")) and not list(folder.files("b"))
    assert not list(folder.unfinished()) and abs(folder.now() - plain.now()) < 60
    folder.remove("ab")
    assert not list(plain.files())


@pytest.mark.skipif(sys.platform != "linux", reason="as the folder is found on Linux")
def test_programs_that_are_not_comfyui_keep_graphs_among_what_this_person_can_do_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = store_home.of_this_person()
    assert home == tmp_path / "cache" / "comfy-accel" and not home.exists()
    monkeypatch.chdir(tmp_path)
    assert store_home.find(None, None, None) is None
    home.mkdir(parents=True)
    assert store_home.find(None, None, None) == (home, False)
    assert store_home.find(None, tmp_path, None) == (tmp_path / store_home.NAME, True)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # is to be ignored, says its specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_home.of_this_person() == tmp_path / ".cache" / "comfy-accel"


def test_cache_gets_its_store_once_and_none_where_none_is_wanted(tmp_path, monkeypatch):
    cache = GraphCache()
    monkeypatch.setattr(attach, "shared", cache)
    attach.attach(GraphCache(), lambda: pytest.fail("no cache of somebody's own gets one"))
    monkeypatch.setenv(location.VARIABLE, "off")
    attach.attach(cache, lambda: tmp_path)
    assert cache.store is None
    monkeypatch.delenv(location.VARIABLE)
    attach.attach(cache, lambda: None)  # an account without a home
    assert cache.store is None
    attach.attach(cache, lambda: tmp_path)
    first = cache.store
    assert first is not None and not list(tmp_path.iterdir())
    attach.attach(cache, lambda: tmp_path / "other")
    assert cache.store is first

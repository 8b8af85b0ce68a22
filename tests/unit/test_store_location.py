"""Where the store is: what the environment says, what a person has set, and which ComfyUI a command means."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core import settings
from comfy_accel.accel.core.settings import Settings
from comfy_accel.accel.hosts.comfyui import home as comfyui_home
from comfy_accel.accel.hosts.comfyui import store_cli as cli
from comfy_accel.accel.store import graph_store, location
from comfy_accel.accel.store.graph_store import GraphStore
from kit.stores import load, reasons, run_command, save, store

ROOT = Path(__file__).resolve().parents[2]


def server(home):
    """A store as ComfyUI has it."""
    return GraphStore(location.folder(home), lambda: location.max_bytes(home))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("off", None), ("OFF", None), ("", "graphs"), ("/x/y", "/x/y"), ('"/x/y"', "/x/y")],
)
def test_environment_moves_the_graphs_or_turns_the_store_off(tmp_path, monkeypatch, value, expected):
    monkeypatch.setenv(location.VARIABLE, value)
    folder = location.folder(tmp_path)
    assert folder is None if expected is None else str(folder).endswith(expected)


def test_address_is_no_folder(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv(location.VARIABLE, "s3://bucket/graphs")
    cache = GraphCache()
    monkeypatch.setattr(graph_store, "shared", cache)
    graph_store.attach(cache, lambda: tmp_path)
    assert cache.store is None and "only a folder can be used" in caplog.text
    assert cli.main(["list"]) == 1 and "only a folder can be used" in capsys.readouterr().err


def test_looking_for_the_folder_touches_no_disk(tmp_path):
    touched = []

    def hear(event, arguments):
        if hearing and event in ("open", "os.scandir", "os.listdir", "os.mkdir"):
            touched.append(str(arguments[0]))

    hearing = True
    sys.addaudithook(hear)
    assert str(location.folder(tmp_path)) == str(tmp_path / "graphs")
    hearing = False
    assert not [path for path in touched if str(tmp_path) in path]


@pytest.mark.parametrize("how", ["variable", "link"])
def test_graphs_moved_by_hand_are_used(tmp_path, monkeypatch, how):
    home, other = tmp_path / "home", tmp_path / "other disk" / "graphs"
    assert save(server(home), "a") and save(server(home), "b")
    other.parent.mkdir()
    (home / "graphs").rename(other)
    if how == "link":
        (home / "graphs").symlink_to(other)
    else:
        monkeypatch.setenv(location.VARIABLE, str(other))
    assert load(server(home), "a") is not None and save(server(home), "c")
    assert len(list(other.iterdir())) == 3
    assert [file.name for file in home.iterdir()] == ["graphs"] * (how == "link")
    assert run_command(home, "list") == 0


def test_environment_wins_over_what_was_set(tmp_path, monkeypatch, caplog):
    settings.write(tmp_path, Settings(store_mb=5))
    assert location.max_bytes(tmp_path) == 5 << 20
    monkeypatch.setenv(location.VARIABLE, str(tmp_path / "environment"))
    monkeypatch.setenv(location.LIMIT_VARIABLE, "7")
    assert str(location.folder(tmp_path)) == str(tmp_path / "environment")
    assert location.max_bytes(tmp_path) == 7 << 20
    monkeypatch.setenv(location.LIMIT_VARIABLE, "many")
    assert location.max_bytes(tmp_path) == 5 << 20
    assert location.max_bytes(None) == 2 << 30
    assert [record.getMessage() for record in caplog.records] == [
        "ACCEL_STORE_MB is 'many', which is no whole number of MB, and counts as unset."
    ]


def test_damaged_settings_are_a_reason_and_never_a_guess(tmp_path, capsys):
    save(server(tmp_path), "a")
    (tmp_path / "preferences.json").write_text("{")
    damaged = server(tmp_path)
    assert load(damaged, "a") is not None and not save(damaged, "b")
    assert all("preferences.json is damaged" in reason for reason in reasons(damaged)) and reasons(damaged)
    bundle = tmp_path / "bundle"
    assert run_command(tmp_path, "export", bundle) == 0 and run_command(tmp_path, "import", bundle, "--trust") == 1
    assert "preferences.json is damaged: fix or delete it" in capsys.readouterr().err


def test_without_a_place_the_command_asks_for_one(monkeypatch, capsys):
    assert cli.main(["list"]) == 1
    assert "--user-directory" in capsys.readouterr().err
    monkeypatch.setenv(location.VARIABLE, "off")
    assert cli.main(["list"]) == 1
    assert "turns the store off" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--home", "--user-directory", "--base-directory"])
def test_options_name_the_home_before_and_after_the_command(tmp_path, capsys, option):
    home = {"--home": "", "--user-directory": "__accel", "--base-directory": "user/__accel"}[option]
    save(store(tmp_path / home))
    for order in ([option, str(tmp_path), "list"], ["list", option, str(tmp_path)]):
        assert cli.main(order) == 0
        assert "1 graph," in capsys.readouterr().out


def test_user_directory_is_stronger_than_the_base_as_in_comfyui(tmp_path, capsys):
    arguments = ["--user-directory", str(tmp_path / "user"), "--base-directory", str(tmp_path / "base")]
    assert cli.main(["list", *arguments]) == 0
    assert str(tmp_path / "user" / "__accel" / "graphs") in capsys.readouterr().out


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

    code, told, _ = command(pack, "import", tmp_path / "bundle", "--trust")
    assert code == 0 and str(home / "graphs") in told
    assert load(server(home)) is not None
    code, told, _ = command(pack, "list")
    assert code == 0 and f"1 graph, 0.0 MB in {home / 'graphs'}" in told


@pytest.mark.skipif(sys.platform != "linux", reason="as the folder is found on Linux")
def test_programs_that_are_not_comfyui_keep_graphs_among_what_this_person_can_do_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = location.personal_home()
    assert home == tmp_path / "cache" / "comfy-accel" and not home.exists()
    monkeypatch.chdir(tmp_path)
    assert comfyui_home.find(None, None, None) is None
    home.mkdir(parents=True)
    assert comfyui_home.find(None, None, None) == home
    assert comfyui_home.find(None, tmp_path, None) == tmp_path / comfyui_home.NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # is to be ignored, says its specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert location.personal_home() == tmp_path / ".cache" / "comfy-accel"


def test_cache_gets_its_store_once_and_none_where_none_is_wanted(tmp_path, monkeypatch):
    cache = GraphCache()
    monkeypatch.setattr(graph_store, "shared", cache)
    graph_store.attach(GraphCache(), lambda: pytest.fail("no cache of somebody's own gets one"))
    monkeypatch.setenv(location.VARIABLE, "off")
    graph_store.attach(cache, lambda: tmp_path)
    assert cache.store is None
    monkeypatch.delenv(location.VARIABLE)
    graph_store.attach(cache, lambda: None)  # an account without a home
    assert cache.store is None
    graph_store.attach(cache, lambda: tmp_path)
    first = cache.store
    assert first is not None and not list(tmp_path.iterdir())
    graph_store.attach(cache, lambda: tmp_path / "other")
    assert cache.store is first

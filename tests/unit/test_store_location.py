"""Where the store is: what the environment says, what a person has set, and which ComfyUI it is of."""

import os
import sys

import pytest
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core import settings
from comfy_accel.accel.core.settings import Settings
from comfy_accel.accel.store import graph_store, location
from comfy_accel.accel.store.graph_store import GraphStore
from kit.stores import load, reasons, save


def server(home):
    """A store as ComfyUI has it."""
    return GraphStore(location.folder(home), lambda: location.max_bytes(home))


@pytest.mark.parametrize(
    ("value", "expected"), [("off", None), ("OFF", None), ("", "graphs"), ("/x/y", "/x/y"), ('"/x/y"', "/x/y")]
)
def test_environment_moves_the_graphs_or_turns_the_store_off(tmp_path, monkeypatch, value, expected):
    monkeypatch.setenv(location.VARIABLE, value)
    folder = location.folder(tmp_path)
    assert folder is None if expected is None else str(folder).endswith(expected)


def test_address_is_no_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(location.VARIABLE, "s3://bucket/graphs")
    cache = GraphCache()
    monkeypatch.setattr(graph_store, "shared", cache)
    graph_store.attach(cache, lambda: tmp_path)
    assert cache.store is None and "only a folder can be used" in caplog.text


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


def test_damaged_settings_are_a_reason_and_never_a_guess(tmp_path):
    save(server(tmp_path), "a")
    (tmp_path / "preferences.json").write_text("{")
    damaged = server(tmp_path)
    assert load(damaged, "a") is not None and not save(damaged, "b")
    assert all("preferences.json is damaged" in reason for reason in reasons(damaged)) and reasons(damaged)


@pytest.mark.skipif(sys.platform != "linux", reason="as the folder is found on Linux")
def test_programs_that_are_not_comfyui_keep_graphs_among_what_this_person_can_do_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = location.personal_home()
    assert home == tmp_path / "cache" / "comfy-accel" and not home.exists()
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


@pytest.mark.skipif(os.name == "nt", reason="there the folder's list of rights says so")
@pytest.mark.parametrize(
    ("mode", "owner", "user", "said"),
    [
        *((0o755, 1000, 1000, 0), (0o775, 1000, 1000, 0), (0o777, 1000, 1000, 1), (0o1777, 0, 1000, 1)),
        *((0o755, 0, 1000, 0), (0o755, 1001, 1000, 1), (0o755, 1000, 0, 0), (0o757, 1000, 0, 1)),
    ],
)
def test_folder_that_others_may_write_to_is_one_warning(tmp_path, monkeypatch, caplog, mode, owner, user, said):
    """Root's own, and a mounted folder for root in a container, are as they should be."""
    location._warn_once.cache_clear()
    found = os.stat_result((mode | 0o40000, 0, 0, 0, owner, *[0] * 5))
    monkeypatch.setattr(os, "getuid", lambda: user)
    store = server(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(location.Path, "stat", lambda path, **_: found)
        for _ in range(2):
            location.warn_of_others(location.folder(tmp_path))
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == said and all(str(tmp_path / "graphs") in each and "run as code" in each for each in warned)
    assert load(store, "a") is None  # a folder that is not there yet is nobody's
    assert len(caplog.records) == said

"""The store's folder: reads that end, files that are whole or not there, and pruning that goes on."""

import errno
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from comfy_accel.accel.core import atomic_file
from comfy_accel.accel.store import manifest as store_entry
from comfy_accel.accel.store.folder import Folder
from kit.blocks import raising
from kit.stores import as_on_windows, held_open

OLD = 7200


def write_entry(folder, number, age=0.0, size=1000):
    """A graph that was used so many seconds ago; its name."""
    manifest = store_entry.describe(f"{number:024x}", "Block", {}, {}, bytes([number]) * size)
    store_entry.write(folder, manifest, bytes([number]) * size)
    name = manifest.stem + store_entry.GRAPH
    os.utime(folder.path / name, (time.time() - age,) * 2)
    return name


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "graphs")


def names(folder):
    return sorted(file.name for file in folder.files())


def content(folder, name):
    with folder.open(name) as file:
        return file.read()


def test_what_was_written_is_read(folder):
    folder.write("a", b"one")
    folder.write("a", b"two")
    assert content(folder, "a") == b"two"
    assert [file[:2] for file in folder.files()] == [("a", 3)]
    assert folder.remove("a") and folder.remove("a")
    with pytest.raises(FileNotFoundError):
        content(folder, "a")


def test_files_are_chosen_by_name_before_they_are_asked_about(folder, monkeypatch):
    asked = []

    def item(name):
        return SimpleNamespace(name=name, stat=lambda **_: asked.append(name) or os.stat(__file__))

    monkeypatch.setattr(os, "scandir", lambda path: nullcontext(map(item, ("ab1", "b1", "ab2"))))
    assert [file.name for file in folder.files("ab")] == asked == ["ab1", "ab2"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files on this system")
def test_reading_what_is_no_file_ends_in_a_sentence(folder):
    folder.write("file", b"x")
    os.mkfifo(folder.path / "pipe")
    (folder.path / "link").symlink_to("/dev/zero")
    (folder.path / "link to a file").symlink_to("file")
    (folder.path / "folder").mkdir()
    began = time.monotonic()
    for name in ("pipe", "folder", "link"):
        with pytest.raises(OSError, match="regular"):
            content(folder, name)
    assert time.monotonic() - began < 1
    assert [file.name for file in folder.files()] == ["file"]


def test_file_that_another_process_deletes_while_it_is_opened_is_missing_and_no_fault_of_the_disk(folder, monkeypatch):
    folder.write("a", b"x")
    stat = type(folder.path).stat

    def deleted_after(path, **options):
        try:
            return stat(path, **options)
        finally:
            path.unlink(missing_ok=True)

    monkeypatch.setattr(type(folder.path), "stat", deleted_after)
    with pytest.raises(FileNotFoundError):
        folder.open("a")


@pytest.mark.skipif(os.utime not in os.supports_follow_symlinks, reason="a system that cannot date a link itself")
def test_use_of_a_link_dates_no_other_file(folder):
    folder.write("file", b"x")
    os.utime(folder.path / "file", (1e9, 1e9))
    (folder.path / "link").symlink_to("file")
    folder.touch("link")
    assert (folder.path / "file").stat().st_mtime == 1e9
    folder.touch("file")
    assert (folder.path / "file").stat().st_mtime > 1e9


def test_write_that_fails_leaves_the_old_file_and_no_other(folder, monkeypatch):
    folder.write("a", b"old")
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        folder.write("a", b"new")
    assert [file.name for file in folder.path.iterdir()] == ["a"]
    assert content(folder, "a") == b"old"


@pytest.mark.parametrize("refusals", [3, 10**9])
def test_file_that_somebody_reads_on_windows_is_replaced_a_moment_later_or_stays(folder, monkeypatch, refusals):
    """Simulated: Windows replaces no file that somebody has open."""
    folder.write("a", b"old")
    as_on_windows(monkeypatch, atomic_file)
    monkeypatch.setattr(atomic_file, "_PATIENCE", 0.3)
    replace, asked = os.replace, []

    def refuse(*paths):
        asked.append(paths)
        if len(asked) <= refusals:
            raise held_open()
        replace(*paths)

    monkeypatch.setattr(os, "replace", refuse)
    if refusals == 3:
        folder.write("a", b"new")
    else:
        with pytest.raises(PermissionError):
            folder.write("a", b"new")
    assert content(folder, "a") == (b"new" if refusals == 3 else b"old")
    assert len(asked) > 3 and [file.name for file in folder.path.iterdir()] == ["a"]


def test_listing_deletes_nothing_and_pruning_what_is_old(folder):
    kept = write_entry(folder, 1, age=OLD)
    own, new = "ab" * 8 + ".tmp", "cd" * 8 + ".tmp"
    others = ("settings.json", "my.tmp", "ab.tmp", "x-y.graph", "2024-11.graph", "ab-cd.graph", "2024-11.json")
    for name in (own, new, *others):
        folder.write("part", b"part")
        (folder.path / "part").rename(folder.path / name)
        if name != new:
            os.utime(folder.path / name, (time.time() - OLD,) * 2)
    list(folder.files())
    assert len(list(folder.path.iterdir())) == 10
    assert folder.prune(1 << 20) == 0
    assert {file.name for file in folder.path.iterdir()} == {kept, new, *others}
    assert folder.prune(0) == 1
    assert {file.name for file in folder.path.iterdir()} == {new, *others}


def test_graph_of_a_wrong_clock_that_is_used_again_is_as_new_as_any(folder):
    ahead, old = write_entry(folder, 1, age=-10 * OLD), write_entry(folder, 2, age=300)
    folder.touch(ahead)
    assert folder.prune(1400) == 1
    assert names(folder) == [ahead] and old != ahead


def test_file_that_cannot_be_deleted_stops_no_pruning(folder, monkeypatch):
    """As open ones on Windows."""
    oldest, old, new = (write_entry(folder, number, age) for number, age in ((1, 300), (2, 200), (3, 100)))
    unlink, stuck = type(folder.path).unlink, (oldest, "ab" * 8 + ".tmp", "cd" * 8 + ".tmp")
    for name in stuck[1:]:
        (folder.path / name).write_bytes(b"")
        os.utime(folder.path / name, (time.time() - OLD,) * 2)

    def refused(path, *args, **options):
        if path.name in stuck:
            raise held_open()
        unlink(path, *args, **options)

    monkeypatch.setattr(type(folder.path), "unlink", refused)
    assert not folder.remove(oldest)
    assert folder.prune(2700) == 1
    assert names(folder) == sorted([oldest, new]) and old != new


def test_text_of_anybody_is_made_printable():
    assert store_entry.printable("a\x1b[2J\x07b\u202e c\n\td") == "a?[2J?b? c d"
    assert len(store_entry.printable("x" * 10**6)) == 300

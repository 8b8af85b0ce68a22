"""Of several processes that want a graph, one makes it: leases in a folder, with processes that are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from comfy_accel.accel.store import lease
from comfy_accel.accel.store.folder import LocalFolder
from comfy_accel.accel.store.lease import Leases
from comfy_accel.accel.store.prune import LEFTOVER, prune
from comfy_accel.accel.store.remote import RemoteFolder
from store_kit import graph, load, save, store

SCRIPT = Path(__file__).resolve().parent.parent / "store_leases.py"
BEAT = 0.1
HERE = {"device": "cpu"}
DIGEST = "ab12"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(*processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def said(process):
    return json.loads(process.stdout.readline())


@pytest.fixture(params=["folder", "object store"])
def folder(request, tmp_path):
    if request.param == "folder":
        return LocalFolder(tmp_path / "graphs")
    pytest.importorskip("fsspec", reason="an optional package")
    return RemoteFolder(f"memory://{uuid.uuid4().hex}")


def names(folder):
    return sorted(file.name for file in folder.files())


def test_of_many_processes_one_makes_the_graph_and_the_others_load_it(tmp_path):
    """Each says whether it made it; making takes longer than a quarter of the limit, so the lease is renewed."""
    processes = [start(tmp_path, 3.0, 8) for _ in range(5)]
    try:
        for process in processes:
            assert said(process) == "ready"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [said(process) for process in processes]
    finally:
        end(*processes)
    assert sorted(answer["made"] for answer in answers) == [False] * 4 + [True]
    assert sum(answer["leases"]["waited"] for answer in answers) == 4
    assert sum(answer["leases"]["taken"] for answer in answers) == 1
    assert names(LocalFolder(tmp_path)) == ["ab12-0.json"]  # no lease is left


def test_killed_holder_stops_nobody_and_one_of_the_others_takes_over(tmp_path):
    holder, *others = [start(tmp_path, 60 if number == 0 else 0.3, 20) for number in range(4)]
    try:
        for process in (holder, *others):
            assert said(process) == "ready"
        holder.stdin.write("go\n")
        holder.stdin.flush()
        while not names(LocalFolder(tmp_path)):
            time.sleep(0.02)
        for process in others:
            process.stdin.write("go\n")
            process.stdin.flush()
        time.sleep(4 * BEAT)
        assert len(names(LocalFolder(tmp_path))) == 1  # a holder that lives is waited for
        holder.kill()
        begun = time.monotonic()
        answers = [said(process) for process in others]
        took = time.monotonic() - begun
    finally:
        end(holder, *others)
    assert sorted(answer["made"] for answer in answers) == [False, False, True]
    assert sum(answer["leases"]["taken_over"] for answer in answers) == 1
    assert took < 20, "of which a quarter is for the holder to be late"
    assert names(LocalFolder(tmp_path)) == ["ab12-0.json"]


@pytest.mark.skipif(os.name == "nt", reason="processes cannot be stopped")
def test_holder_that_is_late_to_renew_keeps_its_lease(tmp_path):
    """As on a machine with no processor to spare; were it taken over, the graph would be made twice."""
    holder, other = [start(tmp_path, 1.0, 60) for _ in range(2)]
    try:
        for process in (holder, other):
            assert said(process) == "ready"
        holder.stdin.write("go\n")
        holder.stdin.flush()
        while not names(LocalFolder(tmp_path)):
            time.sleep(0.02)
        other.stdin.write("go\n")
        other.stdin.flush()
        holder.send_signal(signal.SIGSTOP)
        time.sleep(3)
        holder.send_signal(signal.SIGCONT)
        answers = [said(process) for process in (holder, other)]
    finally:
        end(holder, other)
    assert [answer["made"] for answer in answers] == [True, False]
    assert answers[1]["leases"]["taken_over"] == 0


def wait(folder, limit, find=lambda: None, environment=HERE, leases=None):
    """What a process gets, and its counts; the lease that it may have taken has ended."""
    leases = leases or Leases(folder, limit, BEAT)
    with contextlib.ExitStack() as ending:
        found = leases.wait_or_take(DIGEST, environment, find, ending)
    return found, leases.statistics()


def test_nobody_waits_longer_than_the_limit(folder):
    with contextlib.ExitStack() as ending:
        holder = Leases(folder, 60, BEAT)
        assert holder.wait_or_take(DIGEST, HERE, lambda: None, ending) is None
        found, counts = wait(folder, limit=1.0)
        assert found is None and counts["gave_up"] == 1 and 1 <= counts["seconds"] < 10
        # The same key for another device is another graph.
        assert wait(folder, 60, environment={"device": "cuda"})[1]["taken"] == 1
    assert names(folder) == []


def test_holder_that_saves_nothing_keeps_nobody_waiting(folder):
    ending = contextlib.ExitStack()
    Leases(folder, 60, BEAT).wait_or_take(DIGEST, HERE, lambda: None, ending)
    leases = Leases(folder, 60, BEAT)
    import threading

    threading.Timer(0.3, ending.close).start()
    found, counts = wait(folder, 60, leases=leases)
    assert found is None and counts["taken"] == counts["waited"] == counts["gave_up"] == 0 and counts["seconds"] < 20


def test_graph_that_was_saved_just_before_the_lease_is_loaded(folder):
    folder.write(f"{DIGEST}-0.json", b"{}")
    found, counts = wait(folder, 60, lambda: "graph")
    assert found == "graph" and counts["taken"] == 1 and names(folder) == [f"{DIGEST}-0.json"]


def test_folder_that_may_only_be_read_is_asked_once(monkeypatch, tmp_path):
    folder, asked = LocalFolder(tmp_path), []

    def refuse(name, data):
        asked.append(name)
        raise PermissionError("read-only")

    monkeypatch.setattr(folder, "create", refuse)
    leases = Leases(folder, 60, BEAT)
    for _ in range(2):
        assert wait(folder, 60, leases=leases)[0] is None
    assert len(asked) == 1


def test_of_two_that_create_a_file_one_does(folder):
    assert folder.create("name", b"1") and not folder.create("name", b"2")
    assert folder.read("name", 10) == b"1"


def test_leases_are_off_unless_they_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv(lease.VARIABLE, raising=False)
    assert store(tmp_path).statistics()["leases"] is None
    for wrong in ("soon", "-3", "0", "", "nan", "inf"):
        monkeypatch.setenv(lease.VARIABLE, wrong)
        assert store(tmp_path).statistics()["leases"] is None
    monkeypatch.setenv(lease.VARIABLE, "120")
    assert store(tmp_path).statistics()["leases"]["taken"] == 0


def test_store_takes_a_lease_for_what_it_has_not_and_ends_it(monkeypatch, tmp_path):
    monkeypatch.setenv(lease.VARIABLE, "60")
    one = store(tmp_path)
    with contextlib.ExitStack() as ending:
        assert ask(one, ending) is None
        assert len([name for name in names(LocalFolder(tmp_path / "graphs")) if ".lease" in name]) == 1
        assert save(one)
    assert one.statistics()["leases"]["taken"] == 1
    assert load(store(tmp_path))[0] == b"code"
    with contextlib.ExitStack() as ending:
        assert ask(store(tmp_path), ending) is not None
    assert all(".lease" not in name for name in names(LocalFolder(tmp_path / "graphs")))


def ask(store, ending):
    from store_kit import CPU, key

    return store.load(key(), "Block", CPU, lambda data, facts: graph(data), lambda made: True, ending=ending)


def test_lease_that_was_left_behind_is_swept(tmp_path):
    folder = LocalFolder(tmp_path)
    old, new = f"{DIGEST}-{'0' * 12}.lease0", f"{DIGEST}-{'0' * 12}.lease1"
    for name in (old, new):
        folder.create(name, b"x")
    os.utime(tmp_path / old, (time.time() - 2 * LEFTOVER,) * 2)
    prune(folder, 10**9)
    assert names(folder) == [new]

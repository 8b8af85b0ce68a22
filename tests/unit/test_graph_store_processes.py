"""The store and processes: killed while they save, two at once, and one that loads what another compiled."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comfy_accel.accel.store import manifest as store_entry
from comfy_accel.accel.store.folder import Folder
from kit.stores import load, reasons, save, store

HERE = Path(__file__).resolve().parent.parent / "kit"
KILLS = int(os.environ.get("ACCEL_TEST_KILLS", "20"))
REAL_KILLS = int(os.environ.get("ACCEL_TEST_REAL_KILLS", "10"))
ROUNDS = int(os.environ.get("ACCEL_TEST_ROUNDS", "3"))


def start(script, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ACCEL_STORE": "", **environment},
    )


def alone(folder):
    """Variables for processes that share a compiler cache of their own, and compute on one thread each."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # or each builds half a dozen programs to find out
        "OMP_NUM_THREADS": "1",
    }


def ask(processes, *lines):
    """Give each process a line, all at once; their answers."""
    for process, line in zip(processes, lines, strict=True):
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return [json.loads(process.stdout.readline()) for process in processes]


def check_every_entry(folder):
    """The graphs' manifests, by name, all of them whole."""
    files = Folder(folder / "graphs")
    stems = [file.name.removesuffix(store_entry.GRAPH) for file in files.files()]
    return {stem: store_entry.read_graph(files, stem)[0] for stem in stems}


def test_process_killed_while_it_saves_leaves_a_store_that_works(tmp_path):
    """Scaled to CI; ACCEL_TEST_KILLS=200 is the whole of it."""
    chance = random.Random(0)
    whole = 0
    for number in range(KILLS):
        process = start("store_killed.py", tmp_path)
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.15))
        finally:
            process.kill()
            process.wait()
        whole = len(check_every_entry(tmp_path))
        after = store(tmp_path)
        assert save(after, f"after {number}")
        assert load(store(tmp_path), f"after {number}")[0] == b"code"
        assert reasons(after) == []
    assert whole > 1


@pytest.mark.thorough  # compiles three kinds with inductor in a process of their own
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed process is a fork, so that its start costs no seconds")
def test_process_killed_while_it_saves_real_graphs_leaves_a_store_that_works(tmp_path):
    """Scaled to CI; ACCEL_TEST_REAL_KILLS=200 is the whole of it."""
    chance = random.Random(1)
    process = start("store_process.py", "kills", tmp_path, **alone(tmp_path))
    loaded = 0
    try:
        assert process.stdout.readline() == "ready\n"
        expected = None
        for _ in range(REAL_KILLS):
            (answer,) = ask([process], chance.uniform(0, 0.15))
            assert answer["killed"], "the process ended by itself"
            whole = len(check_every_entry(tmp_path))
            for one in answer["starts"]:
                assert one["compilations"] + one["loaded"] == 1 and one["uncompiled"] == []
                assert one["traced"] == one["compilations"]
                assert all("saved of it yet" in miss["reason"] for miss in one["store"]["misses"])
            out = [one["out"] for one in answer["starts"]]
            expected = expected or out
            assert out == expected
            loaded += sum(one["loaded"] for one in answer["starts"])
    finally:
        process.kill()
        process.wait()
    print(f"{REAL_KILLS} kills: {loaded} of {3 * REAL_KILLS} starts loaded a graph; {whole} entries at the end")
    assert loaded > REAL_KILLS


@pytest.mark.thorough  # compiles a kind a round with inductor, in two processes
def test_two_processes_on_an_empty_store_compile_once_each_at_most_and_get_the_same(tmp_path):
    """Scaled to CI; ACCEL_TEST_ROUNDS=20 is the whole of it. Every other time one comes up to four seconds late."""
    chance = random.Random(2)
    processes = [start("store_process.py", "rounds", tmp_path, **alone(tmp_path)) for _ in range(2)]
    compiled = kept = 0
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for number in range(ROUNDS):
            width = 8 + number
            waits = chance.sample([0, chance.uniform(0, 4) if number % 2 else 0], 2)
            asked = [json.dumps({"home": str(number), "width": width, "wait": wait}) for wait in waits]
            answers = ask(processes, *asked)
            manifests = check_every_entry(tmp_path / str(number))
            in_round = sum(answer["compilations"] for answer in answers)
            assert len({manifest.key for manifest in manifests.values()}) == 1
            assert 1 <= len(manifests) <= in_round <= 2
            # Each entry by itself, whichever process made it, gives in both what compiling gave.
            for name in manifests:
                home = f"{number}-{name}"
                shutil.copytree(tmp_path / str(number), tmp_path / home)
                for file in (tmp_path / home / "graphs").iterdir():
                    if file.stem != name:
                        file.unlink()
                loads = ask(processes, *[json.dumps({"home": home, "width": width, "wait": 0})] * 2)
                assert [answer["loaded"] for answer in loads] == [1, 1]
                assert all(answer["store"]["misses"] == [] for answer in loads)
                answers += loads
            for answer in answers:
                assert answer["compilations"] + answer["loaded"] == 1 and answer["uncompiled"] == []
                assert answer["traced"] == answer["compilations"]
                assert all("saved of it yet" in miss["reason"] for miss in answer["store"]["misses"])
                assert answer["out"] == answers[0]["out"] and answer["off"] < 1e-5
            compiled, kept = compiled + in_round, kept + len(manifests)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(f"{ROUNDS} rounds: {compiled} compilations, {kept} entries")


def test_new_process_neither_traces_nor_compiles(tmp_path):
    answers = []
    # Nothing of torch's own caches is left for the second, and no compiler.
    for environment in ({"TORCHINDUCTOR_CACHE_DIR": "first"}, {"TORCHINDUCTOR_CACHE_DIR": "second", "CXX": "missing"}):
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / environment["TORCHINDUCTOR_CACHE_DIR"])
        process = start("store_process.py", "real", tmp_path, **environment, OMP_NUM_THREADS="1")
        lines = process.communicate()[0].splitlines()
        answers.append(json.loads(lines[-1]))
    first, second = answers
    assert (first["compilations"], first["loaded"]) == (1, 0)
    assert first["uncompiled"] == second["uncompiled"] == []
    assert (second["compilations"], second["loaded"], second["traced"]) == (0, 1, 0)
    assert second["store"]["misses"] == []
    assert first["out"] == second["out"] and first["off"] < 1e-5
    built = [*(tmp_path / "second").rglob("*.so"), *(tmp_path / "second").rglob("*.cpp")]
    assert {file.parent for file in built} == {tmp_path / "second" / "accel"}  # the saved ones alone

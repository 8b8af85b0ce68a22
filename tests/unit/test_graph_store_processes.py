"""The store and processes: killed while they save, two at once, and one that loads what another compiled."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comfy_accel.accel import store_entry, store_trust
from comfy_accel.accel.store_folder import LocalFolder
from store_kit import load, reasons, save, store

HERE = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("ACCEL_TEST_KILLS", "20"))
ROUNDS = int(os.environ.get("ACCEL_TEST_ROUNDS", "20"))


def start(script, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ACCEL_STORE": "", **environment},
    )


def check_every_entry(folder):
    """The number of entries, all of them whole; a manifest never stands for bytes that are not there."""
    files = LocalFolder(folder / "graphs")
    seals = store_trust.seals(folder / "secret")
    manifests = [file.name for file in files.files() if file.name.endswith(".json")]
    for name in manifests:
        manifest, seal = store_entry.read_manifest(files.read(name))
        store_entry.check(seals, manifest, seal, files.read(manifest.stem + ".bin"))
    return len(manifests)


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
        whole = check_every_entry(tmp_path)
        after = store(tmp_path)
        assert save(after, f"after {number}")
        assert load(store(tmp_path), f"after {number}")[0] == b"code"
        assert reasons(after) == []
    assert whole > 1


def test_two_processes_on_an_empty_store_disturb_each_other_in_nothing(tmp_path):
    processes = [start("store_process.py", "rounds", tmp_path) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for number in range(ROUNDS):
            for process in processes:
                process.stdin.write(f"{number}\n")
                process.stdin.flush()
            answers = [json.loads(process.stdout.readline()) for process in processes]
            assert [answer["image"] for answer in answers] == ["the code"] * 2
            assert all(answer["compiled"] <= 1 for answer in answers)
            assert all("saved of it yet" in reason for answer in answers for reason in answer["misses"])
            assert check_every_entry(tmp_path / str(number)) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow  # compiles with inductor once, and starts three processes that import it
def test_new_process_neither_traces_nor_compiles(tmp_path):
    answers = []
    for cache in ("first", "second"):  # nothing of torch's own caches is left for the second
        process = start(
            "store_process.py", "real", tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / cache), OMP_NUM_THREADS="1"
        )
        lines = process.communicate()[0].splitlines()
        answers.append(json.loads(lines[-1]))
    first, second = answers
    assert (first["compilations"], first["loaded"]) == (1, 0)
    assert first["uncompiled"] == second["uncompiled"] == []
    assert (second["compilations"], second["loaded"], second["traced"]) == (0, 1, 0)
    assert second["store"]["misses"] == []
    for one, other in zip(first["out"], second["out"], strict=True):
        assert [pytest.approx(row, abs=1e-6) for row in one] == other
    # No compiler was needed, nor asked what it can do.
    assert not list((tmp_path / "second").rglob("*.so")) and not list((tmp_path / "second").rglob("*.cpp"))

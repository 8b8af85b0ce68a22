"""The store and processes: killed while they save, and one that loads what another compiled."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from comfy_accel.accel.store import manifest as store_entry
from comfy_accel.accel.store.folder import Folder
from kit import store_process
from kit.blocks import in_new_process
from kit.stores import load, reasons, save, store

SAVING = Path(__file__).resolve().parent.parent / "kit" / "store_killed.py"
KILLS = int(os.environ.get("ACCEL_TEST_KILLS", "20"))


def test_process_killed_while_it_saves_leaves_a_store_that_works(tmp_path):
    """Scaled to CI; ACCEL_TEST_KILLS=200 is the whole of it."""
    chance, files = random.Random(0), Folder(tmp_path / "graphs")
    for number in range(KILLS):
        process = subprocess.Popen([sys.executable, str(SAVING), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.15))
        finally:
            process.kill()
            process.wait()
        stems = [file.name.removesuffix(store_entry.GRAPH) for file in files.files()]
        for stem in stems:  # each is whole
            store_entry.read_graph(files, stem)
        after = store(tmp_path)
        assert save(after, f"after {number}")
        assert load(store(tmp_path), f"after {number}")[0] == b"code"
        assert reasons(after) == []
    assert len(stems) > 1


def test_new_process_neither_traces_nor_compiles_nor_imports_the_compiler(tmp_path):
    def told(folder, **environment):
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / folder)
        code = f"from kit import store_process; print(store_process.told({str(tmp_path)!r}))"
        return json.loads(in_new_process(code, **environment, OMP_NUM_THREADS="1").splitlines()[-1])

    first, second = told("first"), told("second", CXX="missing")  # with none of torch's own caches, and no compiler
    assert (first["compilations"], first["loaded"]) == (1, 0)
    assert first["uncompiled"] == second["uncompiled"] == []
    assert (second["compilations"], second["loaded"], second["traced"]) == (0, 1, 0)
    assert second["misses"] == []
    assert (len(first["compiler"]), second["compiler"]) == (len(store_process.COMPILER), [])
    assert first["out"] == second["out"] and first["off"] < 1e-5
    built = [*(tmp_path / "second").rglob("*.so"), *(tmp_path / "second").rglob("*.cpp")]
    assert {file.parent for file in built} == {tmp_path / "second" / "accel"}  # the saved ones alone

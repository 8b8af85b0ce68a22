"""Machines that share: the store in an object store, and torch's own cache in a Redis server."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from comfy_accel.accel import store_location, store_trust
from comfy_accel.accel.graph_store import GraphStore
from comfy_accel.accel.store_prune import prune
from comfy_accel.accel.store_remote import RemoteFolder
from store_kit import load, reasons, save

SCRIPT = Path(__file__).resolve().parent.parent / "store_process.py"


def run(folder, **environment):
    """What a worker of its own, with empty caches of its own, tells of loading or compiling one block."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / uuid.uuid4().hex), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(SCRIPT), "real", str(folder / uuid.uuid4().hex)]
    out = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


@pytest.fixture
def remote(tmp_path):
    pytest.importorskip("fsspec", reason="an optional package")
    address = f"memory://{uuid.uuid4().hex}"
    return lambda: GraphStore(RemoteFolder(address), tmp_path / "secret"), RemoteFolder(address)


def test_store_in_an_object_store_saves_and_loads(remote):
    make, folder = remote
    assert load(make()) is None
    assert save(make())
    assert load(make())[0] == b"code"
    assert len(list(folder.files())) == 2


def test_changed_object_is_a_miss(remote):
    make, folder = remote
    save(make())
    name = next(file.name for file in folder.files() if file.name.endswith(".bin"))
    folder.write(name, b"edoc")
    changed = make()
    assert load(changed) is None
    assert "have changed" in reasons(changed)[0]


def test_object_store_is_pruned(remote):
    make, folder = remote
    save(make(), "a")
    assert prune(folder, 0) == 1
    assert list(folder.files()) == []
    folder.remove("not there")


@pytest.mark.parametrize("address", ["nosuchprotocol://x/y", "http://127.0.0.1:9/x"])
def test_address_that_cannot_be_reached_is_a_reason(tmp_path, address):
    unreachable = GraphStore(RemoteFolder(address), tmp_path / "secret")
    assert load(unreachable) is None and not save(unreachable)
    assert all(reason for reason in reasons(unreachable))


def test_password_in_an_address_is_not_reported():
    assert "secret" not in str(RemoteFolder("sftp://me:secret@host/graphs"))


def test_worker_loads_what_another_compiled_where_both_have_the_key(tmp_path, monkeypatch):
    pytest.importorskip("fsspec", reason="an optional package")
    monkeypatch.setenv(store_location.VARIABLE, f"file://{tmp_path}/shared")

    def worker(name, key):
        monkeypatch.setenv(store_trust.KEY_VARIABLE, key)
        home = tmp_path / name
        return GraphStore(store_location.folder(home), store_location.secret(home))

    assert save(worker("first", "the fleet's own key, 16 at least"))
    assert load(worker("second", "the fleet's own key, 16 at least"))[0] == b"code"
    stranger = worker("stranger", "not the key of that fleet")
    assert load(stranger) is None
    assert "another installation" in reasons(stranger)[0]


@pytest.fixture
def redis_server(tmp_path):
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server: Debian's package of that name has it")
    pytest.importorskip("redis", reason="torch's remote caches need the package redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        assert process.poll() is None  # or somebody else answers at this port
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow  # two processes with inductor, one of which compiles
def test_worker_finds_in_redis_what_another_compiled(tmp_path, redis_server):
    fleet = {
        "ACCEL_STORE": "off",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_REDIS_URL": redis_server,
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # or each builds half a dozen programs to find out
    }
    first, second = run(tmp_path, **fleet), run(tmp_path, **fleet)
    assert first["inductor"]["fxgraph_cache_miss"] == 1 and "fxgraph_cache_hit" not in first["inductor"]
    assert second["inductor"]["fxgraph_cache_hit"] == 1 and "fxgraph_cache_miss" not in second["inductor"]
    assert first["uncompiled"] == second["uncompiled"] == []
    assert first["traced"] == second["traced"] == 1  # for three batches
    for one, other in zip(first["out"], second["out"], strict=True):
        assert [pytest.approx(row, abs=1e-6) for row in one] == other

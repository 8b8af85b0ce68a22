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
from urllib.parse import unquote

import pytest
from comfy_accel.accel.store import location, signing
from comfy_accel.accel.store.graph_store import GraphStore
from comfy_accel.accel.store.prune import prune
from comfy_accel.accel.store.remote import RemoteFolder
from kit.stores import load, reasons, save

SCRIPT = Path(__file__).resolve().parent.parent / "kit" / "store_process.py"


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


def test_store_in_an_object_store_saves_loads_and_is_pruned(remote):
    make, folder = remote
    assert load(make()) is None
    assert save(make())
    assert load(make())[0] == b"code"
    assert len(list(folder.files())) == 2
    assert prune(folder, 0) == 1
    assert list(folder.files()) == []
    folder.remove("not there")


def test_changed_object_is_a_miss(remote):
    make, folder = remote
    save(make())
    name = next(file.name for file in folder.files() if file.name.endswith(".bin"))
    folder.write(name, b"edoc")
    changed = make()
    assert load(changed) is None
    assert "have changed" in reasons(changed)[0]


@pytest.mark.parametrize("address", ["nosuchprotocol://x/y", "http://127.0.0.1:9/x"])
def test_address_that_cannot_be_reached_is_a_reason(tmp_path, address):
    unreachable = GraphStore(RemoteFolder(address), tmp_path / "secret")
    assert load(unreachable) is None and not save(unreachable)
    assert all(reason for reason in reasons(unreachable))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("sftp://me:s/ec@ret@host/graphs", "sftp://host/graphs"),
        ("simplecache::sftp://me:secret@host/graphs/", "simplecache::sftp://host/graphs"),
        ("https://host/graphs?token=secret", "https://host/graphs"),
        ("s3://bucket/graphs@home", "s3://bucket/graphs@home"),
    ],
)
def test_password_in_an_address_is_not_shown(address, shown):
    assert str(RemoteFolder(address)) == shown


@pytest.mark.parametrize("password", ["secret", "s%40cret", "s/cr:t"])
def test_password_in_an_address_is_not_in_its_errors(tmp_path, password):
    fsspec = pytest.importorskip("fsspec", reason="an optional package")
    from fsspec.implementations.memory import MemoryFileSystem

    class Talkative(MemoryFileSystem):
        """Says in its errors what it was called with, as backends do."""

        protocol = "talkative"

        def ls(self, path, **options):
            raise OSError(f"cannot log in to {address} as {unquote(password)!r}")

        def info(self, path, **options):
            raise FileNotFoundError(f"{address}/{path}")

        def pipe_file(self, path, value, **options):
            raise RuntimeError(f"{address} with the password {password}")

    address = f"talkative://me:{password}@host/graphs"
    fsspec.register_implementation("talkative", Talkative, clobber=True)
    folder = RemoteFolder(address)
    for attempt in (
        lambda: list(folder.files()),
        lambda: folder.read("a", 5),
        lambda: folder.write("a", b""),
        folder.now,
    ):
        with pytest.raises(OSError) as failed:
            attempt()
        assert password not in str(failed.value) and unquote(password) not in str(failed.value)
    silent = GraphStore(folder, tmp_path / "secret")
    assert load(silent) is None and not save(silent)
    assert password not in json.dumps(silent.statistics())


def test_object_of_another_size_than_it_may_have_is_not_read(remote):
    _, folder = remote
    folder.write("a", b"four")
    assert folder.read("a", 4) == b"four"
    with pytest.raises(OSError, match="a has more than 3 bytes"):
        folder.read("a", 3)
    folder.write("empty", b"")
    assert folder.read("empty", 4) == b""
    with pytest.raises(FileNotFoundError):
        folder.read("none", 4)


@pytest.mark.parametrize("backend_asks_by_name", [False, True])
def test_objects_are_asked_for_by_the_beginning_of_their_names(backend_asks_by_name):
    fsspec = pytest.importorskip("fsspec", reason="an optional package")
    from fsspec.implementations.memory import MemoryFileSystem

    asked = []

    class Bucket(MemoryFileSystem):
        """With the signature that s3fs, gcsfs and adlfs have."""

        protocol = "bucket"

        def find(self, path, maxdepth=None, withdirs=False, detail=False, prefix="", **options):
            asked.append(prefix)
            found = super().find(path, maxdepth, withdirs, detail, **options)
            return {name: item for name, item in found.items() if name.startswith(f"{path}/{prefix}")}

    if backend_asks_by_name:
        fsspec.register_implementation("bucket", Bucket, clobber=True)
    folder = RemoteFolder(f"{'bucket' if backend_asks_by_name else 'memory'}://{uuid.uuid4().hex}")
    assert not list(folder.files("a"))
    for name in ("ab", "ac", "b", "ad.tmp"):
        folder.write(name, b"x")
    folder._files.pipe_file(f"{folder._root}/deeper/ab", b"x")
    assert sorted(file.name for file in folder.files("a")) == ["ab", "ac"]
    assert sorted(file.name for file in folder.files()) == ["ab", "ac", "b"]
    assert [file.name for file in folder.unfinished()] == ["ad.tmp"]
    assert asked == (["a", "a"] if backend_asks_by_name else [])


def test_object_stores_leftovers_are_dated_by_its_own_clock(remote, monkeypatch):
    make, folder = remote
    save(make())
    half = f"{'a' * 24}-{'b' * 12}.bin"
    folder.write(half, b"its manifest is about to come")
    moment = time.time()
    assert abs(folder.now() - moment) < 60 and not list(folder.unfinished())
    monkeypatch.setattr(time, "time", lambda: moment + 1e6)
    assert prune(folder, 1 << 20) == 0
    assert half in [file.name for file in folder.files()]
    monkeypatch.setattr(folder, "now", lambda: moment + 1e6)
    assert prune(folder, 1 << 20) == 0
    assert half not in [file.name for file in folder.files()]
    assert load(make()) is not None


def test_worker_loads_what_another_compiled_where_both_have_the_key(tmp_path, monkeypatch):
    pytest.importorskip("fsspec", reason="an optional package")
    monkeypatch.setenv(location.VARIABLE, f"memory://{uuid.uuid4().hex}/shared")

    def worker(name, key):
        monkeypatch.setenv(signing.KEY_VARIABLE, key)
        home = tmp_path / name
        return GraphStore(location.folder(home), location.secret(home))

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


@pytest.mark.thorough  # two processes with inductor, one of which compiles
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

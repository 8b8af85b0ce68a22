"""Seals, and the secret that they are made with."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from comfy_accel.accel.store import signing
from comfy_accel.accel.store.signing import NoSecret, Seals, seals
from kit.stores import without_links

posix = pytest.mark.skipif(os.name != "posix", reason="only there a mode says who can read")


def test_seal_is_good_for_its_manifest_and_its_secret():
    seal = Seals(b"a" * 32).make(b"manifest")
    assert Seals(b"a" * 32).check(seal, b"manifest")
    assert not Seals(b"a" * 32).check(seal, b"Manifest")
    assert not Seals(b"b" * 32).check(seal, b"manifest")
    assert not any(Seals(b"a" * 32).check(other, b"manifest") for other in (None, 5, [seal], "", seal[:-1], "\ud800"))


@pytest.mark.parametrize("links", [True, False])
def test_all_who_begin_at_once_have_the_same_secret(tmp_path, monkeypatch, links):
    if not links:
        without_links(monkeypatch)
    for round in range(20):
        file, begin = tmp_path / str(round) / "secret", threading.Barrier(8)

        def start(_, file=file, begin=begin):
            begin.wait()
            return seals(file).make(b"")

        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(start, range(8)))
        assert made == [seals(file).make(b"")] * 8
        assert [left.name for left in file.parent.iterdir()] == ["secret"]


@posix
def test_secret_is_readable_by_its_owner_alone(tmp_path):
    seals(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(NoSecret, match="chmod 600.*ACCEL_STORE_KEY.*without modes"):
        seals(tmp_path / "secret")


@posix
def test_secret_is_made_in_a_folder_of_its_owners(tmp_path, monkeypatch):
    """Windows has no modes: a file keeps the rights that it inherited from the folder in which it was made."""
    link, modes = os.link, []

    def watched(unfinished, path):
        modes.append(unfinished.parent.stat().st_mode & 0o777)
        link(unfinished, path)

    monkeypatch.setattr(os, "link", watched)
    seals(tmp_path / "home" / "secret")
    assert modes == [0o700] and [left.name for left in (tmp_path / "home").iterdir()] == ["secret"]


@posix
@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can give a file away")
def test_secret_of_another_user_is_not_used(tmp_path):
    seals(tmp_path / "secret")
    os.chown(tmp_path / "secret", 65534, 65534)
    with pytest.raises(NoSecret, match="own it"):
        seals(tmp_path / "secret")


def test_secret_behind_a_link_is_not_used(tmp_path):
    seals(tmp_path / "elsewhere")
    (tmp_path / "secret").symlink_to("elsewhere")
    with pytest.raises(NoSecret, match="secret is a link"):
        seals(tmp_path / "secret")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files on this system")
def test_pipe_in_the_place_of_the_secret_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(NoSecret, match="not a regular file"):
        seals(tmp_path / "secret")


def test_secret_is_not_made_where_none_was_asked_for(tmp_path):
    with pytest.raises(NoSecret, match="there is no secret"):
        seals(tmp_path / "secret", make=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(NoSecret, match="ACCEL_STORE_KEY"):
        seals(None)


def test_empty_secret_is_waited_for_and_then_none(tmp_path, monkeypatch):
    (tmp_path / "secret").touch(0o600)
    later = threading.Timer(0.2, lambda: (tmp_path / "secret").write_text("ab" * 32))
    later.start()
    assert seals(tmp_path / "secret").make(b"") == Seals(b"\xab" * 32).make(b"")
    later.join()
    monkeypatch.setattr(signing, "_WAIT", 0.1)
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(NoSecret, match="holds no secret"):
        seals(tmp_path / "empty")


def test_key_of_a_fleet_costs_whoever_guesses_it(tmp_path, monkeypatch):
    monkeypatch.setenv(signing.KEY_VARIABLE, "sixteen letters!\n")
    began = time.process_time()
    first = seals(tmp_path / "secret")
    assert time.process_time() - began > 0.01
    assert first.source == "the key in ACCEL_STORE_KEY"
    monkeypatch.setenv(signing.KEY_VARIABLE, "sixteen letters!")  # a file's last line is no part of it
    assert seals(None).make(b"") == first.make(b"")
    monkeypatch.setenv(signing.KEY_VARIABLE, "sixteen letters?")
    assert seals(None).make(b"") != first.make(b"")
    assert not list(tmp_path.iterdir())


def test_key_is_the_same_in_every_process(monkeypatch):
    """A figure of its own: were it derived otherwise, every fleet's graphs would be strangers' after an update."""
    monkeypatch.setenv(signing.KEY_VARIABLE, "a key for the whole fleet")
    script = (
        "import hashlib, hmac; secret = hashlib.scrypt(b'a key for the whole fleet', salt=b'accel store key',"
        " n=16384, r=8, p=1, dklen=32); print(hmac.new(secret, b'manifest', 'sha256').hexdigest())"
    )
    told = subprocess.check_output([sys.executable, "-c", script], cwd=Path(os.sep), text=True)
    assert seals(None).make(b"manifest") == told.strip()

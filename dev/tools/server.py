"""A ComfyUI server process of its own: started, waited for, and stopped whatever happens."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dev import ROOT, Problem

from .comfyui import complete, flags, free_port, make_base, tree


@dataclass(frozen=True)
class Server:
    """A ComfyUI that answers at `url`."""

    url: str
    base: Path
    log: Path
    process: subprocess.Popen

    def read_log(self) -> str:
        """Everything that the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def serving(
    base: Path,
    *,
    comfyui: Path | None = None,
    pack: Path | None = ROOT,
    port: int = 0,
    extra_flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    timeout: float = 180,
) -> Iterator[Server]:
    """Run ComfyUI over the base directory `base` (made if missing) while the block runs.

    Args:
        comfyui: its tree; by default `dev.tools.comfyui.tree()`.
        pack: the custom node pack to load, None for a ComfyUI without any.
        port: 0 takes a free one.
        environment: variables to add to this process's own.
        timeout: seconds to wait until it answers.

    Raises:
        Problem: it ends before it answers, does not answer in time, or could not import the pack.
    """
    comfyui = comfyui or tree()
    complete(comfyui)
    make_base(base, pack)
    port = free_port(port)
    log = base / "server.log"
    command = [sys.executable, "main.py", *flags(base, port), *extra_flags]
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=comfyui, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    server = Server(f"http://127.0.0.1:{port}", base, log, process)
    try:
        _wait_until_it_answers(server, timeout)
        if "IMPORT FAILED" in server.read_log():
            raise Problem(f"ComfyUI could not import a custom node pack; {log} says why.")
        yield server
    finally:
        _stop(process)


def _wait_until_it_answers(server: Server, timeout: float) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        code = server.process.poll()
        if code is not None:
            raise Problem(f"ComfyUI ended with exit code {code} before it answered; {server.log} says why.")
        try:
            with urllib.request.urlopen(f"{server.url}/system_stats", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise Problem(f"ComfyUI did not answer within {timeout:.0f} s; {server.log} says how far it came.")


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

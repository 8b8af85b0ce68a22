"""A measurement in a process of its own, which ends in one line of JSON."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kit import made_up_device

from dev import ROOT, Problem
from dev.tools import command, pack
from dev.tools.inprocess import boot


def result_of(measure: Callable, arguments: list, what: str, environment: Mapping[str, str] | None = None) -> Any:
    """What the function of a bench returns in a new process; arguments and result are values of JSON.

    what: is measured, for the sentence of a failure. environment: beside this process' own.

    Raises:
        Problem: the process failed; what it said stands on stderr.
    """
    module = sys.modules[measure.__module__].__spec__.name
    child = subprocess.run(
        [sys.executable, "-m", "dev.bench.child", module, measure.__name__, json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    if child.returncode:
        raise Problem(f"{what} ended with exit code {child.returncode}; see above.")
    return json.loads(child.stdout.splitlines()[-1])


def begin(cpu: bool, *flags: str) -> None:
    """ComfyUI and this pack in this process, as `inprocess.boot`; also on the made-up device. No graph is saved."""
    boot(cpu, *flags)
    pack.load()
    os.environ["ACCEL_STORE"] = "off"
    if made_up_device.is_here():
        made_up_device.prepare()
        made_up_device.sample_without_values()
        made_up_device.launches_take(1)  # so that ratios of times exist


def main() -> None:
    module, name, arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(arguments))))


if __name__ == "__main__":
    sys.exit(command.run(main))

"""A measurement in a process of its own, which ends in one line of JSON. Standard library only."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tools import ROOT, Problem


def result_of(module: str, arguments: list[str], what: str, environment: Mapping[str, str]) -> Any:
    """What `python -m module --child ARGUMENTS` prints as its last line.

    what: is measured, for the sentence of a failure. environment: beside this process' own.

    Raises:
        Problem: the process failed; what it said stands on stderr.
    """
    child = subprocess.run(
        [sys.executable, "-m", module, "--child", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if child.returncode:
        raise Problem(f"{what} ended with exit code {child.returncode}; see above.")
    return json.loads(child.stdout.splitlines()[-1])

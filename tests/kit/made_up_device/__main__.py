"""Build the made-up device into a folder, with a file for shells."""

import shlex
import sys
from pathlib import Path

from . import build, environment

folder = build(Path(sys.argv[1]))
lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment(folder).items()]
(folder / "environment.sh").write_text("".join(lines), encoding="utf-8")

"""The person's choice about CUDA graphs: in the environment or the settings. Needs no torch, for the command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...core import settings
from ...core.settings import ASK, CHOICES, OFF, ON
from .home import NAME as HOME
from .home import find

VARIABLE = "ACCEL_CUDA_GRAPHS"
"""Set to "on" or "off", it counts in place of the setting."""


def named() -> str | None:
    """The choice in the environment: ON, OFF, or None."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    return name if name in (ON, OFF) else None


def main(arguments: Sequence[str], command: str) -> int:
    """Show or keep the choice of an installation; the exit code."""
    parser = argparse.ArgumentParser(prog=command, description="Turn CUDA graphs on or off, from the next start on.")
    parser.add_argument("choice", nargs="?", choices=CHOICES, help="without it: show what is chosen")
    parser.add_argument("--user-directory", type=Path, metavar="DIR", help="what ComfyUI was started with by this name")
    parser.add_argument("--base-directory", type=Path, metavar="DIR", help="the same, where that is all it was given")
    options = parser.parse_args(arguments)
    home = find(None, options.user_directory, options.base_directory)
    given = options.user_directory or options.base_directory
    if home is None or not home.parent.is_dir() or (given is None and home.name != HOME):
        print("Whose choice? Name ComfyUI's user folder with --user-directory.", file=sys.stderr)
        return 1
    try:
        kept = settings.read(home)
        if options.choice is not None:
            kept = replace(kept, cuda_graphs=options.choice)
            settings.write(home, kept)
    except OSError as error:
        print(f"{error}.", file=sys.stderr)
        return 1
    chosen = "nobody has chosen" if kept.cuda_graphs == ASK else kept.cuda_graphs
    by_environment = f", but {VARIABLE} says {named()}" if named() else ""
    print(f"CUDA graphs: {chosen}{by_environment}. A choice counts from ComfyUI's next start on.")
    return 0

"""Torch's allocator: whether CUDA graphs can be captured with it, and what the person has chosen about that.

ComfyUI has torch allocate with cudaMallocAsync on most NVIDIA cards, and no CUDA graph can keep such memory. The pack's
`prestartup_script.py` has torch use its own allocator instead, where somebody has turned on CUDA graphs: it is the
process's, so never unasked, and only from the next start on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....core import settings
from ....core.reasons import Reason
from ....core.settings import ASK, OFF, ON
from .. import preferences
from ..home import find

VARIABLE = "ACCEL_CUDA_GRAPHS"
"""Set to "on" or "off", it counts in place of the setting."""

_INSTEAD = {
    "flag": Reason("graphs_flag"),
    "configuration": Reason("graphs_configuration"),
    "torch_loaded": Reason("graphs_torch_loaded"),
}
"""By what `prestartup_script.py` says of an allocator that it left alone."""


def state() -> Reason:
    """Whether CUDA graphs can be captured, who chose that, and what to do about it."""
    args = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    if not torch.cuda.is_available() or torch.version.hip is not None or getattr(args, "cpu", False):
        return Reason("graphs_nowhere")
    is_wanted, did = _wanted() == ON, getattr(args, "accel_allocator", None)
    if args is None:  # not in ComfyUI's process
        return Reason("graphs_on") if is_wanted else Reason("graphs_unknown")
    if torch.cuda.get_allocator_backend() == "native":
        if did != "native":
            return Reason("graphs_given")
        return Reason("graphs_on") if is_wanted else Reason("graphs_turned_off")
    if not is_wanted:
        return Reason("graphs_off", variable=VARIABLE)
    return _INSTEAD.get(did, Reason("graphs_turned_on"))


def is_offered() -> bool:
    """Whether nobody has chosen yet, and there is something to choose."""
    return _wanted() == ASK and state().code == "graphs_off"


def as_json() -> dict[str, Any]:
    """`state` for the page. choice: of the settings. is_named: the environment decides, so that no button can."""
    return {"choice": preferences.current().cuda_graphs, "is_named": _named() is not None, **state().as_json()}


def main(arguments: Sequence[str], command: str) -> int:
    """Show or keep the choice of an installation; the exit code."""
    parser = argparse.ArgumentParser(prog=command, description="Turn CUDA graphs on or off, from the next start on.")
    parser.add_argument("choice", nargs="?", choices=settings.SWITCH, help="without it: show what is chosen")
    parser.add_argument("--user-directory", type=Path, metavar="DIR", help="what ComfyUI was started with by this name")
    parser.add_argument("--base-directory", type=Path, metavar="DIR", help="the same, where that is all it was given")
    options = parser.parse_args(arguments)
    home = find(None, options.user_directory, options.base_directory)
    if home is None:
        print("Whose choice? Name ComfyUI's user folder with --user-directory.", file=sys.stderr)
        return 1
    try:
        chosen = settings.read(home.path)
        if options.choice is not None:
            chosen = replace(chosen, cuda_graphs=options.choice)
            settings.write(home.path, chosen)
    except OSError as error:
        print(f"{error}. {VARIABLE}=on does the same for one start.", file=sys.stderr)
        return 1
    named = f", but {VARIABLE} says {_named()}" if _named() else ""
    print(f"CUDA graphs: {chosen.cuda_graphs}{named}. It counts from ComfyUI's next start on.")
    return 0


def _wanted() -> str:
    return _named() or _kept().cuda_graphs


def _kept() -> settings.Settings:
    if "folder_paths" in sys.modules:
        return preferences.current()
    home = find(None, None, None)
    try:
        return settings.Settings() if home is None else settings.read(home.path)
    except OSError:
        return settings.Settings()


def _named() -> str | None:
    named = os.environ.get(VARIABLE, "").strip().lower()
    return named if named in (ON, OFF) else None

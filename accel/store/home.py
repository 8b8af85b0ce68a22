"""Whose store is meant: a ComfyUI's, whose user folder holds secret, settings and graphs, or this person's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

NAME = "__accel"
"""In ComfyUI's user folder. Names that begin so are no user's: core serves nothing from there."""


PERSONAL_NAME = "comfy-accel"
"""Of the folder for programs that are not ComfyUI, among those in which programs keep what they can make again."""


class Home(NamedTuple):
    """path: the folder; it may not exist yet. given: a person named it; else it is where ComfyUI has it by default."""

    path: Path
    given: bool


def find(home: Path | None, user_directory: Path | None, base_directory: Path | None) -> Home | None:
    """The home that the options name, the strongest first, else that of the ComfyUI in which this pack lies.

    Where it lies in none, this person's own, if there is one.

    user_directory, base_directory: what ComfyUI was started with by the same names.
    """
    if home is not None:
        return Home(home, given=True)
    if user_directory is not None:
        return Home(user_directory / NAME, given=True)
    if base_directory is not None:
        return Home(base_directory / "user" / NAME, given=True)
    for pack in _packs():
        user = pack.parent.parent / "user"
        if pack.parent.name == "custom_nodes" and user.is_dir():
            return Home(user / NAME, given=False)
    own = of_this_person()
    return Home(own, given=False) if own is not None and own.is_dir() else None


def of_this_person() -> Path | None:
    """The home for programs that are not ComfyUI; it may not exist yet. None for an account without a home."""
    if sys.platform == "win32":
        given, below = os.environ.get("LOCALAPPDATA"), ("AppData", "Local")
    elif sys.platform == "darwin":
        given, below = None, ("Library", "Caches")
    else:
        given, below = os.environ.get("XDG_CACHE_HOME"), (".cache",)
    if given and os.path.isabs(given):
        return Path(given) / PERSONAL_NAME
    try:
        return Path.home().joinpath(*below, PERSONAL_NAME)
    except RuntimeError:
        return None


def _packs() -> list[Path]:
    """This pack's folder, by the names it is reached by: a link to it may be what lies in custom_nodes.

    Python knows the folder that it was started in without links; the shell says how one came there.
    """
    pack = Path(os.path.abspath(__file__)).parents[2]
    came_by = Path(os.environ.get("PWD", ""))
    try:
        linked = came_by.is_absolute() and os.path.samefile(came_by, pack)
    except OSError:
        linked = False
    return [came_by, pack] if linked else [pack]

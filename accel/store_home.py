"""Which ComfyUI a command at the machine means: its user folder holds the store's secret, settings and graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

NAME = "__accel"
"""In ComfyUI's user folder. Names that begin so are no user's: core serves nothing from there."""


class Home(NamedTuple):
    """path: the folder; it may not exist yet. given: a person named it; else it is where ComfyUI has it by default."""

    path: Path
    given: bool


def find(home: Path | None, user_directory: Path | None, base_directory: Path | None) -> Home | None:
    """The home that the options name, the strongest first, else that of the ComfyUI in which this pack lies.

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
    return None


def _packs() -> list[Path]:
    """This pack's folder, by the names it is reached by: a link to it may be what lies in custom_nodes.

    Python knows the folder that it was started in without links; the shell says how one came there.
    """
    pack = Path(os.path.abspath(__file__)).parent.parent
    came_by = Path(os.environ.get("PWD", ""))
    try:
        linked = came_by.is_absolute() and os.path.samefile(came_by, pack)
    except OSError:
        linked = False
    return [came_by, pack] if linked else [pack]

"""Where ComfyUI keeps what outlives it, settings and graphs: in its user folder, out of reach over HTTP."""

from __future__ import annotations

import os
from pathlib import Path

from ...store.location import personal_home

NAME = "__accel"
"""In ComfyUI's user folder. Names that begin so are no user's: core serves nothing from there."""


def running_home() -> Path:
    """The home of the ComfyUI in this process; it may not exist yet."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / NAME


def find() -> Path | None:
    """The home of the ComfyUI that has this pack; outside of any this person's own, if there is one."""
    for pack in _packs():
        user = pack.parent.parent / "user"
        if pack.parent.name == "custom_nodes" and user.is_dir():
            return user / NAME
    own = personal_home()
    return own if own is not None and own.is_dir() else None


def _packs() -> list[Path]:
    """This pack's folder by each name that leads to it: custom_nodes may hold only a link to it.

    Python resolves links in the folder that it was started in; the shell keeps them in PWD.
    """
    pack = Path(os.path.abspath(__file__)).parents[3]
    shell_folder = Path(os.environ.get("PWD", ""))
    try:
        linked = shell_folder.is_absolute() and os.path.samefile(shell_folder, pack)
    except OSError:
        linked = False
    return [shell_folder, pack] if linked else [pack]

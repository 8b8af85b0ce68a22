"""Where ComfyUI keeps what outlives it, settings and graphs: in its user folder, out of reach over HTTP."""

from pathlib import Path

NAME = "__accel"
"""In ComfyUI's user folder. Names that begin so are no user's: core serves nothing from there."""


def running_home() -> Path:
    """The home of the ComfyUI in this process; it may not exist yet."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / NAME

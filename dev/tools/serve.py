"""ComfyUI with this pack, in the foreground, for a browser on this machine."""

import sys
from pathlib import Path

from dev import WORK, Problem

from . import command
from .comfyui import offer_models
from .server import serving

FOLDER = WORK / "serve"


def main(arguments: list[str] | None = None) -> None:
    parser = command.Parser(prog="dev.py serve", description=__doc__)
    parser.add_argument("--port", type=int, default=8188, help="0 takes a free one (default: 8188)")
    parser.add_argument("--models", type=Path, metavar="PATH", help="the models folder of an existing ComfyUI")
    options = parser.parse_args(arguments)
    extra = ["--extra-model-paths-config", str(offer_models(FOLDER, options.models))] if options.models else []
    print("Starting ComfyUI ...", flush=True)
    with serving(FOLDER, port=options.port, extra_flags=extra) as server:
        print(f"ComfyUI with comfy-accel: {server.url} (log: {server.log}; Ctrl-C stops it)", flush=True)
        try:
            code = server.process.wait()
        except KeyboardInterrupt:
            print("Stopping ...", flush=True)
            return
    raise Problem(f"ComfyUI ended by itself with exit code {code}; {server.log} says why.")


if __name__ == "__main__":
    sys.exit(command.run(main))

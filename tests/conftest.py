"""Makes the pack importable as `comfy_accel`, the way ComfyUI loads it, and `bench` beside it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# At the end, so that `nodes` still means ComfyUI's nodes.py.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import pack  # noqa: E402

pack.load()

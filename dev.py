"""Run this pack in a real ComfyUI, with nothing installed beforehand but Python: `dev.py --help` lists the commands."""

import os
import sys

if sys.version_info < (3, 10):
    sys.exit("dev.py needs Python 3.10 or newer, and this is %d.%d: run it with a newer one." % sys.version_info[:2])

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # where an isolated Python has not looked
from dev.main import main  # noqa: E402
from dev.tools.command import run  # noqa: E402

if __name__ == "__main__":
    sys.exit(run(main))

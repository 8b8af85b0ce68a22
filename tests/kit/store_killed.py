"""A process to be killed: `python store_killed.py FOLDER` saves and prunes without end. Starts quickly: no torch."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from dev.tools import pack  # noqa: E402

pack.load()
from comfy_accel.accel.store import manifest as store_entry  # noqa: E402
from comfy_accel.accel.store.folder import Folder  # noqa: E402


def main(home: Path) -> None:
    folder = Folder(home / "graphs")
    print("ready", flush=True)
    number = 0
    while True:
        data = os.urandom(200_000)
        manifest = store_entry.describe(f"{number % 8:024x}", "Block", {}, {}, data)
        store_entry.write(folder, manifest, data)
        folder.prune(3_000_000)
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))

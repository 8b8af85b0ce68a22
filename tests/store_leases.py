"""A process that wants a graph of a store with leases: `python store_leases.py FOLDER SECONDS LIMIT`. Without torch.

Waits for a line, then takes the lease and makes the graph for so many seconds, or waits for who makes it.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import pack  # noqa: E402

pack.load()
from comfy_accel.accel.store.folder import LocalFolder  # noqa: E402
from comfy_accel.accel.store.lease import Leases  # noqa: E402


def main(path: Path, seconds: float, limit: float) -> None:
    folder = LocalFolder(path)
    leases = Leases(folder, limit=limit, beat=0.1)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()

    def load():
        return "graph" if any(folder.files("ab12-0.json")) else None

    with contextlib.ExitStack() as ending:
        made = leases.wait_or_take("ab12", {"device": "cpu"}, load, ending) is None
        if made:
            time.sleep(seconds)
            folder.write("ab12-0.json", b"{}")
    print(json.dumps({"made": made, "leases": leases.statistics()}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))

"""`python -m accel store ...`, or `accel store ...` where the package is installed."""

import sys


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] != ["store"]:
        print("usage: accel store {list,verify,export,import,prune,move,limit} ...", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    from .store.cli import main as store

    return store(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())

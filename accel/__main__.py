"""`python -m accel store|doctor`; `comfy-accel` in its place where the package is installed."""

import sys


def main() -> int:
    for stream in (sys.stdout, sys.stderr):  # Windows writes to files in a code page that lacks most letters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    command = f"python -m {__package__}" if __name__ == "__main__" else "comfy-accel"
    if arguments == ["doctor"]:
        from .hosts.comfyui.server import doctor

        print("\n".join(doctor.lines()))
        return 0
    if arguments[:1] != ["store"]:
        print(f"usage: {command} store {{list,export,import}} ...", file=sys.stderr)
        print(f"       {command} doctor", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    from .hosts.comfyui.store_cli import main as store

    return store(arguments[1:], f"{command} store")


if __name__ == "__main__":
    sys.exit(main())

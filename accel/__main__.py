"""`python accel/__main__.py doctor`; `comfy-accel` in its place where the package is installed."""

import importlib.util
import os
import sys

_PACK = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FILE = os.path.join("accel", "__main__.py")
"""From the pack's folder. `-m accel` finds nothing there with the Python of Windows portable, which is isolated."""
_PYTHONS = (
    ("..", "..", "..", "python_embeded", "python.exe"),  # Windows portable, which spells it so
    *(("..", "..", folder, "Scripts", "python.exe") for folder in (".venv", "venv")),
    *(("..", "..", folder, "bin", "python") for folder in (".venv", "venv")),
)
"""Where ComfyUI's Python may be, from the pack's folder."""


def _find_comfyui_python():
    """What to run in place of a Python without PyTorch."""
    found = [os.path.join(*parts) for parts in _PYTHONS if os.path.isfile(os.path.join(_PACK, *parts))]
    python = [*found, os.path.join(*_PYTHONS[0]) if os.name == "nt" else "PATH_TO_ITS_PYTHON"][0]
    said = f"This Python ({sys.executable}) has no PyTorch. Run it with the one that ComfyUI runs with:"
    return f'{said}\n\n    cd "{_PACK}"\n    {python} {_FILE} doctor\n'


def main() -> int:
    for stream in (sys.stdout, sys.stderr):  # Windows writes to files in a code page that lacks most letters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    if arguments == ["doctor"]:
        if importlib.util.find_spec("torch") is None:
            print(_find_comfyui_python(), file=sys.stderr)
            return 1
        from .hosts import doctor

        print("\n".join(f"{name}: {said}" for name, said in doctor.parts()))
        return 0
    print(f"usage: {f'python {_FILE}' if __name__ == '__main__' else 'comfy-accel'} doctor", file=sys.stderr)
    return 0 if arguments[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    if not __package__:  # run as a file, whose own folder is no place to import from
        sys.path[:] = [_PACK, *(path for path in sys.path if path != os.path.join(_PACK, "accel"))]
        __package__ = "accel"
    sys.exit(main())

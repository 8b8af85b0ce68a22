"""The command as people start it: from the repository's root, and as `comfy-accel` where the package is installed."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with this repository's wheel in it, built from a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "accel", source / "accel", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    newest = int(metadata.version("setuptools").partition(".")[0])
    wanted = int(re.search(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text())[1])
    isolation = ["--no-build-isolation"] if newest >= wanted else []  # else pip fetches a newer one
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    built = subprocess.run(
        [*pip, "wheel", *isolation, "--no-deps", "--wheel-dir", str(folder), str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if built.returncode and re.search(r"No matching distribution found for setuptools|ConnectionError", built.stdout):
        pytest.skip(f"there is no setuptools>={wanted} to build with, and none can be fetched")
    assert built.returncode == 0, built.stdout
    (wheel,) = folder.glob("*.whl")
    subprocess.check_call([*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", folder / "lib", wheel])
    return folder / "lib"


@pytest.mark.thorough  # builds and installs the wheel
def test_wheel_brings_the_command(installed, tmp_path):
    (script,) = (installed / "bin").glob("comfy-accel*")
    assert "Compiling: " in told([script, "doctor"], tmp_path, PYTHONPATH=str(installed))


@pytest.mark.thorough  # builds and installs the wheel
def test_wheel_has_the_whole_engine(installed):
    engine = installed / "comfy_accel"
    brought = {path.relative_to(engine) for path in engine.rglob("*.py")}
    assert brought == {path.relative_to(ROOT / "accel") for path in (ROOT / "accel").rglob("*.py")}
    assert not (installed / "accel").exists()  # the name of another project's package


@pytest.mark.thorough  # builds and installs the wheel
def test_wheel_is_imported_without_torch_and_brings_what_scripts_call(installed, tmp_path):
    names = ("DeepCacheSettings", "accelerate_module", "accelerate_pipeline", "accelerated", "restore", "warm_up")
    without = f"import comfy_accel as it; print(it.__file__, set(it.__all__) == set({names}) <= set(dir(it)))"
    where = told([sys.executable, "-c", NO_TORCH + without], tmp_path, PYTHONPATH=str(installed))
    assert where.split() == [str(installed / "comfy_accel" / "__init__.py"), "True"]
    script = (
        f"import sys; from comfy_accel import {', '.join(names)}; print(warm_up.__module__, 'comfy' in sys.modules)"
    )
    said = told([sys.executable, "-c", script], tmp_path, PYTHONPATH=str(installed)).split()
    assert said == ["comfy_accel.hosts.diffusers.warm_up", "False"]


@pytest.mark.thorough  # builds and installs the wheel
def test_packages_that_scripts_need_are_listed(installed):
    (found,) = metadata.distributions(name="comfy-accel", path=[str(installed)])
    assert found.metadata["Requires-Python"] == ">=3.10"
    assert found.version == comfy_accel.accel.__version__
    needed = [line for line in found.requires if 'extra == "diffusers"' in line]
    assert [re.match(r"\w+", line)[0] for line in needed] == ["torch", "diffusers", "peft", "accelerate"]
    assert not [line for line in found.requires if "extra ==" not in line]

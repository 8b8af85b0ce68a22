"""All of a release but the upload: what the Comfy Registry would say, what it would get, and the wheel.

Run by `dev.py release`, which brings comfy-cli in an environment of its own.
"""

import argparse
import posixpath
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from dev import ROOT, WORK, Problem

from . import command

LARGEST = 1_500_000
"""Bytes of the registry's package."""

NEEDED = (
    *("__init__.py", "prestartup_script.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"),
    "accel/__init__.py",
)
NEEDED_FOLDERS = ("nodes/", "web/docs/", "locales/zh/", "example_workflows/api/")
PLACEHOLDERS = {"ADDRESS_OF_THIS_PAGE": "https://github.com/{owner}/comfy-accel", "OWNER": "{owner}"}
"""In pyproject.toml and the pages, where only the person who publishes knows what to write."""

_LINK = re.compile(r"(?<=\]\()[^)\s#]+|(?<=src=\")[^\"]+|(?<=srcset=\")[^\"]+")


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    tools = options.tools
    if options.owner:
        fill(options.owner)
    checks = {
        "version": versions_differ,
        "comfy node validate": lambda: validation(tools),
        "comfy node pack": lambda: package(tools),
        "wheel": lambda: wheel(tools),
        "placeholders": lambda: (wrong for name in _written() for wrong in placeholders(name, _text(name))),
        "links": lambda: (f"{name} names {link}, which is not packed" for name in _written() for link in lacking(name)),
    }
    failed = []
    for name, check in checks.items():
        wrong = list(check())
        print(f"{name}: {'; '.join(wrong) or 'fine'}", flush=True)
        failed += [name] if wrong else []
    if failed:
        raise Problem(f"Not ready to publish: see {', '.join(failed)} above.")
    print("Ready. Publish with `comfy node publish`, then tag the commit.")


def versions_differ(folder: Path = ROOT) -> Iterator[str]:
    """Where pyproject.toml, the package and the newest entry of the changelog do not name one version."""
    places = {
        "pyproject.toml": r'(?m)^version = "(.+)"$',
        "accel/__init__.py": r'(?m)^__version__ = "(.+)"$',
        "CHANGELOG.md": r"(?m)^## (\S+)",
    }
    found = {name: re.search(pattern, (folder / name).read_text(encoding="utf-8")) for name, pattern in places.items()}
    said = {name: match[1] if match else "nothing" for name, match in found.items()}
    if len(set(said.values())) > 1:
        yield ", ".join(f"{name} says {version}" for name, version in said.items())


def placeholders(name: str, text: str) -> Iterator[str]:
    """The lines of a file that still wait for somebody's name."""
    for number, line in enumerate(text.splitlines(), 1):
        for placeholder in PLACEHOLDERS:
            if re.search(rf"\b{placeholder}\b", line) and not line.startswith("#"):
                yield f"line {number} of {name} has {placeholder}: give --owner"


def packed() -> set[str]:
    """What `comfy node pack` packs: all that git tracks but for what .comfyignore names."""
    return {*_git("ls-files")} - {*_git("ls-files", "--cached", "--ignored", "--exclude-from=.comfyignore")}


def lacking(name: str) -> dict[str, str]:
    """Links of a packed page to what is not: link → path in the repository, "" for GitHub's issues."""
    names, found = packed(), {}
    for link in _LINK.findall(_text(name) if name.endswith(".md") else ""):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        is_there = path in names or any(one.startswith(f"{path}/") for one in names)
        if "://" not in link and not is_there:
            found[link] = "" if link.endswith("../issues") else path
    return found


def fill(owner: str) -> None:
    """Write the owner's name for every placeholder, and whole addresses for links to what is not packed."""
    for name in _written():
        text, page = _text(name), PLACEHOLDERS["ADDRESS_OF_THIS_PAGE"].format(owner=owner)
        absolute = {link: _address(page, path) for link, path in lacking(name).items()}
        text = _LINK.sub(lambda match, absolute=absolute: absolute.get(match[0], match[0]), text)
        for placeholder, value in PLACEHOLDERS.items():
            text = re.sub(rf"\b{placeholder}\b", value.format(owner=owner), text)
        (ROOT / name).write_text(text, encoding="utf-8")


def _address(page: str, path: str) -> str:
    if not path:
        return f"{page}/issues"
    is_picture = path.endswith((".png", ".jpg", ".svg"))
    host = page.replace("github.com", "raw.githubusercontent.com") + "/main" if is_picture else f"{page}/blob/main"
    return f"{host}/{path}"


def _written() -> list[str]:
    """The packed files that people read, and pyproject.toml."""
    return sorted(name for name in packed() if name == "pyproject.toml" or re.fullmatch(r"(docs/)?[\w-]+\.md", name))


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def validation(tools: Path) -> Iterator[str]:
    """What `comfy node validate` warns of."""
    said = _comfy(tools, "validate")
    if "passed successfully" not in said or "arning" in said:
        yield said.strip()


def forbidden(folder: Path = ROOT) -> list[str]:
    """What `comfy node validate` would find in a folder, packed or not: `exec`, `eval`, two statements in a line."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format=concise"]
    found = subprocess.run([*ruff, "--select=S102,S307,E702", folder], capture_output=True, text=True)
    return (found.stdout + found.stderr).splitlines() if found.returncode else []


def package(tools: Path) -> Iterator[str]:
    """What is wrong with what `comfy node pack` packs: too large, or incomplete."""
    made = ROOT / "node.zip"
    try:
        _comfy(tools, "pack")
        yield from contents(made)
    finally:
        made.unlink(missing_ok=True)


def contents(made: Path) -> Iterator[str]:
    """The same for a package that is there."""
    size = made.stat().st_size
    print(f"  {size / 1e6:.2f} MB", flush=True)
    if size > LARGEST:
        yield f"{size / 1e6:.2f} MB is more than {LARGEST / 1e6} MB"
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        for needed in NEEDED:
            if needed not in names:
                yield f"{needed} is missing"
        for needed in NEEDED_FOLDERS:
            if not any(name.startswith(needed) for name in names):
                yield f"{needed} is missing"
        for name in names:
            if name.startswith(("tests/", "dev/", "dev.py", ".")) and name != ".comfyignore":
                yield f"{name} is of no use to a user"


def wheel(tools: Path) -> Iterator[str]:
    """What is wrong with the wheel: it cannot be built, or not imported by itself."""
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        quiet = ["--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
        pip = [tools, "-m", "pip", "wheel", *quiet, "--wheel-dir", folder, ROOT]
        built = subprocess.run(pip, capture_output=True, text=True)
        made = list(Path(folder).glob("*.whl"))
        if built.returncode or not made:
            yield built.stderr.strip()[-500:] or "pip built none"
            return
        inside = f"import sys; sys.path.insert(0, {str(made[0])!r}); import comfy_accel.__main__, comfy_accel as it"
        wanted = "print(it.__version__, it.accelerate_pipeline.__name__)"
        ran = subprocess.run([sys.executable, "-c", f"{inside}; {wanted}"], cwd=folder, capture_output=True, text=True)
        if ran.returncode:
            yield f"it cannot be imported: {ran.stderr.strip()[-500:]}"


def _comfy(tools: Path, verb: str) -> str:
    """What `comfy node VERB` says."""
    program = tools.with_name("comfy.exe" if tools.suffix == ".exe" else "comfy")
    ran = subprocess.run(
        [program, "--skip-prompt", "--no-json", "node", verb],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if ran.returncode:
        raise Problem(f"comfy node {verb} fails: {(ran.stdout + ran.stderr).strip()[-500:]}")
    return ran.stdout + ran.stderr


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="dev.py release", description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="the Python of an environment with comfy-cli")
    parser.add_argument("--owner", help="a GitHub name, written for all placeholders first")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(command.run(main))

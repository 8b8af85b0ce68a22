"""What `dev.py release` checks, as far as it needs neither comfy-cli nor a network."""

import shutil
import zipfile

import pytest

from dev import ROOT
from dev.tools import release


def test_the_versions_agree():
    assert list(release.versions_differ()) == []


def test_owner_fills_every_placeholder_and_every_link_to_what_is_not_packed(tmp_path, monkeypatch):
    names = [name for name in release.packed() if name.endswith((".md", ".toml"))]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    files = release.packed()
    monkeypatch.setattr(release, "packed", lambda: files)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    written = release._written()
    assert {"README.md", "pyproject.toml", "docs/api.md"} <= {*written} and any(map(release.lacking, written))
    release.fill("somebody")
    for name in written:
        assert release.lacking(name) == {} and list(release.placeholders(name, release._text(name))) == []
    readme = release._text("README.md")
    assert "git clone https://github.com/somebody/comfy-accel comfy-accel" in readme
    assert "(https://github.com/somebody/comfy-accel/issues)" in readme
    assert "https://raw.githubusercontent.com/somebody/comfy-accel/main/docs/session.png" in readme


def test_what_the_registry_forbids_is_nowhere_and_would_be_named(tmp_path):
    assert release.forbidden() == []
    (tmp_path / "a.py").write_text("exec('1')\neval('2')\na = 1; b = 2\n")
    said = "\n".join(release.forbidden(tmp_path))
    assert all(rule in said for rule in ("S102", "S307", "E702"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """What `comfy node pack` makes: all that git tracks but for what .comfyignore names."""
    names = release.packed()
    if not names:
        pytest.skip("this copy of the repository has no git history")
    made = tmp_path_factory.mktemp("pack") / "node.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            if (ROOT / name).is_file():
                archive.write(ROOT / name, name)
    return made


def test_the_package_is_small_and_whole(packed):
    assert list(release.contents(packed)) == []

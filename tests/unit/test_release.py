"""What `dev.py release` checks, as far as it needs neither comfy-cli nor a network."""

import zipfile

import pytest

from dev import ROOT
from dev.tools import release


def test_the_versions_agree():
    assert list(release.versions_differ()) == []


def test_what_the_registry_forbids_is_nowhere_and_would_be_named(tmp_path):
    assert release.forbidden() == []
    (tmp_path / "a.py").write_text("exec('1')\neval('2')\na = 1; b = 2\n")
    said = "\n".join(release.forbidden(tmp_path))
    assert all(rule in said for rule in ("S102", "S307", "E702"))


def test_the_package_is_small_and_whole(tmp_path):
    """Packed as `comfy node pack` does: all that git tracks but for what .comfyignore names."""
    names = release.packed()
    if not names:
        pytest.skip("this copy of the repository has no git history")
    with zipfile.ZipFile(tmp_path / "node.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            if (ROOT / name).is_file():
                archive.write(ROOT / name, name)
    assert list(release.contents(tmp_path / "node.zip")) == []

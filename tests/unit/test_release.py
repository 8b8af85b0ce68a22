"""What `dev.py release` checks, as far as it needs neither comfy-cli nor a network."""

import shutil
import zipfile

import pytest

from dev import ROOT
from dev.tools import release


def test_the_versions_agree():
    assert list(release.versions_differ()) == []


def test_a_version_that_the_changelog_does_not_have_is_named(tmp_path):
    (tmp_path / "accel").mkdir()
    (tmp_path / "pyproject.toml").write_text('version = "1.2.0"\n')
    (tmp_path / "accel" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.1.0\n")
    (said,) = release.versions_differ(tmp_path)
    assert said == "pyproject.toml says 1.2.0, accel/__init__.py says 1.2.0, CHANGELOG.md says Unreleased"


def test_placeholders_are_found_in_values_and_not_in_comments():
    said = list(release.placeholders("a.toml", '# OWNER\nPublisherId = "OWNER"\ngit clone ADDRESS_OF_THIS_PAGE\n'))
    assert said == [
        "line 2 of a.toml has OWNER: give --owner",
        "line 3 of a.toml has ADDRESS_OF_THIS_PAGE: give --owner",
    ]


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


def test_what_a_package_lacks_or_has_too_much_is_named(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "node.zip", "w") as archive:
        for name in (*release.NEEDED[1:], *release.NEEDED_FOLDERS[1:], "tests/test_it.py"):
            archive.writestr(name, "")
    monkeypatch.setattr(release, "LARGEST", 10)
    said = list(release.contents(tmp_path / "node.zip"))
    assert said[0].endswith("is more than 1e-05 MB")
    assert said[1:] == ["__init__.py is missing", "nodes/ is missing", "tests/test_it.py is of no use to a user"]

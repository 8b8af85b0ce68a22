"""What `dev.py release` checks, as far as it needs neither comfy-cli nor a network."""

import subprocess
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
    assert list(release.placeholders('# OWNER\nPublisherId = "OWNER"\n')) == ["line 2 of pyproject.toml has OWNER"]


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """What `comfy node pack` makes: all that git tracks but for what .comfyignore names."""
    tracked = git("ls-files")
    if not tracked:
        pytest.skip("this copy of the repository has no git history")
    ignored = git("ls-files", "--cached", "--ignored", "--exclude-from=.comfyignore")
    made = tmp_path_factory.mktemp("pack") / "node.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted({*tracked} - {*ignored}):
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

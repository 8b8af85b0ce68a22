"""The drawn pictures of the templates, and those of the registry."""

from PIL import Image

from dev import ROOT
from dev.tools import workflow


def test_every_template_has_its_drawn_picture_and_api_form():
    names = {path.stem for path in workflow.TEMPLATES.glob("*.json")}
    assert names == {path.stem for path in workflow.TEMPLATES.glob("*.jpg")}
    assert all(workflow.api_form(name).is_file() for name in names)


def test_pictures_of_the_registry_have_the_shapes_that_it_shows():
    banner, icon = (Image.open(ROOT / "docs" / f"{name}.png") for name in ("banner", "icon"))
    assert banner.width * 9 == banner.height * 21 and icon.width == icon.height <= 400

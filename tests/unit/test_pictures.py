"""The drawn pictures: one for each template, and the session's from its rows."""

import json

from PIL import Image

from dev import ROOT
from dev.bench import session_plot
from dev.tools import workflow


def test_every_template_has_its_drawn_picture_and_api_form():
    names = {path.stem for path in workflow.TEMPLATES.glob("*.json")}
    assert names == {path.stem for path in workflow.TEMPLATES.glob("*.jpg")}
    assert all(workflow.api_form(name).is_file() for name in names)


def test_the_registry_s_pictures_have_the_shapes_that_it_shows():
    banner, icon = (Image.open(ROOT / "docs" / f"{name}.png") for name in ("banner", "icon"))
    assert banner.width * 9 == banner.height * 21 and icon.width == icon.height <= 400


def distance(one, other) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_the_sessions_picture_shows_each_image_that_compiled(tmp_path):
    rows = json.loads((ROOT / "docs" / "session.json").read_text(encoding="utf-8"))["rows"]
    waits = Image.new("RGB", (1, 1), session_plot.WAITS).getpixel((0, 0))

    def orange(compile_in: set[int]) -> int:
        """Pixels of that colour in the picture of a session that compiles in these rows, the legend's left out."""
        changed = [{**row, "compilations": int(index in compile_in), "waiting_s": 8} for index, row in enumerate(rows)]
        session_plot.save(tmp_path / "session.png", changed)
        picture = Image.open(tmp_path / "session.png").convert("RGB")
        picture = picture.crop((0, session_plot.TOP, *picture.size))
        return sum(count for count, colour in picture.getcolors(1 << 20) if distance(colour, waits) < 80)

    compiled = {i for i, row in enumerate(rows) if row["compilations"] and row["contender"] != "eager"}
    assert len(compiled) == 18
    assert orange(set()) == 0
    assert round(orange(compiled) / orange({min(compiled)})) == 18

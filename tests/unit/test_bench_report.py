"""What measurements end in: table, JSON, contact sheet."""

import json

from PIL import Image

from dev.bench import pictures, report

ROWS = [
    {"width": 192, "plain_s": 3.14159, "skipped": None},
    {"width": 8, "plain_s": 10.0, "skipped": 5},
]


def test_table_aligns_numbers_and_shows_gaps():
    assert report.table(ROWS).splitlines() == [
        "width  plain_s  skipped",
        "-----  -------  -------",
        "  192     3.14        -",
        "    8    10.00        5",
    ]


def test_json_tells_machine_versions_and_rows(tmp_path):
    (tmp_path / "comfyui_version.py").write_text('__version__ = "1.2.3"\n')
    report.write(tmp_path / "new" / "report.json", ROWS, comfyui=tmp_path)
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert set(written) == {"machine", "versions", "rows"}
    assert written["rows"] == ROWS
    assert written["versions"]["comfyui"] == "1.2.3"
    assert written["versions"]["comfy-accel"] and written["versions"]["torch"]
    assert written["machine"]["cores"] > 0
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.json"]


def test_contact_sheet_shows_every_image_at_its_size(tmp_path):
    columns = [
        [("plain", Image.new("RGB", (40, 60), "red")), ("accelerated", Image.new("RGB", (40, 60), "lime"))],
        [("plain", Image.new("RGB", (120, 30), "blue"))],
    ]
    pictures.contact_sheet(tmp_path / "sheet.png", columns)
    colours = dict(reversed(entry) for entry in Image.open(tmp_path / "sheet.png").getcolors(10_000))
    assert colours[(255, 0, 0)] == colours[(0, 255, 0)] == 40 * 60
    assert colours[(0, 0, 255)] == 120 * 30

"""README's table follows from docs/benchmarks.json."""

import json
import re

from dev import ROOT

CONTENDERS = ("core", "compiled-blocks", "cuda-graphs")


def test_table_of_speed_is_what_was_measured():
    measured = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))["rows"]
    rows = {(row["model"], row["size"], row["contender"]): row for row in measured if row["part"] == "steps"}
    table = re.findall(
        r"^\| (\S+) (\d+)²[^|]*\|(.+)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(table) == 6
    for model, side, cells in table:
        plain, *speeds, waits, images = (cell.strip(" *") for cell in cells.split("|"))
        eager = rows[model, f"{side}x{side}", "eager"]
        assert plain == f"{eager['step_ms']:.0f} ms"
        for name, speed, wait, count in zip(CONTENDERS, speeds, _split(waits), _split(images), strict=True):
            row = rows.get((model, f"{side}x{side}", name))
            if row is None:
                assert speed == "–" or "H100" in speed
                continue
            waited, gained = row["first_image_s"] - eager["first_image_s"], (row["eager_ms"] - row["step_ms"]) / 50
            assert speed in ("as without", f"{row['eager_ms'] / row['step_ms']:.2f} ×")
            assert wait in ("as at 1024²", f"{waited:.0f}")
            assert wait == "as at 1024²" or count == (f"{waited / gained:.0f}" if gained > 0 else "never")


def _split(cell):
    return [cell] * 3 if cell.startswith("as") else cell.removesuffix(" s").split(", ")

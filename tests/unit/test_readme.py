"""README's table follows from docs/benchmarks.json."""

import json
import re

from dev import ROOT

NAMES = ("core", "compiled-blocks", "cuda-graphs")


def test_table_of_speed_is_what_was_measured():
    measured = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))["rows"]
    rows = {(row["model"], row["size"], row["contender"]): row for row in measured if row["part"] == "steps"}
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for model, side, cells in (table := re.findall(r"^\| (\S+) (\d+)²[^|]*\|(.+)\|$", page, re.MULTILINE)):
        plain, *speeds, waits, images = (cell.strip(" *").removesuffix(" s") for cell in cells.split("|"))
        eager = rows[model, f"{side}x{side}", "eager"]
        assert plain == f"{eager['step_ms']:.0f} ms"
        for name, *told in zip(NAMES, speeds, waits.split(", "), images.split(", "), strict=True):
            if (row := rows.get((model, f"{side}x{side}", name))) is None:
                assert told[0] == "–" or "H100" in told[0]
                continue
            waited, gained = row["first_image_s"] - eager["first_image_s"], (row["eager_ms"] - row["step_ms"]) / 50
            found = [f"{row['eager_ms'] / row['step_ms']:.2f} ×", f"{waited:.0f}", f"{waited / gained:.0f}"]
            has_own_wait = not told[1].startswith("as ")
            pairs = zip(told, found[: 1 + 2 * has_own_wait], strict=False)
            assert [pair for pair in pairs if pair[0] not in (pair[1], "as without", "never")] == []
    assert len(table) == 6

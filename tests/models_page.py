"""docs/models.md: which models were seen to do what, from the rows that `comfyui/test_models.py` wrote."""

from __future__ import annotations

from pathlib import Path

import comfyui_version

CORE = comfyui_version.__version__

_DOCS = Path(__file__).resolve().parent.parent / "docs"
JSON, PAGE = _DOCS / "models.json", _DOCS / "models.md"

COLUMNS = ("compiled", "DeepCache", "ControlNet", "quantised", "streamed", "captured")

HEAD = """# Models

What was seen to work, by running it: each family is a tiny model of ComfyUI's own class, loaded and sampled as ComfyUI
does it, on a CPU. Every image was compared with the one that ComfyUI makes without this pack. Nothing here says how
fast anything is. `dev.py test --all tests/comfyui/test_models.py --write-models` makes this page, from
[models.json](models.json); the tests run the same rows and compare.

- **compiled**: block types, and the graphs that were made for them, all in the first image, a batch of 1. A negative
  prompt beside it, another size, a longer prompt, a batch of 3 and a LoRA compiled nothing more.
- **DeepCache**: of a run of 4 steps with interval 2 and the uniform schedule.
- **ControlNet**: run compiled beside the model, where the tests have one for it. Those that come as model patches
  (Qwen-Image DiffSynth, Z-Image Fun, Uni3C) run uncompiled between the model's compiled blocks, with DeepCache too;
  for these and other nodes see [compatibility.md](compatibility.md#nodes-that-change-the-model).
- **quantised**: weights stored in fp8, with a LoRA too.
- **streamed**: weights that ComfyUI streams (DynamicVRAM), on a stand-in for its allocator that takes them away at
  random, with a LoRA and with other weights of the family in between; the device never held more than its capacity and
  two blocks. “–” for a ComfyUI without it.
- **captured**: whole calls captured and replayed, on a stand-in for CUDA graphs.

"""

NOTES = """
The newest ComfyUI in which a family was run is in the last column; in older ones that have it, the rows are in
models.json. “Not seen” means that it has not been seen to work: it was not run yet, or the test fails.
"""


def page(known: dict[str, dict[str, dict[str, str]]]) -> str:
    """The page. known: family → version of ComfyUI → column → what was seen."""
    lines = [f"| Model | {' | '.join(COLUMNS)} | ComfyUI |", f"|---{'|---' * (len(COLUMNS) + 1)}|"]
    for name, rows in known.items():
        newest = max(rows, key=lambda version: [int(part) for part in version.split(".")])
        cells = (rows[newest].get(column, "not seen") for column in COLUMNS)
        lines.append(f"| {name} | {' | '.join(cells)} | {newest} |")
    return HEAD + "\n".join(lines) + "\n" + NOTES

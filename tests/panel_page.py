"""The Accel tab in ComfyUI's page: opened, shown a state that no server has, and measured."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import Any

TAB = "window.app.extensionManager.sidebarTab.activeSidebarTab?.id === 'accel'"
EXECUTE = "name => window.app.extensionManager.command.execute(name)"
SET = "([name, value]) => window.app.extensionManager.setting.set(name, value)"
UNFOLD = "() => { for (const part of document.querySelectorAll('.accel-fold')) part.open = true; }"
NO_TOASTS = "() => { const { toast } = window.app.extensionManager; (toast.dismissAll ?? toast.removeAll)(); }"
SAY = "message => window.app.api.dispatchEvent(new CustomEvent('accel', { detail: message }))"
"""What the page does with a WebSocket message of the type "accel"."""

MARKUP = "<img src=x onerror='window.accelHacked = true'><b>bold</b>"
NOW = time.time()

CONTRASTS = """
() => {
    const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const over = colours => {
        for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
        return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = rgb => {
        const [r, g, b] = rgb.map(x => x / 255).map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const shown = [...document.querySelectorAll('.accel-panel *')].filter(element =>
        element.checkVisibility() && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
    return shown.map(element => {
        const grounds = [];
        for (let at = element; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
        const [a, b] = [light(over(grounds)), light(over([...grounds, getComputedStyle(element).color]))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.textContent.slice(0, 40)];
    });
}
"""
"""The contrast of each text in the panel with what is behind it, by WCAG's formula, and the text."""


CAPTURED = {"name": "UNetModel call", "source": "captured", "sizes": [[2, 4, 64, 64]], "seconds": 0.31, "backend": None}
"""What differs in the row of a recorded model call."""

UNFIT = {"code": "no_graph_fits", "fields": {"graphs": 4}, "reason": "none of its 4 graphs fits this call"}
SKIPPED = {"code": "skipping_unsure", "fields": {}, "reason": "How much DeepCache saved is not known."}
PATCHED = {"code": "patched", "fields": {"patch": "attn2"}, "reason": "another node patches it (attn2)"}
GAIN = [
    {"code": "line_times", "fields": {"times": "1.91"}, "reason": "1.91×"},
    {"code": "line_saved", "fields": {"seconds": "8.4"}, "reason": "8.4 s saved"},
]
"""Reasons, as the server tells them."""


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A row of the cache's table."""
    kinds = ("BasicTransformerBlock", "ResBlock", "SpatialTransformer", "DoubleStreamBlock")
    used = [{"latent": [64 + 8 * k, 96], "batch": 1 + k, "context": 77} for k in range(number % 5)]
    return {
        "id": f"{number:016x}",
        "name": kinds[number % 4],
        "model": ("SD15", "Flux")[number % 2],
        "graphs": 1,
        "hits": 37 * number,
        "seconds": 1.5 + number % 40,
        "bytes": (1 + 13 * number % 70) << 20,
        "last_used": NOW - 97 * number,
        "failure": UNFIT["reason"] if number == 3 else None,
        "failure_reason": UNFIT if number == 3 else None,
        "used_at": used,
        "source": ("compiled", "disk")[number % 2],
        "sizes": "any" if number % 3 else [[2, 4, 64, 64]],
        "dtype": "float16",
        "device": "cuda:0",
        "backend": "inductor",
        **(CAPTURED if number == 4 else {}),
        **changes,
    }


def state(rows: int = 12, **changes: Any) -> dict[str, Any]:
    """What GET /accel/state gives in the midst of a day's work."""
    table = [row(number) for number in range(rows)]
    return {
        "graph_cache": {
            **{"entries": rows, "graphs": rows, "hits": 48213, "misses": 9, "compilations": 8, "loaded": 4},
            **{"seconds": 93.4, "evictions": 2, "bytes": 380 << 20, "max_entries": 512, "max_bytes": 2 << 30},
            "table": table,
            "rows_total": rows,
            "fallbacks": [{"block": "SpatialTransformer", **PATCHED, "calls": 1280}],
        },
        "graph_store": {
            "folder": "/home/someone/ComfyUI/user/__accel/graphs",
            **{"loaded": 4, "saved": 9, "limit_bytes": 2 << 30},
            "misses": [{"block": "ResBlock", "reason": "it was made by torch 2.10.0", "count": 5}],
        },
        "deep_cache": {"last_run": {"full_steps": 9, "skipped_steps": 16, "steps_taken": "FF" + "SSF" * 7 + "SS"}},
        "compiling": None,
        "last_run": {
            **{"model": "SD15", "latent": [1, 4, 90, 120], "pixels": [960, 720]},
            **{"seconds": 14.2, "steps": 25, "compiled_calls": 1180},
            **{"model_calls": 25, "replays": 18, "captures": 2, "capture_seconds": 0.6},
            **{"eager_calls": 64, "compile_seconds": 4.4, "loaded": 4, "saved_seconds": 8.4},
            **{"working_seconds": 9.2, "pays_back_after": 3, "lines": {}},
            "gain": GAIN,
            "saved_reasons": [SKIPPED],
        },
        "settings": {
            "max_mb": 2048,
            "max_entries": 512,
            "store_mb": 2048,
            "verbosity": "normal",
            "weights_in_place": False,
        },
        "version": "0.1.0",
        **changes,
    }


def idle() -> dict[str, Any]:
    """The same before anything ran."""
    fresh = state(0, graph_store=None, deep_cache={"last_run": None}, last_run=None)
    fresh["graph_cache"].update(hits=0, misses=0, compilations=0, loaded=0, evictions=0, bytes=0, fallbacks=[])
    return fresh


@contextmanager
def answering(page, given: Any, status: int = 200):
    """Every request for the state is answered so, until the block ends; yields the list of their addresses."""
    asked: list[str] = []

    def answer(route):
        asked.append(route.request.url)
        route.fulfill(status=status, body=json.dumps(given), content_type="application/json")

    page.route("**/accel/state*", answer)
    try:
        yield asked
    finally:
        page.unroute("**/accel/state*", answer)


def open_panel(page):
    """The panel, open; what earlier tests had toasted is gone."""
    page.evaluate(NO_TOASTS)
    if not page.evaluate(TAB):
        page.evaluate(EXECUTE, "Accel.OpenPanel")
    panel = page.locator(".accel-panel")
    panel.locator(".accel-header").wait_for()
    page.evaluate(UNFOLD)
    return panel


def close_panel(page) -> None:
    if page.evaluate(TAB):
        page.evaluate(EXECUTE, "Workspace.ToggleSidebarTab.accel")
    page.locator(".accel-panel").wait_for(state="detached")


def set_width(page, pixels: int) -> None:
    """Make the panel so wide by dragging the sidebar's edge; where the page has a least width, within the sidebar."""
    box = page.locator(".accel-panel").bounding_box()
    edge, height = box["x"] + box["width"] + 2, box["y"] + 300
    page.mouse.move(edge, height)
    page.mouse.down()
    for to in (edge + 20, box["x"] + pixels + 2):
        page.mouse.move(to, height, steps=4)
    page.mouse.up()
    page.mouse.move(edge + 400, height)
    page.wait_for_timeout(200)
    if abs(page.locator(".accel-panel").bounding_box()["width"] - pixels) > 1:
        page.evaluate("width => { document.querySelector('.accel-host').style.width = `${width}px`; }", pixels)
        page.wait_for_timeout(100)

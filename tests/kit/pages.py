"""ComfyUI's page in a browser, for the tests that open it: how it is started, looked at, and asked.

It is opened in three ways, `SETUPS`: nodes drawn on the canvas, nodes drawn with Vue ("Nodes 2.0"), and the latter in
the newest frontend, which `dev.py test` lays beside the one that goes with the pinned ComfyUI.
`ACCEL_FRONTEND=FOLDER` takes an unpacked frontend (the `static` folder of its package) in place of both.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from comfy_accel.accel.hosts.comfyui import words

from dev import WORK
from dev.tools.comfyui import PACK_NAME

SCREENSHOTS = WORK / "screenshots"
OURS = f"/extensions/{PACK_NAME}/"
"""Where the page gets our files from."""

NEWEST = WORK / "frontend" / "comfyui_frontend_package" / "static"
UPDATE = bool(os.environ.get("ACCEL_UPDATE"))
"""Whether pictures, and what the page makes, are written instead of compared."""

CLASSIC, NODES2, IN_NEWEST = SETUPS = ("classic", "nodes2", "newest")

# Each setup opens the same nodes and the same panel: what a change of ours breaks is seen in any of them.
EVERY_SETUP = [CLASSIC, *(pytest.param(setup, marks=pytest.mark.thorough) for setup in (NODES2, IN_NEWEST))]
FRONTENDS = [EVERY_SETUP[0], EVERY_SETUP[2]]
"""For the panel, which has nothing to do with how nodes are drawn."""

CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# A visitor who has been here before: no tour, no map over the graph, no question before it is cleared.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.ConfirmClear": False}
READY = "!!(window.app?.graph && window.app.extensionManager && window.LiteGraph?.registered_node_types.AccelModel)"
CLEAR = "() => window.app.extensionManager.command.execute('Comfy.ClearWorkflow')"
TIDY = """
async () => {
    await window.app.extensionManager.command.execute('Comfy.ClearWorkflow');
    for (const button of document.querySelectorAll('.p-toast-close-button')) button.click();
}
"""


def frontend(setup: str) -> Path | None:
    """The folder of the frontend that a setup opens; None for the one that is installed beside ComfyUI."""
    named = os.environ.get("ACCEL_FRONTEND")
    if named:
        return Path(named).resolve(strict=True)
    return NEWEST if setup == IN_NEWEST else None


def load(page, url: str) -> None:
    """Load the page, or load it again, and wait until it can be used."""
    page.goto(url)
    page.wait_for_function(READY, timeout=120_000)


def until(page, condition: str, act) -> None:
    """Do `act`, such as a click, again and again until the condition holds: what comes too soon the page loses."""
    from playwright.sync_api import TimeoutError

    for _ in range(20):
        act()
        with suppress(TimeoutError):
            page.wait_for_function(condition, timeout=1000)
            return
    raise AssertionError(f"not so: {condition}")


def set_setting(server, name: str, value: Any) -> None:
    """Write one of the page's settings on the server; a page takes it in when it starts."""
    body = json.dumps(value).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/settings/{name}", data=body, headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


def get(server, path: str) -> bytes:
    """What the server answers to GET `path`."""
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.read()


SMALL = """
seed => {
    const changes = {
        EmptyLatentImage: { width: 64 + 8 * seed, height: 96 },
        KSampler: { steps: 2, seed },
    };
    for (const node of window.app.graph.nodes)
        for (const [name, value] of Object.entries(changes[node.type] ?? {}))
            node.widgets.find(widget => widget.name === name).value = value;
}
"""
WATCH = """
() => {
    window.accelEnded = null;
    for (const end of ['execution_success', 'execution_error', 'execution_interrupted'])
        window.app.api.addEventListener(end, ({ detail }) => {
            window.accelEnded = [end, detail.exception_message ?? null];
        });
}
"""


def run_small(page) -> None:
    """Run the open workflow at two steps, as a click on the button does, until it has ended well.

    Every setup has an image of its own: else the server would hand out that of the setup before.
    """
    page.evaluate(SMALL, 1 + SETUPS.index(page.setup))
    page.evaluate(WATCH)
    page.locator("button[data-testid=queue-button], [data-testid=queue-button] button").first.click()
    page.wait_for_function("window.accelEnded", timeout=300_000)
    assert page.evaluate("window.accelEnded") == ["execution_success", None]


def screenshot(page, name: str) -> Path:
    """The page as it is, in .work/screenshots/NAME-SETUP.png."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}-{page.setup}.png"
    page.screenshot(path=str(path))
    return path


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
within => {
    const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const over = colours => {
        for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
        return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = rgb => {
        const [r, g, b] = rgb.map(x => x / 255).map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const shown = [...document.querySelectorAll(within)].filter(element =>
        element.checkVisibility() && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
    return shown.map(element => {
        const grounds = [];
        for (let at = element; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
        const [a, b] = [light(over(grounds)), light(over([...grounds, getComputedStyle(element).color]))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.textContent.slice(0, 40)];
    });
}
"""
"""The contrast of each text in elements with what is behind it, by WCAG's formula, and the text."""
PANEL = ".accel-panel *"


CAPTURED = {"name": "UNetModel call", "source": "captured", "sizes": [[2, 4, 64, 64]], "seconds": 0.31, "backend": None}
"""What differs in the row of a recorded model call."""

UNFIT = {"code": "no_graph_fits", "fields": {"graphs": 4}, "reason": "none of its 4 graphs fits this call"}
SKIPPED = {"code": "skipping_unsure", "fields": {}, "reason": "How much DeepCache saved is not known."}
PATCHED = {"code": "patched", "fields": {"patch": "attn2"}, "reason": "another node patches it (attn2)"}
GAIN = [
    {"code": "line_times", "fields": {"times": "1.9"}, "reason": "about 1.9×"},
    {"code": "line_saved", "fields": {"seconds": "8.4"}, "reason": "about 8.4 s saved"},
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
            **{"lookups": 5, "loaded": 4, "saved": 9, "limit_bytes": 2 << 30},
            "misses": [{"block": "ResBlock", "reason": "it was made by torch 2.10.0", "count": 5}],
        },
        "compiling": None,
        "last_run": {
            **{"model": "SD15", "latent": [1, 4, 90, 120], "pixels": [960, 720]},
            **{"seconds": 14.2, "steps": 25, "compiled_calls": 1180},
            **{"model_calls": 25, "replays": 18, "captures": 2, "capture_seconds": 0.6},
            **{"eager_calls": 64, "compile_seconds": 4.4, "loaded": 4, "lines": {}},
            **{"full_steps": 9, "skipped_steps": 16, "steps_taken": "FF" + "SSF" * 7 + "SS"},
            "account": {"worked": 9.2, "pays_back_after": 3, "gain": GAIN, "how": [SKIPPED]},
        },
        "settings": {
            "max_mb": 2048,
            "max_entries": 512,
            "store_mb": 2048,
            "verbosity": "normal",
            "weights_in_place": False,
            "cuda_graphs": "ask",
        },
        "cuda_graphs": graphs("nowhere"),
        "machine": [machine_part("Device", "device_cpu"), machine_part("Compiling", "compiles_on_cpu", compiler="g++")],
        "version": "0.1.0",
        **changes,
    }


def machine_part(part: str, code: str, **fields: Any) -> dict[str, Any]:
    """What the state says of a part of the machine."""
    texts = {name: value["reason"] if isinstance(value, dict) else value for name, value in fields.items()}
    return {"name": part, "code": code, "fields": fields, "reason": words.SENTENCES[code].format(**texts)}


def graphs(code: str, choice: str = "ask", **fields: str) -> dict[str, Any]:
    """What the state says of CUDA graphs. code: after "graphs_"."""
    reason = words.SENTENCES[f"graphs_{code}"].format(**fields)
    return {"choice": choice, "by_environment": False, "code": f"graphs_{code}", "fields": fields, "reason": reason}


OFF = graphs("off")


@contextmanager
def choosing(page):
    """No choice of CUDA graphs reaches the server, until the block ends; yields the list of them."""
    chosen: list[str] = []

    def answer(route):
        chosen.append(route.request.post_data_json["cuda_graphs"])
        route.fulfill(body=json.dumps({"settings": {}}), content_type="application/json")

    page.route("**/accel/settings", answer)
    try:
        yield chosen
    finally:
        page.unroute("**/accel/settings", answer)


def idle() -> dict[str, Any]:
    """The same before anything ran."""
    fresh = state(0, graph_store=None, last_run=None)
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

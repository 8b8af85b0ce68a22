"""ComfyUI's page in a browser, for the tests that open it: how it is started, looked at, and asked.

It is opened in three ways, `SETUPS`: nodes drawn on the canvas, nodes drawn with Vue ("Nodes 2.0"), and the latter in
the newest frontend, which `dev.py test` lays beside the one that goes with the pinned ComfyUI.
`ACCEL_FRONTEND=FOLDER` takes an unpacked frontend (the `static` folder of its package) in place of both.
"""

from __future__ import annotations

import json
import os
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tools import WORK
from tools.comfyui import PACK_NAME

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


def screenshot(page, name: str) -> Path:
    """The page as it is, in .work/screenshots/NAME-SETUP.png."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}-{page.setup}.png"
    page.screenshot(path=str(path))
    return path

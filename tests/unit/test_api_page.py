"""docs/api.md names the routes, messages and settings that there are."""

import re
from dataclasses import fields

from comfy_accel.accel.core.settings import Settings
from comfy_accel.accel.hosts.comfyui.server import panel_messages

from dev import ROOT

SERVER = ROOT / "accel/hosts/comfyui/server"
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> set[str]:
    """The first column of the table under a heading, without its code marks."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {
        name for cell in re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE) for name in re.findall("`(.+?)`", cell)
    }


def test_every_route_is_in_the_table():
    routes = (SERVER / "routes.py").read_text(encoding="utf-8")
    registered = re.findall(r'server\.routes\.(\w+)\("([^"]+)"\)', routes)
    assert len(registered) >= 5
    assert first_cells("Routes") == {f"{method.upper()} {path}" for method, path in registered}


def test_every_message_is_in_the_table():
    source = (SERVER / "panel_messages.py").read_text(encoding="utf-8")
    assert f"type `{panel_messages.TYPE}`" in PAGE
    assert first_cells("WebSocket messages") == set(re.findall(r'"event": "(\w+)"', source))


def taken_by(route: str) -> set[str]:
    """The names in code marks in the second column of a route's row."""
    (row,) = re.findall(rf"^\| `{route}` \|(.*)\|.*\|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


def test_the_settings_are_those_that_the_page_names():
    assert taken_by("POST /accel/settings") >= {field.name for field in fields(Settings)}

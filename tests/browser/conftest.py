"""A server for each frontend, a browser, and a page for each setup (tests/kit/pages.py).

Loading the page is most of what a test here costs, so all of this folder share it: each finds an empty graph. But
nobody outside, hence the __init__.py, which makes it a package: as long as Playwright is open, an event loop counts as
running, and nobody else can start one.
"""

import functools
import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.pages import (  # noqa: E402
    CHROMIUM_FLAGS,
    CLASSIC,
    EVERY_SETUP,
    IN_NEWEST,
    OURS,
    SETTINGS,
    TIDY,
    frontend,
    load,
    set_setting,
)

from dev.tools import synthetic, workflow
from dev.tools.server import serving

CHECKPOINT = "v1-5-pruned-emaonly-fp16.safetensors"
NOT_OURS = (
    "warning: ",
    # The page asks for files and addresses that this server does not have, or the internet.
    "error: Failed to load resource",
    "error: [Jobs API]",
    "error: Failed to fetch queue",
)
"""What complaints of the page about itself begin with."""


def of_ours(page) -> list[str]:
    """The page's complaints that name one of our files."""
    return [text for text in page.complaints if OURS in text]


def fill(base: Path) -> None:
    """What the workflows name: the checkpoint is the synthetic one, other models are empty files."""
    from PIL import Image

    for folder in ("models/checkpoints", "input", "user/default"):
        (base / folder).mkdir(parents=True)
    (base / "models/checkpoints" / CHECKPOINT).symlink_to(synthetic.checkpoint())
    for folder, name in workflow.models() - {("checkpoints", CHECKPOINT)}:
        (base / "models" / folder).mkdir(exist_ok=True)
        (base / "models" / folder / name).touch()
    Image.linear_gradient("L").convert("RGB").resize((96, 64)).save(base / "input" / "example.png")
    (base / "user/default/comfy.settings.json").write_text(json.dumps(SETTINGS), encoding="utf-8")


@pytest.fixture(scope="package")
def server_with(tmp_path_factory):
    """Frontend folder → a running ComfyUI with this pack that hands it out; None: the frontend that is installed."""
    with ExitStack() as running:

        @functools.cache
        def start(folder: Path | None):
            base = tmp_path_factory.mktemp("editor")
            fill(base)
            flags = ["--front-end-root", str(folder)] if folder else []
            return running.enter_context(serving(base, extra_flags=flags))

        yield start


@pytest.fixture(scope="package")
def any_server(server_with):
    """A server with the frontend that is installed, for what a test asks without a page."""
    return server_with(frontend(CLASSIC))


@pytest.fixture(scope="package", params=EVERY_SETUP)
def setup(request):
    folder = frontend(request.param)
    if request.param == IN_NEWEST and folder == frontend(CLASSIC):
        pytest.skip("ACCEL_FRONTEND has been opened in both ways already")
    if folder and not (folder / "index.html").is_file():
        pytest.skip(f"no frontend in {folder}; dev.py test brings it")
    return request.param


@pytest.fixture(scope="package")
def server(setup, server_with):
    """The server of this setup's page."""
    return server_with(frontend(setup))


@pytest.fixture(scope="package")
def browser():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "No Chromium here: install it (Debian: apt install chromium)."
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def open_page(setup, server, browser):
    """Opens ComfyUI's page, ready, that knows its `setup` and collects `complaints`: errors and warnings.

    `errors()` leaves out of these what the page says about itself alone. at: another server.
    """

    def open_one(at=server):
        set_setting(at, "Comfy.VueNodes.Enabled", setup != CLASSIC)  # the page takes it in when it starts
        opened = browser.new_context(viewport={"width": 1600, "height": 830}).new_page()
        opened.add_init_script("localStorage.setItem('vueNodesBannerDismissed', 'true')")
        opened.setup, opened.complaints = setup, []
        opened.errors = lambda: [text for text in opened.complaints if not text.startswith(NOT_OURS)]
        opened.on("pageerror", lambda error: opened.complaints.append(f"{error}\n{error.stack}"))
        opened.on(
            "console",
            lambda message: (
                message.type in ("error", "warning")
                and opened.complaints.append(f"{message.type}: {message.text} ({message.location.get('url')})")
            ),
        )
        load(opened, at.url)
        assert of_ours(opened) == []
        opened.complaints.clear()  # the page stumbles over itself while it starts
        return opened

    return open_one


@pytest.fixture(scope="package")
def shared_page(open_page):
    opened = open_page()
    yield opened
    opened.context.close()


@pytest.fixture
def page(shared_page):
    """The page with an empty graph; at the test's end our files must have caused no error or warning."""
    shared_page.complaints.clear()
    shared_page.evaluate(TIDY)
    yield shared_page
    assert of_ours(shared_page) == []

"""The example workflows in ComfyUI's own page, in Chromium.

Screenshots, and what the page made of each workflow, are left under .work/screenshots.
"""

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from bench import WORK
from bench.comfyui import PACK_NAME
from bench.server import serving

pytestmark = pytest.mark.browser

FOLDER = Path(__file__).resolve().parents[2] / "example_workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SCREENSHOTS = WORK / "screenshots"
OURS = f"/extensions/{PACK_NAME}/"
LANGUAGES = ("en", "zh")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# A visitor who has been here before: no tour, no map over the graph.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False}
READY = "!!(window.app?.graph && window.app.extensionManager && window.LiteGraph?.registered_node_types.AccelModel)"
UNKNOWN_NODES = """
() => window.app.graph.nodes
    .filter(node => node.has_errors || !(node.type in window.LiteGraph.registered_node_types))
    .map(node => node.type)
"""
ALERTS = """
() => [...document.querySelectorAll('.p-toast-message-error, .p-toast-message-warn')].map(toast => toast.innerText)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A ComfyUI with this pack; the models that the workflows name are empty files."""
    from PIL import Image

    base = tmp_path_factory.mktemp("editor")
    for folder in ("models/checkpoints", "models/controlnet", "input", "user/default"):
        (base / folder).mkdir(parents=True)
    (base / "models/checkpoints/v1-5-pruned-emaonly-fp16.safetensors").touch()
    (base / "models/controlnet/control_v11p_sd15_scribble_fp16.safetensors").touch()
    Image.new("RGB", (64, 64), "teal").save(base / "input" / "example.png")
    (base / "user/default/comfy.settings.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    with serving(base) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "No Chromium here: install it (Debian: apt install chromium)."
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(params=["classic", "nodes2"])
def page(request, server, browser):
    """ComfyUI's page, ready, in either way of drawing nodes; at the end our files must have caused no error."""
    opened = browser.new_page(viewport={"width": 1600, "height": 830})
    opened.add_init_script("localStorage.setItem('vueNodesBannerDismissed', 'true')")
    complaints = []
    opened.on("pageerror", lambda error: complaints.append(f"{error}\n{error.stack}"))
    opened.on(
        "console",
        lambda message: (
            message.type in ("error", "warning")
            and complaints.append(f"{message.text} ({message.location.get('url')})")
        ),
    )
    opened.rendering = request.param
    set_up(opened, server.url)
    opened.evaluate(
        "on => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", request.param == "nodes2"
    )
    set_up(opened, server.url)  # the page takes this setting in whole only when it starts
    yield opened
    opened.close()
    assert [complaint for complaint in complaints if OURS in complaint] == []


def set_up(page, url: str) -> None:
    page.goto(url)
    page.wait_for_function(READY, timeout=120_000)


def open_template(page, name: str) -> None:
    """What a click on the template does: fetch it from where the page would, and load it."""
    page.evaluate(
        """async ([pack, name]) => {
            const answer = await fetch(`/api/workflow_templates/${pack}/${name}.json`);
            await window.app.loadGraphData(await answer.json(), true, true, name);
        }""",
        [PACK_NAME, name],
    )
    page.wait_for_timeout(1500)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_opens_whole_and_converts_to_the_stored_graph(page, name):
    open_template(page, name)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name}-{page.rendering}.png"))
    assert page.evaluate(UNKNOWN_NODES) == []
    assert page.evaluate(ALERTS) == []
    assert page.locator(".p-dialog").count() == 0

    # As text: Playwright would turn JavaScript's undefined into null.
    converted = json.loads(page.evaluate("async () => JSON.stringify((await window.app.graphToPrompt()).output)"))
    made = SCREENSHOTS / f"{name}.api.json"
    made.write_text(json.dumps(converted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    stored = json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8"))
    assert converted == stored, f"The page converts {name} to what is now in {made}."


def get(server, path: str) -> bytes:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.read()


def test_the_page_is_offered_every_template_with_its_thumbnail(server):
    offered = json.loads(get(server, "/api/workflow_templates"))
    assert sorted(offered[PACK_NAME]) == NAMES
    for name in NAMES:
        assert get(server, f"/api/workflow_templates/{PACK_NAME}/{name}.jpg")[:3] == b"\xff\xd8\xff"


def test_every_input_and_output_has_tooltip_help_and_both_languages(server):
    ours = {name: node for name, node in json.loads(get(server, "/object_info")).items() if name.startswith("Accel")}
    languages = json.loads(get(server, "/i18n"))
    missing = []
    for name, node in ours.items():
        inputs = {**node["input"]["required"], **node["input"].get("optional", {})}
        page = get(server, f"{OURS}docs/{name}.md").decode()
        missing += [f"{name}.md: {key}" for key in inputs if f"`{key}`" not in page]
        missing += [f"{name}: tooltip of {key}" for key, declared in inputs.items() if not declared[1].get("tooltip")]
        outputs = {str(index): tooltip for index, tooltip in enumerate(node["output_tooltips"])}
        missing += [f"{name}: tooltip of output {key}" for key, tooltip in outputs.items() if not tooltip]
        for language in LANGUAGES:
            texts = languages.get(language, {}).get("nodeDefs", {}).get(name, {})
            missing += [f"{language}: {name}.{key}" for key in ("display_name", "description") if not texts.get(key)]
            for part, keys in (("inputs", inputs), ("outputs", outputs)):
                entries = texts.get(part, {})
                missing += [
                    f"{language}: {name}.{part}.{key}"
                    for key in keys
                    if not (entries.get(key, {}).get("name") and entries[key].get("tooltip"))
                ]
                missing += [f"{language}: {name}.{part}.{key} is no more" for key in entries.keys() - keys.keys()]
    assert missing == []


def test_the_english_texts_are_those_of_the_nodes(server):
    ours = {name: node for name, node in json.loads(get(server, "/object_info")).items() if name.startswith("Accel")}
    english = json.loads(get(server, "/i18n"))["en"]["nodeDefs"]
    assert english.keys() == ours.keys()
    for name, node in ours.items():
        assert (english[name]["display_name"], english[name]["description"]) == (
            node["display_name"],
            node["description"],
        )
        inputs = {**node["input"]["required"], **node["input"].get("optional", {})}
        declared = {key: options["tooltip"] for key, (_, options) in inputs.items()}
        assert {key: entry["tooltip"] for key, entry in english[name]["inputs"].items()} == declared
        outputs = [entry["tooltip"] for _, entry in sorted(english[name]["outputs"].items())]
        assert outputs == node["output_tooltips"]

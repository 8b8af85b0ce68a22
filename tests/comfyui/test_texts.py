"""Everything that a person can set or press has its texts: tooltip, help page with picture, English and Chinese.

A help page's table of inputs is made of the node's own texts: `ACCEL_UPDATE=1` writes it.
"""

import json
import re
import urllib.parse

import pytest
from comfy_accel.accel.core.sentences import SENTENCES
from kit.pages import UPDATE, get

from dev import ROOT
from dev.tools import workflow
from dev.tools.comfyui import PACK_NAME

DOCS = ROOT / "web" / "docs"
LANGUAGES = ("en", "zh")
HEADS = {"en": "## Inputs\n\n| Input | What it does |\n|---|---|\n", "zh": "## 输入\n\n| 输入 | 作用 |\n|---|---|\n"}
"""What the table of inputs begins with."""
HELP = "{name}/{language}.md"
"""Where ComfyUI's page looks first; a file that is not there is an error in its console."""

MOST_BYTES = 60_000
"""Of a picture in a help page."""

TEMPLATES = sorted(path.stem for path in workflow.TEMPLATES.glob("*.json"))


@pytest.fixture(scope="module")
def nodes(server):
    described = json.loads(get(server, "/object_info"))
    return {name: node for name, node in described.items() if name.startswith("Accel") and not node.get("deprecated")}


@pytest.fixture(scope="module")
def languages(server):
    return json.loads(get(server, "/i18n"))


@pytest.fixture(scope="module")
def deprecated(server):
    """Which nodes there are for old workflows alone; people are told what to use instead, and no more."""
    described = json.loads(get(server, "/object_info"))
    return {name for name, node in described.items() if name.startswith("Accel") and node.get("deprecated")}


def inputs_of(node) -> dict:
    return {**node["input"].get("required", {}), **node["input"].get("optional", {})}


def test_every_input_and_output_has_a_tooltip_and_both_languages(nodes, deprecated, languages):
    """The page shows what the nodes say where a language has no text of its own, so English has no file of them."""
    missing = []
    assert "nodeDefs" not in languages["en"]
    for name, node in nodes.items():
        inputs = inputs_of(node)
        missing += [f"{name}: tooltip of {key}" for key, declared in inputs.items() if not declared[1].get("tooltip")]
        outputs = {str(index): tooltip for index, tooltip in enumerate(node["output_tooltips"])}
        missing += [f"{name}: tooltip of output {key}" for key, tooltip in outputs.items() if not tooltip]
        texts = languages["zh"]["nodeDefs"].get(name, {})
        for key in ("display_name", "description"):
            missing += [
                f"{language}: {name}.{key}" for language, of in (("en", node), ("zh", texts)) if not of.get(key)
            ]
        for part, keys in (("inputs", inputs), ("outputs", outputs)):
            entries = texts.get(part, {})
            missing += [
                f"zh: {name}.{part}.{key}"
                for key in keys
                if not (entries.get(key, {}).get("name") and entries[key].get("tooltip"))
            ]
            missing += [f"zh: {name}.{part}.{key} is no more" for key in entries.keys() - keys.keys()]
    missing += [f"zh: {name} is no more" for name in languages["zh"]["nodeDefs"].keys() - nodes.keys() - deprecated]
    assert nodes
    assert missing == []


def with_inputs(page: str, language: str, node: dict, texts: dict) -> str:
    """A help page with the table of the node's inputs in place of the one that it has. texts: Chinese ones."""
    rows = []
    for name, declared in inputs_of(node).items():
        shown, said = f"`{name}`", declared[1]["tooltip"]
        if language == "zh":
            shown, said = f"`{name}`（{texts['inputs'][name]['name']}）", texts["inputs"][name]["tooltip"]
        rows.append(f"| {shown} | {said} |\n")
    table = HEADS[language] + "".join(rows)
    return re.sub(re.escape(HEADS[language]) + r"(?:\|.*\n)*", lambda _: table, page)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_has_a_help_page_with_its_picture_and_every_input(language, nodes, languages):
    missing = []
    for name, node in nodes.items():
        path = HELP.format(name=name, language=language)
        page = (DOCS / path).read_text(encoding="utf-8") if (DOCS / path).is_file() else ""
        title = (node if language == "en" else languages[language]["nodeDefs"][name])["display_name"]
        if not page.startswith(f"# {title}\n"):
            missing.append(f"{path} with the title {title}")
        right = with_inputs(page, language, node, languages["zh"]["nodeDefs"][name])
        if UPDATE:
            (DOCS / path).write_text(right, encoding="utf-8")
        elif page != right:
            missing.append(f"{path}: the table of inputs, as ACCEL_UPDATE=1 writes it")
        # Relative to the folder of all pages, whatever the clone is called: so ComfyUI's page resolves it.
        picture = f"{name}/en.png"
        data = (DOCS / picture).read_bytes() if (DOCS / picture).is_file() else b""
        if f"]({picture})" not in page:
            missing.append(f"{path}: the picture {picture}")
        if not data.startswith(b"\x89PNG") or len(data) > MOST_BYTES:
            missing.append(f"{picture} as a PNG of at most {MOST_BYTES} bytes")
    assert missing == []


def in_our_scripts(pattern: str) -> set[str]:
    """What a pattern's group finds in the JavaScript files of the page."""
    return {found for path in (ROOT / "web").rglob("*.js") for found in re.findall(pattern, path.read_text("utf-8"))}


def test_every_setting_and_command_has_both_languages(languages):
    missing = []
    declared = in_our_scripts(r'\bid: "(Accel\.[\w.]+)"')
    for language in LANGUAGES:
        settings, commands = languages[language].get("settings", {}), languages[language].get("commands", {})
        keys = {name.replace(".", "_") for name in declared}
        for key in keys:
            has_setting = settings.get(key, {}).get("name") and settings[key].get("tooltip")
            if not (has_setting or commands.get(key, {}).get("label")):
                missing.append(f"{language}: {key}")
        ours = {key for key in (*settings, *commands) if key.startswith("Accel")}
        missing += [f"{language}: {key} is no more" for key in ours - keys]
    assert declared
    assert missing == []


def leaves(texts, path: str = "") -> dict[str, str]:
    """Nested texts as path → text."""
    if isinstance(texts, str):
        return {path: texts}
    return {key: text for name, inner in texts.items() for key, text in leaves(inner, f"{path}/{name}").items()}


def blanks(text: str) -> set[str]:
    """The names in a text in place of which the page puts something."""
    return set(re.findall(r"\{\w+\}", text))


@pytest.mark.parametrize("part", ["settings", "commands", "main"])
def test_both_languages_have_the_same_texts_with_the_same_blanks(part):
    english, chinese = (
        leaves(json.loads((ROOT / "locales" / language / f"{part}.json").read_text(encoding="utf-8")))
        for language in LANGUAGES
    )
    if part == "main":  # the engine has the reasons in English, the nodes have the choices
        english |= leaves({"accelReasons": SENTENCES})
        of_choices = ("/accelChoices/", "/accelQualities/")
        chinese = {path: text for path, text in chinese.items() if not path.startswith(of_choices)}
    assert english.keys() == chinese.keys()
    assert [path for path, text in {**english, **chinese}.items() if not text.strip()] == []
    assert [path for path in english if blanks(english[path]) != blanks(chinese[path])] == []


def test_every_text_that_the_panel_asks_for_is_there(languages):
    asked = in_our_scripts(r'\bt\("(\w+)"')
    assert asked
    for language in LANGUAGES:
        assert asked - languages[language]["accelPanel"].keys() == set()


def test_every_sentence_is_said_somewhere():
    sentences = json.loads((ROOT / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["accelPanel"]
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.js"))
    unused = [key for key in sentences if not re.search(rf"\b({key}|{key.removesuffix('Tip')})\b", scripts)]
    assert [key for key in unused if not key.startswith(("store_", "stage_", "machine_"))] == []


def test_the_page_is_offered_every_template_with_its_thumbnail(server):
    offered = json.loads(get(server, "/api/workflow_templates"))
    assert sorted(offered[PACK_NAME]) == TEMPLATES
    for name in TEMPLATES:
        picture = get(server, f"/api/workflow_templates/{PACK_NAME}/{urllib.parse.quote(name)}.jpg")
        assert picture[:3] == b"\xff\xd8\xff"
        assert len(picture) < 120_000

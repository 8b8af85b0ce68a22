"""The example workflows in the form that is sent: ComfyUI accepts them, and they make images."""

import asyncio
import functools
from pathlib import Path

import pytest
from comfy_api.latest import io
from kit import real_prompts
from PIL import Image

import nodes
from dev.tools import synthetic, workflow

FOLDER = workflow.TEMPLATES
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
CHECKPOINT = "v1-5-pruned-emaonly-fp16.safetensors"
LORA = "blindbox_v1_mix.safetensors"
PICTURE = "example.png"
EXTRAS = (
    *("nodes_custom_sampler", "nodes_flux", "nodes_hunyuan", "nodes_lt", "nodes_lt_audio", "nodes_lt_upsampler"),
    *("nodes_math", "nodes_model_advanced", "nodes_primitive", "nodes_sd3", "nodes_video", "nodes_wan"),
)
"""Core's modules of nodes that templates need beside those of nodes.py; 0.3.75 has not all of them."""
SAMPLES = {"KSampler", "KSamplerAdvanced", "BasicGuider"}
LATER = {"15 LTX 2.5 video"}
"""Has nodes that 0.3.75 does not have."""


def graph(name: str) -> dict:
    return workflow.load(workflow.api_form(name))


@pytest.fixture
def prompts(monkeypatch, tmp_path):
    """Core's nodes and ours in core's registry, and folders that hold the models and the picture."""
    import folder_paths

    for name in (*(name for _, name in workflow.models()), PICTURE):
        (tmp_path / name).touch()
    monkeypatch.setattr(nodes, "NODE_CLASS_MAPPINGS", dict(nodes.NODE_CLASS_MAPPINGS))
    extras = Path(nodes.__file__).parent / "comfy_extras"
    for name in EXTRAS:
        if not (extras / f"{name}.py").is_file():
            continue
        assert asyncio.run(nodes.load_custom_node(str(extras / f"{name}.py"), module_parent="comfy_extras"))
    for folder in {folder for folder, _ in workflow.models()}:
        _, extensions = folder_paths.folder_names_and_paths[folder]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, folder, ([str(tmp_path)], extensions))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path))
    return real_prompts.prompts(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", ["04 Z-Image Turbo", "05 Qwen-Image", "06 Wan 2.2 video", "14 Flux 2"])
def test_in_a_subgraph_each_sampler_has_its_model_from_a_speed_up(name):
    api = graph(name)
    samplers = [node["inputs"]["model"][0] for node in api.values() if node["class_type"] in SAMPLES]
    speeds_up = [key for key, node in api.items() if node["class_type"] == "AccelSpeedUp"]
    assert sorted(samplers) == sorted(speeds_up) and len(speeds_up) == (2 if "Wan" in name else 1)
    assert all(":" in key for key in speeds_up)


@pytest.mark.parametrize("name", NAMES)
def test_core_accepts_the_graph(name, prompts):
    if name in LATER and not {node["class_type"] for node in graph(name).values()} <= nodes.NODE_CLASS_MAPPINGS.keys():
        pytest.skip("this core does not have its nodes")
    assert prompts.refused(graph(name)) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_names_every_widget_of_our_nodes_and_no_other_input(name, prompts):
    ours = {key: node for key, node in graph(name).items() if node["class_type"].startswith("Accel")}
    assert ours
    for node in ours.values():
        inputs = nodes.NODE_CLASS_MAPPINGS[node["class_type"]].define_schema().inputs
        # What is optional and has no widget is named only where it is connected.
        needed = {declared.id for declared in inputs if isinstance(declared, io.WidgetInput) or not declared.optional}
        assert needed <= set(node["inputs"]) <= {declared.id for declared in inputs}


SMALL = {
    "AccelModel": {"backend": "eager"},
    "AccelWarmUpGraphs": {"sizes": "64x64"},
    "AccelDeepCache": {"quality": "Fast"},
    "EmptyLatentImage": {"width": 64, "height": 64},
    "KSampler": {"steps": 2},
}
"""Node's class or title → values at which a workflow takes seconds."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a workflow by its name, small and with changes; gives what its nodes show: title → output.

    plain: without the nodes of this pack that change a model.
    """
    import folder_paths
    from comfy_accel.nodes import speed_up

    folder = tmp_path_factory.mktemp("workflows")
    (folder / CHECKPOINT).symlink_to(synthetic.checkpoint())
    _write_lora(folder / LORA)
    Image.linear_gradient("L").convert("RGB").resize((90, 70)).save(folder / PICTURE)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("checkpoints", "loras"):
            _, extensions = folder_paths.folder_names_and_paths[kind]
            patch.setitem(folder_paths.folder_names_and_paths, kind, ([str(folder)], extensions))
        patch.setattr(folder_paths, "filename_list_cache", {})
        for kind in ("input", "output", "temp"):
            patch.setattr(folder_paths, f"{kind}_directory", str(folder))
        compiling = functools.partial(speed_up.CompileSettings, backend="eager")
        patch.setattr(speed_up, "CompileSettings", compiling)
        prompts = real_prompts.prompts(patch, folder)

        def run_one(name: str, plain: bool = False, **changes: dict) -> dict[str, dict]:
            prompt = workflow.bypass(graph(name)) if plain else graph(name)
            for node in prompt.values():
                for key in (node["class_type"], node["_meta"]["title"]):
                    node["inputs"].update({**SMALL.get(key, {}), **changes.get(key, {})})
            prompts.run(prompt)
            outputs = prompts.executor.history_result["outputs"]
            return {prompt[key]["_meta"]["title"]: shown for key, shown in outputs.items()}

        run_one.folder = folder
        yield run_one


def _write_lora(path: Path) -> None:
    """A LoRA for one attention layer of the synthetic checkpoint."""
    import safetensors.torch
    import torch

    layer = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    # Not constant: what comes out of a layer norm has the mean 0, so a constant would add next to nothing.
    up, down = (torch.randn(shape, generator=torch.Generator().manual_seed(7)) / 4 for shape in ((320, 4), (4, 320)))
    safetensors.torch.save_file({f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down}, path)


def sizes(run, shown: dict) -> list[tuple[int, int]]:
    """Of the images that a node saved, width and height."""
    return [Image.open(run.folder / each["subfolder"] / each["filename"]).size for each in shown["images"]]


def test_hires_fix_gives_exactly_the_size_that_was_typed(run):
    typed = {"Final size": {"width": 90, "height": 118}, "Size of the first pass": {"width": 50, "height": 64}}
    shown = run("09 Hires fix, any size", **typed)
    assert shown["Final size"]["text"][0].startswith("90×118 → 64×128")
    assert shown["Size of the first pass"]["text"][0].startswith("50×64 → 64×64")
    assert sizes(run, shown["Save Image"]) == [(90, 118)]


def test_image_to_image_at_any_size_gives_the_size_of_the_picture(run):
    shown = run("08 Image to image, any size", ImageScale={"width": 90}, KSampler={"steps": 2, "denoise": 1.0})
    assert sizes(run, shown["Save Image"]) == [(90, 70)]


def test_image_to_image_gives_an_image(run):
    assert len(run("07 Image to image")["Save Image"]["images"]) == 1


def test_a_lora_sweep_compiles_nothing_for_its_second_and_later_strengths(run):
    from comfy_accel.accel.cache.graph_cache import shared

    titles = [f"Picture at {each}" for each in (0.4, 0.8, 1.2)]
    once = {"KSampler": {"steps": 1}}
    accelerated = run("11 LoRA sweep", **once)
    compiled = shared.statistics()["compilations"]
    assert compiled > 0
    strengths = {f"LoRA at {each}": {"strength_model": each / 4} for each in (0.4, 0.8, 1.2)}
    others = run("11 LoRA sweep", **once, **strengths)
    assert shared.statistics()["compilations"] == compiled
    assert len({_pixels(run, shown[title]) for title in titles for shown in (accelerated, others)}) == 6
    plain = run("11 LoRA sweep", plain=True, **once)
    assert [_pixels(run, plain[title]) for title in titles] == [_pixels(run, accelerated[title]) for title in titles]


def test_deepcache_quality_says_how_close_the_pictures_are(run):
    shown = run("12 DeepCache quality", KSampler={"steps": 16})
    plain, cached = shown["Without DeepCache"], shown["With DeepCache"]
    assert _pixels(run, plain) != _pixels(run, cached)
    (text,) = shown["Accel: Report"]["text"]
    assert "PSNR" in text
    assert "FS" in text


def test_warm_up_then_sizes_gives_two_images_of_each_size(run):
    shown = run("13 Warm up sizes", **{"An odd size": {"width": 72, "height": 72}, "Landscape": {"width": 80}})
    assert sizes(run, shown["Portrait"]) == [(64, 64)] * 2
    assert sizes(run, shown["Landscape"]) == [(80, 64)] * 2
    assert sizes(run, shown["An odd size"]) == [(72, 72)] * 2


def _pixels(run, shown: dict) -> bytes:
    (each,) = shown["images"]
    return Image.open(run.folder / each["subfolder"] / each["filename"]).tobytes()

"""The example script, run as it stands."""

import importlib.util
import sys
from pathlib import Path

import comfy_accel.accel
import pytest
from PIL import Image

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "sdxl_img2img_any_size.py"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setenv("ACCEL_STORE", "off")
    monkeypatch.setitem(sys.modules, "comfy_accel", comfy_accel.accel)  # as it is installed; tests load the whole pack
    spec = importlib.util.spec_from_file_location("sdxl_img2img_any_size", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_makes_images_of_every_size_and_compiles_for_the_first_alone(example, tmp_path, capsys):
    Image.new("RGB", (50, 40), "red").save(tmp_path / "start.png")
    tiny = example.tiny_pipeline()
    tiny.save_pretrained(tmp_path / "model")
    given = ["--output", tmp_path / "out", "--backend", "eager", "--steps", "4"]
    sizes = ["128x128", "64x256", "88x120"]
    example.main([*map(str, given), "--sizes", *sizes, "--images", "2"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Warm-up: ") and not said[0].startswith("Warm-up: 0 graphs compiled")
    assert [line.partition(":")[0] for line in said[1:]] == sizes
    assert all("2 images in" in line and line.endswith(", 0 graphs compiled") for line in said[1:])
    made = {path.stem: Image.open(path).size for path in (tmp_path / "out").iterdir()}
    assert made == {f"{text}-{number}": example.size(text) for text in sizes for number in (0, 1)}

    from_files = ["--model", tmp_path / "model", "--image", tmp_path / "start.png", "--quality", "40"]
    example.main([*map(str, [*given, *from_files]), "--sizes", "96x64"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 0 graphs compiled")


def test_example_refuses_a_path_that_is_none(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "nowhere"])
    assert "nowhere does not exist" in capsys.readouterr().err

"""The configurations that a fleet is started with: settings that there are, of an application that there is."""

import json
from pathlib import Path

import pytest
import yaml

from fleet.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "examples" / "fleet"
OBJECT_INFO = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))


def read(name):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def of_kuberay():
    return yaml.safe_load(read("rayservice.yaml")["spec"]["serveConfigV2"])


@pytest.mark.parametrize("config", [lambda: read("serve.yaml"), of_kuberay], ids=["serve", "rayservice"])
def test_configuration_has_settings_that_there_are(config):
    (application,) = config()["applications"]
    module, _, builder = application["import_path"].partition(":")
    package, _, module = module.partition(".")
    assert package == "comfy_accel_fleet"
    file = ROOT / "fleet" / f"{module}.py"
    assert f"def {builder}(" in file.read_text(encoding="utf-8")
    settings = Settings(**application["args"])
    assert settings.gpus == 1 and settings.environment["ACCEL_STORE"].startswith("/shared/")


def test_the_warm_up_is_a_prompt_that_a_comfyui_takes():
    """A replica whose warm-up is refused does not start."""
    (prompt,) = of_kuberay()["applications"][0]["args"]["warm_up"]
    ours = {node["class_type"]: node["inputs"] for node in prompt.values() if node["class_type"].startswith("Accel")}
    assert "AccelReport" in ours  # an output, without which core refuses
    assert all(OBJECT_INFO[name]["input"].get("required", {}).keys() <= given.keys() for name, given in ours.items())


def test_each_replica_of_the_manifest_has_a_worker():
    (group,) = read("rayservice.yaml")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == of_kuberay()["applications"][0]["args"]["replicas"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared"}


def test_paths_of_the_compose_file_are_those_of_its_configuration():
    (service,) = read("compose.yaml")["services"].values()
    mounted = dict(mount.split(":")[:2] for mount in service["volumes"])
    assert (FOLDER / "serve.yaml").is_file() and mounted["./serve.yaml"] == service["command"][-1]
    assert "/shared" in mounted.values()
    assert service["stop_signal"] == "SIGINT"  # the one that `serve run` shuts down at
    (port,) = service["ports"]
    assert port.startswith("127.0.0.1:") and port.endswith(f":{read('serve.yaml')['http_options']['port']}")

"""A diffusers pipeline in each replica of a fleet: its front around made-up replicas, and all under a real Ray."""

import asyncio
import io
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

pytest.importorskip("diffusers", reason="an optional package")
pytest.importorskip("ray.serve", reason="an optional package of 200 MB")

# ruff: noqa: E402
import numpy
import torch
from kit.pipeline_zoo import pipeline, text_encoder, tokenizer
from PIL import Image

from dev.bench import fleet
from fleet import pipeline as fleet_pipeline
from fleet.settings import PipelineSettings


@pytest.fixture(autouse=True)
def pack_s_engine(monkeypatch):
    """The engine under the name that all tests import it by, and no graph is kept on this disk."""
    monkeypatch.setattr(fleet_pipeline, "ENGINE", "comfy_accel.accel")
    monkeypatch.setenv("ACCEL_STORE", "off")


@pytest.fixture
def folder(tmp_path):
    """A tiny Stable Diffusion with a text encoder, as `save_pretrained` writes it."""
    words = tokenizer(tmp_path)
    made = pipeline("StableDiffusionPipeline", tokenizer=words, text_encoder=text_encoder(len(words)))
    made.save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


class Replicas:
    """In place of Serve's handle. answers: what the runs come to, one after the other; an exception is raised."""

    def __init__(self, *answers):
        self.answers, self.asked, self.image = list(answers), [], SimpleNamespace(remote=self._image)

    def options(self, multiplexed_model_id):
        self.key = multiplexed_model_id
        return self

    async def _image(self, given, key):
        self.asked.append((given, key))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return *answer, {"met": None, "replica": {"replica": "a"}}


def post(replicas, body, **settings):
    """(status, body, headers) of the front's answer."""
    plain = [kind for kind in fleet_pipeline.PipelineFront.__mro__ if kind.__module__ == fleet_pipeline.__name__][-1]
    front = plain(replicas, {"pipeline": "p", **settings})
    answer = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        answer.append(message)

    scope = {"type": "http", "method": "POST", "path": "/image", "query_string": b"", "headers": [], "root_path": ""}
    asyncio.run(front.__serve_build_asgi_app__()(scope, receive, send))
    return answer[0]["status"], answer[1]["body"], {name: value for name, value in answer[0]["headers"]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "prompt"),
        ([], "The body"),
        ({"prompt": "x", "callback": "os.system"}, "callback"),
        ({"prompt": "x", "width": 10**6}, "width"),
        ({"prompt": "x", "guidance": float("nan")}, "guidance"),
        ({"prompt": "x", "seed": -1}, "seed"),
        ({"prompt": "x" * 20_001}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x", "\ud800": 1}, "The body"),
    ],
)
def test_request_that_is_none_is_refused_by_name_and_reaches_no_replica(body, sentence):
    replicas = Replicas()
    status, text, _ = post(replicas, body)
    assert status == 400 and json.loads(text)["error"]["message"].startswith(sentence)
    assert replicas.asked == []


@pytest.mark.parametrize(
    ("body", "route", "key"),
    [
        ({"width": 64, "height": 32}, "graph", "64x32"),
        ({"width": 64, "height": 32}, "any", ""),
        ({"width": 64}, "graph", ""),
    ],
)
def test_request_is_routed_by_its_size(body, route, key):
    replicas = Replicas(("image", b"png"))
    assert post(replicas, {"prompt": "x", **body}, route=route)[:2] == (200, b"png")
    assert replicas.key == key


def test_request_whose_replica_ended_runs_once_more_with_the_same_seed():
    replicas = Replicas(RuntimeError("the actor died"), ("image", b"png"))
    status, body, headers = post(replicas, {"prompt": "x"})
    assert (status, body) == (200, b"png")
    seeds = {given["seed"] for given, _ in replicas.asked}
    assert len(replicas.asked) == 2 and seeds == {int(headers[b"x-seed"])}
    replicas = Replicas(*[RuntimeError("the actor died")] * 3)
    assert post(replicas, {"prompt": "x"})[0] == 503
    assert len(replicas.asked) == 2


def test_what_the_pipeline_raises_is_an_answer():
    for kind, status in (("refused", 400), ("failed", 500)):
        replicas = Replicas((kind, "It is odd."))
        found, text, _ = post(replicas, {"prompt": "x"})
        assert found == status and json.loads(text)["error"]["message"] == "It is odd."
        assert len(replicas.asked) == 1


def test_pipeline_is_loaded_accelerated_and_warm(folder):
    settings = PipelineSettings(
        pipeline=str(folder),
        accelerate={"backend": "eager", "ignores": ["vae"], "deep_cache": {"quality": 45.0}},
        warm_up={"prompt": "x", "width": 32, "height": 32},
    )
    pipe = fleet_pipeline.load(settings)
    assert "_accel" in vars(pipe) and vars(pipe)["_accel"].deep_cache.quality == 45.0
    assert fleet_pipeline.engine("cache.graph_cache").shared.statistics()["compilations"] > 0


def ask(url, **asked):
    """(status, body, headers)."""
    request = urllib.request.Request(f"{url}/image", json.dumps(asked).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def state(url):
    with urllib.request.urlopen(f"{url}/accel/state", timeout=60) as answer:
        return json.load(answer)


@pytest.mark.thorough  # starts Ray and two pipelines, and a third in place of the one that it kills
def test_images_are_the_pipelines_own_and_are_answered_though_a_replica_is_killed(folder):
    from ray import serve

    from fleet.app import pipeline as application
    from fleet.settings import PipelineSettings as Settings

    settings = Settings(
        pipeline=str(folder),
        replicas=2,
        accelerate={"backend": "eager", "ignores": ["vae"]},
        warm_up={"prompt": "x", "width": 32, "height": 32},
        environment={"ACCEL_STORE": "off"},
    )
    with fleet.own_ray(2) as url:
        serve.run(application(settings), name="pipeline", route_prefix="/")
        plain = pipeline("StableDiffusionPipeline").__class__.from_pretrained(folder, safety_checker=None)
        for width, height in ((32, 32), (64, 32), (48, 64)):
            asked = dict(prompt="a lake", negative_prompt="fog", width=width, height=height)
            status, png, headers = ask(url, **asked, steps=3, seed=5)
            assert status == 200 and headers["Content-Type"] == "image/png" and headers["X-Seed"] == "5"
            generator = torch.Generator().manual_seed(5)
            (expected,) = plain(**asked, num_inference_steps=3, generator=generator).images
            found = numpy.asarray(Image.open(io.BytesIO(png)), dtype=int)
            assert found.shape == (height, width, 3)
            assert abs(found - numpy.asarray(expected, dtype=int)).max() <= 2
            assert ask(url, **asked, steps=3, seed=5)[1] == png
        assert state(url)["images"] == {"runs": 6, "answered": 6, "not_met": 3, "met": 3}

        status, text, _ = ask(url, prompt="x", width=33, height=32)
        assert status == 400 and "divisible by 8" in json.loads(text)["error"]["message"]

        long = dict(prompt="x", width=64, height=64, steps=1000, seed=1)
        with pytest.raises(TimeoutError):
            given_up = urllib.request.Request(f"{url}/image", json.dumps(long).encode())
            urllib.request.urlopen(given_up, timeout=0.7)
        began = time.monotonic()
        assert ask(url, **{**long, "steps": 2})[0] == 200  # by the same replica, which has stopped
        assert time.monotonic() - began < 5

        answers = []
        running = threading.Thread(target=lambda: answers.append(ask(url, **{**long, "steps": 400})))
        running.start()
        time.sleep(0.7)
        home = state(url)["replicas"][-1]  # that took the last request
        os.kill(home["pid"], signal.SIGKILL)
        running.join()
        assert answers[0][0] == 200 and answers[0][2]["X-Replica"] != home["replica"]
        serve.delete("pipeline")

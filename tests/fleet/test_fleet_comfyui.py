"""The process of a fleet's ComfyUI, around a stand-in for ComfyUI that speaks its API."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from fleet import comfyui_process
from fleet.comfyui_process import ComfyUI, Gone, NotReached

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "ComfyUI"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("fake_comfyui.py"), folder / "main.py")
    return folder


@contextlib.asynccontextmanager
async def running(tree, **options):
    comfyui = ComfyUI(tree, tree.parent / "work", **options)
    try:
        await comfyui.start(timeout=60)
        yield comfyui
    finally:
        await comfyui.stop()


async def events(comfyui, what, prompt_id="id"):
    body = {"prompt": {"do": what}, "client_id": "page"}
    first, *others = [event async for event in comfyui.run(prompt_id, body)]
    assert first == ("sent", None)
    return others


def runs(pid):
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


async def test_prompts_own_messages_are_given_in_order_and_its_history_at_the_end(tree):
    async with running(tree) as comfyui:
        (kind, answer), *messages, (last, entry) = await events(comfyui, "save")
    assert kind == "accepted" and answer["prompt_id"] == "id"
    said = [value if isinstance(value, bytes) else json.loads(value)["type"] for _, value in messages]
    assert said == ["execution_start", b"preview", "accel", "executed", "execution_success"]
    assert last == "history" and entry["outputs"]["9"]["images"][0]["filename"] == "id.png"
    assert entry["prompt"][3]["client_id"] == "page"
    assert not (tree.parent / "work").exists()


async def test_refusal_is_handed_on_in_words_and_nothing_is_taken_back(tree):
    async with running(tree) as comfyui:
        ((kind, (status, answer)),) = await events(comfyui, "refuse")
        assert kind == "refused" and status == 400 and answer["error"]["message"] == "invalid"
        ((kind, (status, answer)),) = await events(comfyui, "break")  # beyond what ComfyUI checks
        assert kind == "refused" and status == 500
        assert "cannot read the prompt: 500 Internal Server Error" in answer["error"]["message"]
        assert (await comfyui.state())["taken_back"] == []


async def test_prompt_that_ended_without_a_word_is_found_in_the_history(tree, monkeypatch):
    monkeypatch.setattr(comfyui_process, "_SILENCE", 0.3)
    async with running(tree) as comfyui:
        assert (await events(comfyui, "silent"))[-1][0] == "history"


async def test_prompt_that_is_followed_no_more_is_taken_back(tree):
    async with running(tree) as comfyui:
        async with contextlib.aclosing(comfyui.run("id", {"prompt": {"do": "hang"}})) as events:
            async for kind, _ in events:
                if kind == "message":
                    break
        assert (await comfyui.state())["taken_back"] == [{"delete": ["id"]}, {"prompt_id": "id"}]


async def test_comfyui_that_ends_under_a_prompt_is_gone(tree):
    async with running(tree) as comfyui:
        with pytest.raises(Gone):
            await events(comfyui, "die")
        while not comfyui.ended:
            await asyncio.sleep(0.05)


async def test_request_that_was_taken_is_told_from_one_that_nobody_took():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = "http://{}:{}".format(*server.sockets[0].getsockname())
    async with server, aiohttp.ClientSession() as session:
        with pytest.raises(Gone) as taken:
            await comfyui_process.ask(session, address, "POST", "/upload/image", raw=b"image")
    assert taken.type is Gone
    async with aiohttp.ClientSession() as session:
        with pytest.raises(NotReached):
            await comfyui_process.ask(session, address, "POST", "/upload/image", raw=b"image")


async def test_comfyui_that_does_not_start_says_why(tree):
    (tree / "main.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(Gone, match="no such model"):
        async with running(tree):
            pass


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from dev.tools import pack
pack.load()
from fleet.comfyui_process import ComfyUI

async def main():
    comfyui = ComfyUI(Path(sys.argv[2]), Path(sys.argv[3]))
    await comfyui.start(60)
    print((await comfyui.state())["pid"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(("text", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise OSError('port taken')", 1)])
def test_comfyui_that_ends_by_itself_ends_with_its_own_code_and_words(tmp_path, text, code):
    (tmp_path / "main.py").write_text(text)
    command = [sys.executable, "-c", comfyui_process._ENDS_WITH_US, str(tmp_path / "main.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.read()
        assert process.wait(30) == code and "Fatal Python error" not in said
    assert ("port taken" in said) == ("port taken" in text)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks there whether the process runs")
def test_comfyui_ends_with_a_process_that_is_killed(tree, tmp_path):
    command = [sys.executable, "-c", PARENT, str(TESTS.parent), str(tree), str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = parent.stdout.readline().strip()
        ran = runs(pid)
        parent.kill()
    deadline = time.monotonic() + 20
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ran and not runs(pid)

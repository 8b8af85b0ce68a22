"""A main.py that speaks as much of ComfyUI's API as a fleet's replica asks for, and runs nothing. Starts in a second.

What a prompt does is its "do": "save" makes a file, "refuse", "break", "silent" ends without a message, "hang", "die".
"""

import argparse
import asyncio
import os
from pathlib import Path

from aiohttp import web

sockets, history, taken_back = {}, {}, []


async def listen(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    sockets[request.query["clientId"]] = socket
    await socket.send_json({"type": "status", "data": {"status": {}, "sid": request.query["clientId"]}})
    async for _ in socket:
        pass
    return socket


async def post_prompt(request):
    body = await request.json()
    if body["prompt"]["do"] == "refuse":
        return web.json_response({"error": {"message": "invalid"}, "node_errors": {}}, status=400)
    if body["prompt"]["do"] == "break":
        raise TypeError
    asyncio.get_running_loop().create_task(run(body["prompt_id"], body["client_id"], body["prompt"]))
    return web.json_response({"prompt_id": body["prompt_id"], "number": 1, "node_errors": {}})


async def run(prompt_id, client_id, prompt):
    socket, what = sockets[client_id], prompt["do"]
    item = [1, prompt_id, prompt, {"client_id": client_id}, []]

    async def say(kind, **data):
        await socket.send_json({"type": kind, "data": {**data, "prompt_id": prompt_id}})

    for other in (*sockets.values(),):  # about what runs, before this one does
        await other.send_json({"type": "accel", "data": {"event": "before"}})
        for data in ("text", ["prompt_id"], 5, True, None):  # as any node may send
            await other.send_json({"type": "a node's own", "data": data})
        for text in ("no JSON", "[]", "7", "{}", '{"type": "accel"}', "[" * 100_000):
            await other.send_str(text)
    await socket.send_bytes(b"another's preview")
    await socket.send_json({"type": "progress", "data": {"prompt_id": "another", "value": 1}})
    if what == "die":
        os._exit(3)
    if what == "hang":
        await say("execution_start")
        return
    folder = Path(options.output_directory)
    folder.mkdir(exist_ok=True)
    (folder / f"{prompt_id}.png").write_bytes(b"image")
    output = {"images": [{"filename": f"{prompt_id}.png", "subfolder": "", "type": "output"}]}
    history[prompt_id] = {"prompt": item, "outputs": {"9": output}, "status": {"status_str": "success"}, "meta": {}}
    if what == "silent":
        return
    await say("execution_start")
    await socket.send_bytes(b"preview")
    await socket.send_json({"type": "accel", "data": {"event": "compiled"}})
    await say("executed", node="9", output=output)
    await say("execution_success")
    await say("executing", node=None)


async def get_history(request):
    asked = request.match_info["prompt_id"]
    return web.json_response({asked: history[asked]} if asked in history else {})


async def take_back(request):
    taken_back.append(await request.json())
    return web.Response()


async def get_state(request):
    return web.json_response({"graph_cache": {}, "graph_store": None, "taken_back": taken_back, "pid": os.getpid()})


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--output-directory")
options, _ = parser.parse_known_args()
app = web.Application()
app.add_routes(
    [
        web.get("/ws", listen),
        web.post("/prompt", post_prompt),
        web.get("/history/{prompt_id}", get_history),
        web.post("/queue", take_back),
        web.post("/interrupt", take_back),
        web.get("/accel/state", get_state),
        web.get("/system_stats", get_state),
    ]
)
web.run_app(app, host="127.0.0.1", port=options.port, print=None)

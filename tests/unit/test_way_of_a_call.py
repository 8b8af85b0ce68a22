"""The way of one call of a block: no door is passed twice."""

import sys
from pathlib import Path

import torch
from comfy_accel.accel.compile import block_compiler
from comfy_accel.accel.dispatch.resolver import ResolvedGraph
from kit.blocks import Block, runner
from kit.engine_imports import ENGINE

KNOWN = [("dispatch/inline_cache", name) for name in ("match", "verdict", "find")]
NEW = [
    *KNOWN,
    ("dispatch/resolver", "resolve"),
    ("cache/graph_cache", "find"),
    ("compile/block_compiler", "compile_block"),
    ("dispatch/inline_cache", "add"),
]
"""(room, door) of a call that is like no other; `dispatch/block_runner` is the corridor."""

ROOMS = {room for room, _ in NEW}


def doors(call, monkeypatch):
    """(room, function) of each entry into a room from another file of the engine, in order."""
    entered, compile_block = [], block_compiler.compile_block

    def look(frame, event, _):
        if event != "call" or frame.f_back is None:
            return
        here, there = (Path(each.f_code.co_filename) for each in (frame, frame.f_back))
        if here != there and ENGINE in there.parents and ENGINE in here.parents:
            entered.append((here.relative_to(ENGINE).with_suffix("").as_posix(), frame.f_code.co_name))

    def compiled(*args, **kwargs):
        sys.setprofile(None)  # torch makes a million calls in there
        entered.append(("compile/block_compiler", "compile_block"))
        try:
            return compile_block(*args, **kwargs)
        finally:
            sys.setprofile(look)

    monkeypatch.setattr(block_compiler, "compile_block", compiled)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    aside = {("dispatch/resolver", name) for name in ("<lambda>", *vars(ResolvedGraph))}  # a record, and no room
    return [door for door in entered if door[0] in ROOMS and door not in aside]


def test_no_door_is_passed_twice_in_a_call(monkeypatch):
    block, x = Block(), torch.randn(2, 4)
    stand_in = runner(block)
    new, known, watched, matched = (doors(lambda: stand_in(block.forward, x), monkeypatch) for _ in range(4))
    graph = [new.pop(), known.pop(), watched.pop(), matched.pop()]
    assert all(room == "compile/block_compiler" and name.startswith("block_") for room, name in graph)
    assert new == NEW and len(set(NEW)) == len(NEW)
    assert known == KNOWN and matched == KNOWN[:1]
    assert watched == [*matched, ("dispatch/inline_cache", "_watched")]  # whether its code can be called directly

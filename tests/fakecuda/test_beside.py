"""Code for a card, made in a process beside: the same, and nothing of it touches the card there."""

import re
import subprocess
import time
from pathlib import Path

import torch
from comfy_accel.accel.beside import making
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.compile import generated_code
from kit import blocks
from kit.block_graphs import on_card, zeros


class ResBlock(torch.nn.Module):
    """With a group norm, whose kernels are ours."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = torch.nn.GroupNorm(32, 64), torch.nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x, emb):
        return x + self.conv(torch.nn.functional.silu(self.norm(x + emb[:, :, None, None])))


def generated(modules):
    """What calls the kernels of graphs, without comments, which name places, and the name of the assembler."""
    texts = [Path(module.__file__).read_text(encoding="utf-8") for module in modules]
    return [re.sub(r"#.*|'backend_hash': '\w+'", "", text) for text in texts if "def call(" in text]


def test_code_for_a_card_is_the_same_and_is_made_without_a_context_there(monkeypatch, tmp_path):
    own, block = making._Process(), on_card(ResBlock(), torch.half)
    monkeypatch.setattr(making, "_process", own)
    monkeypatch.setenv(making.VARIABLE, "1")
    monkeypatch.setenv("FAKECUDA_LOG", "1")
    kept, inputs = GraphCache(), zeros((2, 64, 16, 16), (2, 64))
    with open(tmp_path / "said", "w+") as said, torch.inference_mode():
        begin = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda *given, **how: begin(*given, **{**how, "stderr": said}))
        stand_in = blocks.runner(block, kept, backend="inductor", beside=True)
        stand_in(block.forward, *inputs)
        ((graph,),) = (entry.graphs for entry in kept.entries())
        ends = time.monotonic() + 120
        while not graph.pending.is_done:
            assert time.monotonic() < ends
            time.sleep(0.05)
        with generated_code.collect_modules() as kept_modules:
            stand_in(block.forward, *inputs)
        own.stop()
        said.seek(0)
        assert stand_in.eager_calls == 1
        assert [line for line in said if "made-up device" in line] == []
    assert graph.pending is None and graph.nbytes > 0
    of_beside = generated(kept_modules)
    assert len(of_beside) == 1 and "normalise" in of_beside[0]
    monkeypatch.undo()
    with generated_code.collect_modules() as modules, torch.inference_mode():
        here = blocks.runner(block, GraphCache(), backend="inductor")
        here(block.forward, *inputs)
    assert here.eager_calls == 0 and generated(modules) == of_beside

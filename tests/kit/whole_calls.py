"""A model of blocks whose calls tell which stand-ins are asked in them."""

from __future__ import annotations

import collections
import sys

import torch
from comfy_accel.accel.cache.graph_cache import GraphCache
from comfy_accel.accel.core.compile_settings import CompileSettings
from comfy_accel.accel.dispatch.block_runner import BlockRunner
from comfy_accel.accel.dispatch.compiled_layers import Host, make_compiled_layers, survey_model
from comfy_accel.accel.dispatch.whole_calls import WholeCalls
from comfy_accel.accel.fingerprint.survey import KeptSurveys
from torch import nn

MEASURED = CompileSettings(backend="eager", measured=True)


class Tanh(nn.Module):
    factor = 1.0

    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x))) * self.factor


class Net(nn.Module):
    def __init__(self, blocks, wide=0):
        super().__init__()
        self.blocks = nn.ModuleList([*(Tanh(8) for _ in range(blocks)), *(Tanh(16) for _ in range(wide))])
        self.eval().requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x.repeat(1, block.linear.in_features // x.shape[1]))
        return x


class Run:
    """A run of a model; a call with it returns the blocks whose stand-ins were asked in it."""

    def __init__(self, net, cache=None, settings=MEASURED, device="cpu"):
        self.device = torch.device(device)
        self.net, self.cache = net, cache or GraphCache()
        found = survey_model(net, settings, Host(), KeptSurveys.get_or_create(net))
        layers = make_compiled_layers(net, found, settings, Host(), self.cache)
        self.runners = [layer for layer in layers.values() if isinstance(layer, BlockRunner)]
        self.calls = WholeCalls("Net", layers, self.cache, settings)

    def __call__(self, rows=4, **how):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).to(self.device)
        expected, asked = self.net(x), collections.Counter()

        def hook(frame, event, _):
            if event == "call" and frame.f_code is BlockRunner._call.__code__:
                asked[frame.f_locals["self"]._region.path] += 1

        with self.calls.put_in_place((x,), **how):
            sys.setprofile(hook)
            try:
                out = self.net(x)
            finally:
                sys.setprofile(None)
        assert out.is_cuda or torch.allclose(out, expected, atol=1e-6)
        return len(asked)

    @property
    def eager_calls(self):
        return self.calls.end() + sum(runner.eager_calls for runner in self.runners)

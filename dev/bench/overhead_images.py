"""What an image costs beside its graphs: ours, core's node, core's compile of each block as KJNodes' nodes do it.

A graph of any contender runs its operations as they are, and the time in there is left out; so is what the same image
takes without a compiler around the same parts of the model. Processor time of one thread, milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from . import report

NAMES = ("SD1.5", "SDXL", "Flux", "SD3", "Qwen-Image", "Wan", "HunyuanVideo", "Z-Image")
CONTENDERS = ("ours", "blocks", "core")
PARTS = ("node", "before", "first", "step", "rest")
COLUMNS = ("layout", "case", "image", "contender", "beside_ms", *PARTS, "compiled")
LEGEND = """\
beside_ms: of an image of 4 steps. node: the node's own call; before: until the model is called; first: its calls in the
first step; step: in one of the later ones; rest: between and after them. compiled: graphs that the image waited for.
ours, blocks: beside eager blocks; core: beside the eager model. Image 10: the least of each part of eight images.
Unequal prompts are two calls a step, equal ones one call."""
STEPS, LATER, SIDE = 4, 8, 16
PROMPTS = 24, 31
"""Tokens of the prompt and of the negative one: their lengths differ, so that core makes two calls a step."""
DEPTH = {
    "SD3": {"num_blocks": 24},
    "Qwen-Image": {"num_layers": 60},
    "Wan": {"num_layers": 30},
    "HunyuanVideo": {"depth": 20, "depth_single_blocks": 40},
    "Z-Image": {"n_layers": 30, "n_refiner_layers": 2},
}
"""Depths of the published models, for the families that `full_size.NARROW` has not."""

clock = time.thread_time


@dataclass(frozen=True)
class Case:
    """How images are made."""

    name: str
    batch: int = 1
    side: int = SIDE
    tokens: int = PROMPTS[0]
    cfg: float = 1.0
    equal: bool = False


CASES = (
    Case("CFG 1"),
    Case("unequal prompts", cfg=5.0),
    Case("equal prompts", cfg=5.0, equal=True),
    Case("longer prompt", tokens=77),
    Case("batch 2", batch=2),
    Case("batch 4", batch=4),
    Case("second size", side=SIDE + 4),
)


@dataclass(eq=False)
class Clock:
    """The time of one contender's images, without what passes in graphs or in what stands for them.

    apply: its node, from a ModelPatcher to another. applied: what that gave, once it has. calls: of the model, from
    when to when.
    """

    apply: Callable[[Any], Any] = lambda model: model
    applied: Any = None
    calls: list[tuple[float, float]] = field(default_factory=list)
    _inside: float = 0.0
    _is_inside: bool = False

    def now(self) -> float:
        return clock() - self._inside

    def around(self, function: Callable) -> Callable:
        def run(*args, **kwargs):
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, began = True, clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside += clock() - began
                self._is_inside = False

        return run

    def backend(self, graph: Any, examples: Any) -> Callable:
        return self.around(graph.forward)

    def wrapper(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        began = self.now()
        try:
            return executor(*args, **kwargs)
        finally:
            self.calls.append((began, self.now()))


class Layout:
    """A model of a family at full depth, narrow, and what its images take."""

    def __init__(self, name: str):
        import torch
        from kit.families import FAMILIES

        from . import full_size

        family, self.shape = full_size.NARROW.get(name), (16 if name == "Flux" else 4, SIDE, SIDE)
        if family is None:
            family, self.shape = FAMILIES[name].family, FAMILIES[name].sizes[0][0]
            family = replace(family, config={**family.config, **DEPTH[name]})
        self.name, self.family = name, family
        self.model = family.load(torch.float32)

    def image(self, case: Case, time_of: Clock) -> dict[str, float]:
        """Milliseconds of each part of one image."""
        import torch
        from kit import tiny_models

        lengths = (case.tokens, case.tokens if case.equal else PROMPTS[1])
        prompts = [self.family.conditioning(tokens, seed) for seed, tokens in enumerate(lengths, 1)]
        latent = torch.zeros(case.batch, *self.shape[:-2], case.side, case.side)
        settings = dict(steps=STEPS, cfg=case.cfg, sampler="euler", scheduler="simple")
        time_of.calls.clear()
        began = time_of.now()
        model, applied = self._applied(time_of), time_of.now()
        tiny_models.sample_latent(model, latent, *prompts, **settings)
        whole, calls = time_of.now() - applied, [end - start for start, end in time_of.calls]
        each = len(calls) // STEPS
        before, first, later = time_of.calls[0][0] - applied, sum(calls[:each]), sum(calls[each:])
        parts = applied - began, before, first, later / (STEPS - 1), whole - before - first - later
        return {part: 1e3 * seconds for part, seconds in zip(PARTS, parts, strict=True)}

    def least(self, case: Case, time_of: Clock) -> dict[str, float]:
        """The same, the least of several images."""
        images = [self.image(case, time_of) for _ in range(LATER)]
        return {part: min(image[part] for image in images) for part in PARTS}

    def _applied(self, time_of: Clock) -> Any:
        """The model to sample with; core keeps what a node gave."""
        from comfy.patcher_extension import WrappersMP

        if time_of.applied is None:
            model = self.model.clone()
            model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "bench", time_of.wrapper)
            time_of.applied = time_of.apply(model)
        return time_of.applied


def measure(name: str, contenders: list[str], cases: list[Case]) -> Iterator[report.Row]:
    """The rows of one layout, each told at once: all contenders' images, one after the other."""
    import torch

    from . import full_size
    from .compilations import read_counts

    layout = Layout(name)
    if name in full_size.UNETS:  # core's UNets tell their blocks by class, so KJNodes' nodes compile them as a whole
        contenders = [contender for contender in contenders if contender != "blocks"]
    with torch.inference_mode():
        for contender in contenders:
            with _eagerly(layout, whole=contender == "core") as eager:
                least = {case: layout.least(case, eager) for case in cases}
            torch._dynamo.reset()
            time_of = Clock()
            time_of.apply = node(contender, time_of.backend)
            for case in cases:
                for image, measured in ((1, layout.image), (2, layout.image), (2 + LATER, layout.least)):
                    before = read_counts()
                    taken = measured(case, time_of)
                    beside = {part: round(taken[part] - least[case][part], 2) for part in PARTS}
                    total = sum(beside.values()) + (STEPS - 2) * beside["step"]
                    row = {"layout": name, "case": case.name, "image": image, "contender": contender}
                    row |= {
                        "beside_ms": round(total, 2),
                        **beside,
                        "compiled": read_counts().since(before).graphs,
                    }
                    report.tell(row, COLUMNS)
                    yield row


def node(contender: str, backend: Callable) -> Callable[[Any], Any]:
    """From a ModelPatcher to the one that the contender's node gives."""
    import torch
    from comfy_accel.accel.modules.blocks import blocks
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    from . import session

    if contender == "ours":
        return session.node(contender, backend)
    torch._dynamo.config.cache_size_limit = 64  # as KJNodes' nodes set it

    def apply(model: Any) -> Any:
        model, paths = model.clone(), [path for path, _ in blocks(model.model.diffusion_model)]
        keys = ["diffusion_model"] if contender == "core" else [f"diffusion_model.{path}" for path in paths]
        set_torch_compile_wrapper(model=model, backend=backend, keys=keys)
        return model

    return apply


@contextmanager
def _eagerly(layout: Layout, whole: bool) -> Iterator[Clock]:
    """The time of images outside of the models, or of their blocks."""
    from comfy_accel.accel.modules.blocks import blocks

    time_of = Clock()
    model = layout.model.model.diffusion_model
    parts = [model] if whole else [block for _, block in blocks(model)]
    for part in parts:
        part.forward = time_of.around(part.forward)
    try:
        yield time_of
    finally:
        for part in parts:
            del part.forward

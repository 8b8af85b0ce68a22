"""Where a diffusion transformer is cut for DeepCache: the blocks in its middle, whose effect on the
token streams a full step remembers as a residual and a skipped step adds again.

Residuals of middle blocks as in Chen et al.: "Δ-DiT" (arXiv 2406.01125); the policy is DeepCache's.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..core.events import log
from ..modules.blocks import BlockList, largest_depth_within, trunk_of
from ..modules.substitution import Forward, Layer
from .config import checked_depth
from .run import BranchKey, DeepCacheRun
from .token_streams import NoStreams, StreamFinder, Streams, arguments, parts_of, possible_streams

DEFAULT_SHARE = 0.3
"""Largest share of the blocks' weights that a skipped step may use when the depth is not given.

Interval 3 then executes (1 + 2 × 0.3) / 3, about half of the work.
"""

_CONTROLS = {
    "double_blocks": "input",
    "single_blocks": "output",
    "joint_blocks": "output",
    "transformer_blocks": "input",
}
"""Which of ComfyUI's lists of ControlNet residuals is added behind the blocks of a list, one by one.

Where a model is not named here its residuals stay: adding them costs little, and what is added between
skipped blocks has no effect.
"""

_IMAGE = ("img", "x", "hidden_states", "image_tokens")
"""Names of the stream that the adaptive schedule watches, where a block has several."""


@dataclass(eq=False)
class Span:
    """The blocks of one list that a skipped step leaves out, `start` to `stop` of `found.blocks`.

    streams: what its blocks do to which arguments; None until a full call has shown it. remembered:
        whether a residual of it was handed to the run.
    """

    found: BlockList
    start: int
    stop: int
    finder: StreamFinder = field(default_factory=StreamFinder)
    streams: Streams | None = None
    remembered: bool = False
    unfit: bool = False

    def __post_init__(self) -> None:
        self.blocks = self.found.blocks[self.start : self.stop]
        self.first, self.last = self.blocks[0], self.blocks[-1]

    def part(self, name: str) -> tuple[str, str]:
        return self.found.path, name

    def batch_dim(self, tensor: torch.Tensor) -> int:
        """Cosmos says in `x_format` that its batch comes fourth."""
        return max(getattr(self.first, "x_format", "B").find("B"), 0) if tensor.ndim > 3 else 0


class DiTBoundary:
    """Where a transformer is cut: `depth` blocks at its front and as many at its end are shallow.

    Serves one run: what its full calls show of the blocks is kept in it. The run remembers one tensor
    of the tokens' size for each list and stream; Flux at 1024² in half precision 53 MiB an image. Raises
    ValueError for a depth outside `1 .. max_depth`.
    """

    def __init__(self, model: torch.nn.Module, depth: int | None):
        self.model = model
        self.lists = trunk_of(model)
        self.count = sum(len(found.blocks) for found in self.lists)
        depth = largest_depth_within(DEFAULT_SHARE, self.lists) if depth is None else depth
        self.depth = checked_depth(depth, self.max_depth)
        self.spans: list[Span] = []
        before = 0
        for found in self.lists:
            start = max(self.depth - before, 0)
            stop = min(self.count - self.depth - before, len(found.blocks))
            if start < stop:
                self.spans.append(Span(found, start, stop))
            before += len(found.blocks)
        self._tail = [block for found in self.lists for block in found.blocks][-self.depth :]

    @property
    def max_depth(self) -> int:
        return (self.count - 1) // 2

    @property
    def is_settled(self) -> bool:
        """Whether calls of one phase do the same from now on: what the blocks do to which arguments is known."""
        return all(span.unfit or span.remembered for span in self.spans)

    @property
    def parts(self) -> tuple[Hashable, ...]:
        """Of the run's features, those that a skipped call takes."""
        return tuple(span.part(name) for span in self.spans if span.remembered for name in span.streams.tensors)

    @property
    def layout(self) -> Hashable:
        """Tells where the model is cut."""
        return "transformer", self.depth, tuple(span.found.path for span in self.spans if not span.unfit)

    def note(self, keys: Sequence[BranchKey], image: torch.Tensor) -> None:
        """A call in full has begun; nothing of it is kept here."""

    def require(self, keys: Sequence[BranchKey], image: torch.Tensor) -> None:
        """A skipped call has begun; its shapes are compared when residuals are added."""

    def recording(self, run: DeepCacheRun, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The stand-ins for a call in full."""
        layers: dict[torch.nn.Module, Layer] = {}
        for span in self.spans:
            if not span.unfit:
                watched = span is next(span for span in self.spans if not span.unfit)
                passage = _Recording(self, span, run, keys, watched)
                blocks = {span.first, span.last} if span.streams else span.found.blocks
                layers.update({block: partial(_call, passage.call, block) for block in blocks})
        return layers

    def skipping(self, run: DeepCacheRun, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """The stand-ins for a call whose middle blocks are skipped.

        They raise RuntimeError where the call goes another way than the recorded ones did: a patch in
        the place of the first or the last skipped block, or another shape.
        """
        passages = [_Skipping(span, run, keys) for span in self.spans if span.remembered]
        layers: dict[torch.nn.Module, Layer] = {}
        for passage in passages:
            passage.watched = passage is passages[0]
            for block in passage.span.blocks:
                layers[block] = partial(_call, passage.call, block)
        layers.update({block: partial(_require, passages) for block in self._tail})
        return layers

    def withhold(self, control: Mapping[str, list] | None) -> dict[str, list] | None:
        """`control` without the residuals that the remembered ones already hold: those added behind a
        skipped block, but for the last of a list. The caller's dict and lists stay as they are."""
        if control is None:
            return None
        kept = {name: list(values) if isinstance(values, list) else values for name, values in control.items()}
        for span in self.spans:
            residuals = kept.get(_CONTROLS.get(span.found.path))
            if span.remembered and residuals is not None:
                for index in range(span.start, min(span.stop - 1, len(residuals))):
                    residuals[index] = None
        return kept

    def give_up(self, span: Span, run: DeepCacheRun, reason: str) -> None:
        """The blocks of `span` run on every step from now on."""
        span.unfit, span.remembered = True, False
        rest = ""
        if all(other.unfit for other in self.spans):
            run.failed = True
            rest = "; every step runs in full"
        log.warning("DeepCache: cannot skip %s of %s: %s%s.", span.found.path, type(self.model).__name__, reason, rest)


def has_dit_layout(model: Any) -> bool:
    """Whether `DiTBoundary` understands the model: lists of blocks in order, three blocks at least."""
    return isinstance(model, torch.nn.Module) and sum(len(found.blocks) for found in trunk_of(model)) >= 3


def _call(passage: Any, block: torch.nn.Module, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return passage(block, inner, args, kwargs)


class _Recording:
    """One call in full on its way through a span."""

    def __init__(self, boundary: DiTBoundary, span: Span, run: DeepCacheRun, keys: Sequence[BranchKey], watched: bool):
        self.boundary, self.span, self.run, self.keys, self.watched = boundary, span, run, keys, watched
        self.learning = span.streams is None
        self.inputs: dict[str, torch.Tensor] | None = None
        self.hidden: list[weakref.ref] = []
        """What skipped blocks returned, but for the last: nobody else may need it."""
        span.finder.forget_tensors()

    def call(self, block: torch.nn.Module, inner: Forward, args: tuple, kwargs: dict) -> Any:
        if self.span.unfit:
            return inner(*args, **kwargs)
        given: dict[str, torch.Tensor] = {}
        try:
            if self.learning or block is self.span.first:
                given = possible_streams(arguments(block, args, kwargs))
                self._before(block, given)
        except NoStreams as reason:
            self._not_remembered(reason)
        out = inner(*args, **kwargs)
        try:
            if self.span.unfit:
                return out
            if self.learning:
                self.span.finder.see_return(given, out)
                self._note_hidden(block, parts_of(out))
                if block is self.span.found.blocks[-1]:
                    self.span.finder.forget_tensors()
            return self._remember(out) if block is self.span.last and self.inputs is not None else out
        except NoStreams as reason:
            self._not_remembered(reason)
            return out

    def _before(self, block: torch.nn.Module, given: dict[str, torch.Tensor]) -> None:
        span = self.span
        if self.learning:
            span.finder.see_call(given)
            hidden = [ref() for ref in self.hidden]
            if block not in span.blocks and any(value is part for value in given.values() for part in hidden):
                raise NoStreams("a block that is not skipped takes what a skipped one returned")
        if block is span.first:
            names = given if span.streams is None else span.streams.tensors
            if not given.keys() >= set(names):
                raise NoStreams("it is called otherwise than before")
            self.inputs = {name: given[name].clone() for name in names}

    def _note_hidden(self, block: torch.nn.Module, parts: list[torch.Tensor]) -> None:
        if block in self.span.blocks:
            # A block that works in place returns what earlier ones returned.
            self.hidden = [ref for ref in self.hidden if not any(ref() is part for part in parts)]
            if block is not self.span.last:
                self.hidden += [weakref.ref(part) for part in parts]

    def _not_remembered(self, reason: NoStreams) -> None:
        """For good, unless this call is unlike earlier ones."""
        self.inputs = None
        if self.learning:
            self.boundary.give_up(self.span, self.run, str(reason))
        else:
            log.debug("DeepCache: a call of %s is not remembered: %s", self.span.found.path, reason)

    def _remember(self, out: Any) -> Any:
        span = self.span
        streams = span.streams or span.finder.found()
        after = streams.unpack(out)
        before = {name: self.inputs[name] for name in after}
        self.inputs = None
        rows = len(self.keys) * self.keys[0].shape[0]
        for name, tensor in after.items():
            if tensor.shape != before[name].shape or tensor.dtype != before[name].dtype:
                raise NoStreams(f"its blocks change the shape of {name}")
            if tensor.shape[span.batch_dim(tensor)] != rows:
                raise NoStreams(f"{name} {list(tensor.shape)} does not have the latent's batch of {rows}")
        span.streams, span.remembered = streams, True
        if self.watched:
            # Copied from the blocks' arguments, and only read from here on.
            self.run.measure(self.keys, _image(span, before), owned=True)
        changed = False
        for name, tensor in after.items():
            dim = span.batch_dim(tensor)
            residual = (tensor - before[name]).movedim(dim, 0)
            kept = self.run.exchange(self.keys, residual, span.part(name), owned=True)
            if kept is not residual:
                after[name] = before[name] + kept.movedim(0, dim)
                changed = True
        return streams.pack(after) if changed else out


class _Skipping:
    """One call on its way past a span."""

    def __init__(self, span: Span, run: DeepCacheRun, keys: Sequence[BranchKey]):
        self.span, self.run, self.keys = span, run, keys
        self.watched = False
        self.inputs: dict[str, torch.Tensor] | None = None
        self.passed: Any = None
        self.done = False

    def call(self, block: torch.nn.Module, inner: Forward, args: tuple, kwargs: dict) -> Any:
        """What happens to the streams between the skipped blocks (residuals of a ControlNet, of other
        blocks) is in the remembered residual already, so the last block adds to the first one's input."""
        span = self.span
        if block is span.first:
            given = arguments(block, args, kwargs)
            self.inputs = {name: given[name] for name in span.streams.tensors}
            if self.watched:
                self.run.measure(self.keys, _image(span, self.inputs))
            if block is not span.last:
                # What follows may work in place.
                self.passed = span.streams.pack({name: tensor.clone() for name, tensor in self.inputs.items()})
        if self.inputs is None:
            raise RuntimeError(f"the first skipped block of {span.found.path} was not called")
        if block is not span.last:
            return self.passed
        self.done = True
        return span.streams.pack({name: tensor + self._residual(name, tensor) for name, tensor in self.inputs.items()})

    def _residual(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        residual = self.run.gather(self.keys, part=self.span.part(name)).movedim(0, self.span.batch_dim(tensor))
        if residual.shape != tensor.shape:
            raise RuntimeError(f"{name} of {self.span.found.path} has another shape than when it was remembered")
        return residual


def _require(passages: Sequence[_Skipping], inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
    for passage in passages:
        if not passage.done:
            raise RuntimeError(f"the last skipped block of {passage.span.found.path} was not called")
    return inner(*args, **kwargs)


def _image(span: Span, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The stream of the image [chunks * B, ...], the longest one where no name tells."""
    named = [streams[name] for name in _IMAGE if name in streams]
    tensor = named[0] if named else max(streams.values(), key=torch.Tensor.numel)
    return tensor.movedim(span.batch_dim(tensor), 0)

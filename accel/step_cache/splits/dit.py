"""How DeepCache skips a diffusion transformer: a full step stores the effect of its blocks on the token streams as a
residual, and a skipped step adds what is foretold of it.

Residuals of blocks as in Chen et al.: "Δ-DiT" (arXiv 2406.01125); the refresh policy is DeepCache's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...core.events import log
from ...modules.blocks import BlockList, trunk_of
from ...modules.substitution import Forward, Layer
from ..features import BranchKey, Features, OutdatedFeature
from .token_streams import NoStreams, StreamFinder, Streams, arguments, possible_streams

_CONTROLS = {
    "double_blocks": "input",
    "single_blocks": "output",
    "joint_blocks": "output",
    "transformer_blocks": "input",
}
"""Block list → the list of `control` whose residuals are added behind its blocks, one by one.

The residuals of other models stay: adding them costs little, and what is added between skipped blocks has no effect.
"""


@dataclass(eq=False)
class Span:
    """The blocks of one list, which a skipped step leaves out.

    streams: the token streams of its blocks; None until the run was given a residual of each. is_excluded: whether its
    blocks run on every step. was_placed: whether a full call was made.
    """

    found: BlockList
    finder: StreamFinder = field(default_factory=StreamFinder)
    streams: Streams | None = None
    is_excluded: bool = False
    was_placed: bool = False

    def __post_init__(self) -> None:
        self.blocks = self.found.blocks
        self.first, self.last = self.blocks[0], self.blocks[-1]

    def part(self, name: str) -> tuple[str, str]:
        return self.found.path, name

    def batch_dim(self, tensor: torch.Tensor) -> int:
        """Cosmos says in `x_format` that its batch comes fourth."""
        return max(getattr(self.first, "x_format", "B").find("B"), 0) if tensor.ndim > 3 else 0


class DiTSplit:
    """A transformer: what its blocks add to the tokens, which carry the latent around them, is stored and foretold.

    For one run: it keeps what the run's full calls show of the blocks. The run stores one tensor of the tokens' size
    for each list and token stream; Flux at 1024² in half precision 53 MiB an image.
    """

    sees_noise = True
    takes_control = True
    """Models add the last residual of a list behind its last block, where it is not part of what is stored."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.spans = [Span(found) for found in trunk_of(model) if found.blocks]
        self._calls: Sequence[_SkippedCall] = ()
        """Spans of the newest skipped call."""
        self._measure_share()

    @property
    def is_stable(self) -> bool:
        """Whether the token streams of all spans are known."""
        return all(span.is_excluded or span.streams for span in self.spans)

    @property
    def parts(self) -> tuple[Hashable, ...]:
        return tuple(span.part(name) for span in self.spans if span.streams for name in span.streams.tensors)

    @property
    def layout(self) -> Hashable:
        return "transformer", tuple(span.found.path for span in self.spans if not span.is_excluded)

    def full_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        self._calls = ()
        layers: dict[torch.nn.Module, Layer] = {}
        for span in self.spans:
            if span.was_placed and span.streams is None and not span.is_excluded and not span.finder.saw_any:
                self.exclude(span, features, "the model calls none of its blocks by their forward")
            span.was_placed = True
        spans = [span for span in self.spans if not span.is_excluded]
        for span in spans:
            full = _FullCall(self, span, features, keys)
            blocks = {span.first, span.last} if span.streams else span.blocks
            layers.update({block: partial(full, block) for block in blocks})
        return layers

    def skip_layers(self, features: Features, keys: Sequence[BranchKey]) -> dict[torch.nn.Module, Layer]:
        """As `UNetSplit.skip_layers`. They raise RuntimeError for a patch in the place of the first skipped block, and
        OutdatedFeature for another shape than that of the last full call, as where reference tokens are left out from
        the second step on."""
        self._calls = [_SkippedCall(span, features, keys) for span in self.spans if span.streams]
        return {block: partial(call, block) for call in self._calls for block in call.span.blocks}

    def check_done(self) -> None:
        """As `UNetSplit.check_done`: a patch may stand in the place of the last block."""
        calls, self._calls = self._calls, ()
        for call in calls:
            if call.inputs is not None and not call.is_done:
                raise RuntimeError(f"the last skipped block of {call.span.found.path} was not called")

    def withhold(self, control: Mapping[str, list] | None) -> dict[str, list] | None:
        """A copy of `control` without the ControlNet residuals that the stored ones already contain: those added
        behind a skipped block, except the last of a list."""
        if control is None:
            return None
        kept = {name: list(values) if isinstance(values, list) else values for name, values in control.items()}
        for span in self.spans:
            residuals = kept.get(_CONTROLS.get(span.found.path))
            if span.streams and residuals is not None:
                for index in range(min(len(span.blocks) - 1, len(residuals))):
                    residuals[index] = None
        return kept

    def _measure_share(self) -> None:
        kept = sum(span.found.weight for span in self.spans if span.is_excluded)
        self.shallow_share = kept / max(sum(span.found.weight for span in self.spans), 1)

    def exclude(self, span: Span, features: Features, reason: str) -> None:
        """Run the blocks of `span` on every step from now on."""
        span.is_excluded, span.streams = True, None
        self._measure_share()
        message = f"cannot skip {span.found.path} of {type(self.model).__name__}: {reason}"
        if all(other.is_excluded for other in self.spans):
            features.run.run_in_full(message)
        else:
            log.warning("DeepCache: %s.", message)


def has_dit_layout(model: Any) -> bool:
    """Whether `DiTSplit` fits the model: lists of blocks in order, at least three blocks."""
    return isinstance(model, torch.nn.Module) and sum(len(found.blocks) for found in trunk_of(model)) >= 3


class _FullCall:
    """One full call on its way through a span."""

    def __init__(self, split: DiTSplit, span: Span, features: Features, keys: Sequence[BranchKey]):
        self.split, self.span, self.features, self.keys = split, span, features, keys
        self.is_learning = span.streams is None
        self.inputs: dict[str, torch.Tensor] | None = None
        """Copies of the first block's token streams: any block of the span may write to its arguments."""
        self.written: dict[str, dict[int, dict | list]] = {}
        """By name, the dicts and lists that blocks were given and changed."""
        span.finder.forget_tensors()

    def __call__(self, block: torch.nn.Module, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        span = self.span
        if span.is_excluded:
            return inner(*args, **kwargs)
        given: dict[str, torch.Tensor] = {}
        held: list[tuple[str, dict | list, list]] = []
        try:
            if self.is_learning or block is span.first:
                named = arguments(block, args, kwargs)
                given = possible_streams(named)
                if self.is_learning:
                    held = [(n, value, _items(value)) for n, value in named.items() if type(value) in (dict, list)]
                self._before(block, given)
        except Exception as reason:
            self._not_stored(reason)
        out = inner(*args, **kwargs)
        try:
            if span.is_excluded:
                return out
            if self.is_learning:
                self._note_written(held)
                span.finder.see_return(given, out)
                if block is span.last:
                    span.finder.forget_tensors()
            return self._store(out) if block is span.last and self.inputs is not None else out
        except Exception as reason:
            self._not_stored(reason)
            return out

    def _before(self, block: torch.nn.Module, given: dict[str, torch.Tensor]) -> None:
        span = self.span
        if self.is_learning:
            span.finder.see_call(given)
        if block is span.first:
            names = given if span.streams is None else span.streams.tensors
            if not given.keys() >= set(names):
                raise NoStreams("it is called otherwise than before")
            self.inputs = {name: given[name].clone() for name in names}

    def _note_written(self, held: list[tuple[str, dict | list, list]]) -> None:
        """Raises NoStreams where each block has something of its own that it writes to, as the keys and values of the
        frames before: what skipped blocks do not write, later calls would lack."""
        for name, value, before in held:
            now = _items(value)
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                written = self.written.setdefault(name, {})
                written[id(value)] = value
                if len(written) > 1:
                    raise NoStreams(f"its blocks keep something from call to call ({name})")

    def _not_stored(self, reason: Exception) -> None:
        """Exclude the span for good, unless an earlier call was understood. Anything but NoStreams, as lack of memory,
        ends skipping."""
        self.inputs = None
        if not isinstance(reason, NoStreams):
            self.features.cannot_keep(reason)
        elif self.is_learning:
            self.split.exclude(self.span, self.features, str(reason))
        else:
            log.debug("DeepCache: a call of %s is not remembered: %s", self.span.found.path, reason)

    def _store(self, out: Any) -> Any:
        """Hand the run the span's residuals; return what the model goes on with."""
        span = self.span
        streams = span.streams or span.finder.found()
        after = streams.unpack(out)
        before = {name: self.inputs[name] for name in after}
        self.inputs = None
        rows = len(self.keys) * self.keys[0].shape[0]
        for name, tensor in after.items():
            if tensor.shape != before[name].shape or tensor.dtype != before[name].dtype:
                raise NoStreams(f"its blocks change the shape of {name}")
            # MiniMax H3's tokens [S, C] are of one image and have no batch.
            if tensor.shape[span.batch_dim(tensor)] != rows and (rows, tensor.ndim) != (1, 2):
                raise NoStreams(f"{name} {list(tensor.shape)} does not have the latent's batch of {rows}")
        span.streams = streams
        # `before` and the residuals are tensors of ours that nobody writes to, so the run takes them as they are.
        is_replaced = False
        for name, tensor in after.items():
            dim = span.batch_dim(tensor)
            residual = (tensor - before[name]).movedim(dim, 0)
            kept = self.features.exchange(self.keys, residual, span.part(name), owned=True)
            if kept is residual:
                continue
            value = before[name] + kept.movedim(0, dim)
            if name in streams.in_place:
                tensor.copy_(value)
            else:
                after[name], is_replaced = value, True
        return streams.pack(after) if is_replaced else out


class _SkippedCall:
    """One skipped call on its way past a span."""

    def __init__(self, span: Span, features: Features, keys: Sequence[BranchKey]):
        self.span, self.features, self.keys = span, features, keys
        self.inputs: dict[str, torch.Tensor] | None = None
        """Copies of the first block's, which the model may write to or drop before the last one."""
        self.passed: dict[str, torch.Tensor] = {}
        self.is_done = False
        """Whether the last block was ever called: a call that is captured is made several times."""

    def __call__(self, block: torch.nn.Module, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """The first block's input, from every block but the last; from the last the input plus the residual.

        What is added between skipped blocks (residuals of a ControlNet, or of other blocks) is in the stored residual
        already, so it must not count here. Tensors that the blocks write to and hand back are handed back here too.
        """
        span, streams = self.span, self.span.streams
        given: dict[str, torch.Tensor] = {}
        if block is span.first or streams.in_place:
            known = arguments(block, args, kwargs)
            given = {name: known[name] for name in streams.tensors}
        if block is span.first:
            self.inputs = {name: tensor.clone() for name, tensor in given.items()}
            if block is not span.last:
                self.passed = {name: tensor.clone() for name, tensor in given.items() if name not in streams.in_place}
        if self.inputs is None:
            raise RuntimeError(f"the first skipped block of {span.found.path} was not called")
        if block is not span.last:
            return streams.pack({**given, **self.passed})
        self.is_done = True
        out = {name: tensor + self._residual(name, tensor) for name, tensor in self.inputs.items()}
        for name in streams.in_place:
            if given[name].shape != out[name].shape:
                raise RuntimeError(f"{name} of {span.found.path} changed its shape between the skipped blocks")
            out[name] = given[name].copy_(out[name])
        self.inputs = None
        return streams.pack(out)

    def _residual(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        residual = self.features.gather(self.keys, part=self.span.part(name)).movedim(0, self.span.batch_dim(tensor))
        if residual.shape != tensor.shape:
            raise OutdatedFeature(f"{name} of {self.span.found.path} has another shape than when it was remembered")
        return residual


def _items(value: dict | list) -> list:
    return [*value, *value.values()] if type(value) is dict else list(value)

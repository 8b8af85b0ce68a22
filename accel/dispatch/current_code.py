"""Which survey of a model holds where its blocks are called: other programs replace code for the length of a call.

A node wraps the model's forward, puts a function of its own in place of another, and takes it back after the call. What
was surveyed before then says nothing of what runs. So code is compared, by identity, before the first block of each
pass over the model; where it differs, the model is surveyed as it is there, and its blocks have graphs of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core import torch_internals
from ..core.errors import pass_on
from ..core.events import log
from ..core.reasons import Reason, RunEagerly
from ..fingerprint.survey import Region, Survey
from ..modules.substitution import Layer, has_foreign_forward
from ..modules.wrapped_forward import is_replaced

MOST_SURVEYS = 16
"""Surveys kept for one model in one run. Code that changes more often than that runs eagerly."""


@dataclass(frozen=True, eq=False)
class _Known:
    """A survey, and what runs the blocks under it: runners of their own, or why there is none."""

    survey: Survey
    blocks: Mapping[torch.nn.Module, Layer | Reason]


class CurrentCode:
    """Picks the runner of each block by the version of the code that is installed right now.

    A layer (see `substitution`) around the model's forward, to be told of its calls.

    first: the survey that the run began with. look: surveys the model as it is now. make: what runs a block of another
        survey; raises RunEagerly. interrupts: exceptions that mean "stop the run" to the host, and are never swallowed.
    between: whether others' code runs between the blocks in a call with these (args, kwargs), as patches do.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        first: Survey,
        look: Callable[[], Survey],
        make: Callable[[Region, Survey], Layer],
        interrupts: tuple[type[BaseException], ...] = (),
        between: Callable[[tuple, dict[str, Any]], bool] = lambda args, kwargs: False,
    ):
        self._model, self._patched_between = model, between
        self._look, self._make, self._interrupts = look, make, interrupts
        self._first = _Known(first, {})
        self._known = [self._first]
        self._now: _Known | None = self._first
        self._placed: list[tuple[Region, Any]] = []
        around, blocks = first.around, {region.block for region in first.regions}
        self._around = [part.__dict__ for part in around]
        self._classes = {type(part) for part in (model, *around)}
        parts = (model, *around, *blocks)
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._modes = torch_internals.FUNCTION_MODES.get(list)
        self._device_mode = torch_internals.DEVICE_MODE.get(None)
        self._begins, self._between, self._holds = True, False, False
        self.passing: object = None
        """Another object in each pass over the model."""
        self.is_due = True
        """Whether code is compared before the next block, whichever it is."""

    def place(self, region: Region, runner: Any) -> None:
        """The runner (`BlockRunner`) stands in for the block throughout the run."""
        runner.code = self
        self._placed.append((region, runner))

    def __call__(self, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # blocks let the call pass by
            return inner(*args, **kwargs)
        self._begins = self.is_due = True
        self._holds = False
        self._between = self._patched_between(args, kwargs) or self._others_run_between()
        out = inner(*args, **kwargs)
        if self._holds and self._now is not None:
            self._now.survey.passes.has_held = True
        return out

    def needs_comparison(self, block: torch.nn.Module, again: bool) -> bool:
        """Whether to `compare` before the block's call: always where code may be replaced between blocks; else where
        the model's own code has changed what was read for this one. again: as for `compare`."""
        if self.is_due or again:
            return True
        changed = None if self._now is None else self._now.survey.changed_by_model.get(block)
        return changed is not None and not changed.is_current()

    def compare(self, block: torch.nn.Module, again: bool) -> None:
        """Have the blocks run what is right for the code as it stands, before a block's call. again: the block was
        called in this pass already, so that another one begins."""
        begins, now = self._begins or again, self._now
        if begins:  # the first survey comes first: one that ended at what it could not read holds everywhere
            holds = now is self._first and now.survey.stands
        else:
            holds = self.is_due and now is not None and now.survey.stands_for(block)
        if any(type(mode) is not self._device_mode for mode in self._modes()):  # a default device changes no graph
            self._put(None, Reason("code_changes"))
        elif not holds:
            if not begins and now is not None:  # what changes in mid-pass once may do so again
                now.survey.passes.has_changed = True
            self._put(self._find_known(), Reason("code_changes"))
        if begins or not holds:
            passes = None if self._now is None else self._now.survey.passes
            self._between |= passes is not None and passes.has_changed
            self.is_due = self._between or not holds or passes is None or not passes.has_held
        self._holds = begins or (holds and self._holds)
        if begins:
            self.passing, self._begins = object(), False

    def kind_unchanged(self, survey: Survey, region: Region) -> bool:
        """Whether a block that runs now is of the kind that its region in the survey says."""
        if region.given is not None and not region.given.snapshot.is_current():
            return False
        if survey.stands:
            return True
        now = self._survey_model()
        return now is not None and any(found.path == region.path and found.kind == region.kind for found in now.regions)

    @property
    def known(self) -> dict[Any, Any] | None:
        """What runs have found of the model's calls; None where the last one was under other code than the first."""
        return self._first.survey.known if self._now is self._first and not self._between else None

    def is_set_as_at_first(self) -> bool:
        """Whether the blocks' own settings and parts are those of the first survey."""
        return self._first.survey.settings.is_current()

    def _others_run_between(self) -> bool:
        """Whether a block's forward is wrapped, or a part around the blocks has hooks, or a forward that is not its
        class's, or that of a class of which another program has replaced it."""
        return (
            any(self._hooks)
            or self._first.survey.is_wrapped
            or any("forward" in attributes for attributes in self._around)
            or has_foreign_forward(self._model)
            or any(map(is_replaced, self._classes))
        )

    def _find_known(self) -> _Known | None:
        """What is known of the code as it stands, surveyed now where nothing is; None where it cannot be."""
        known = next((known for known in self._known if known.survey.stands), None)
        if known is not None or len(self._known) == MOST_SURVEYS:
            return known
        survey = self._survey_model()
        if survey is None:
            return None
        blocks: dict[torch.nn.Module, Layer | Reason] = {}
        reasons, found = dict(survey.left_eager), {region.path: region for region in survey.regions}
        for region, _ in self._placed:
            if region.path in reasons:
                blocks[region.block] = reasons[region.path]
            elif region.path in found:
                try:
                    blocks[region.block] = self._make(found[region.path], survey)
                except RunEagerly as refusal:
                    blocks[region.block] = refusal.reason
        self._known.append(_Known(survey, blocks))
        _tell(type(self._model).__name__)
        return self._known[-1]

    def _put(self, known: _Known | None, otherwise: Reason) -> None:
        """Have the blocks run under this survey. otherwise: why blocks that it has nothing for run eagerly."""
        self._now = known
        if known is not None and known.survey.is_wrapped:
            self._between = True  # the wrappers run there, and `begin` has not seen this survey
        blocks = {} if known is None else known.blocks
        for region, runner in self._placed:
            runner.replacement = None if known is self._first else blocks.get(region.block, otherwise)

    def _survey_model(self) -> Survey | None:
        """The model as it is now; None where it cannot be surveyed, as where code of others raises."""
        try:
            return self._look()
        except Exception as error:
            pass_on(error, self._interrupts)
            log.debug("the model as it is during a call was not analysed: %s: %s", type(error).__name__, error)
            return None


@functools.cache
def _tell(model: str) -> None:
    log.info(
        "Code or settings of %s change during its calls, as some extensions do. Its blocks have separate compiled"
        " graphs for that.",
        model,
    )

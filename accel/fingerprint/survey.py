"""The blocks of a model that are worth compiling, each with its kind, and the others with the reason."""

from __future__ import annotations

import functools
import hashlib
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.errors import one_line
from ..core.reasons import Reason, RunEagerly
from ..modules import wrapped_layers
from ..modules.blocks import blocks
from ..modules.code_owner import package_of
from ..modules.opaque_layers import OpaqueLayer, runs_others_code
from ..modules.snapshot import LayoutSnapshot
from ..modules.streamed_weights import Plain, in_place
from ..modules.substitution import drop_restored_forwards, has_foreign_forward
from ..modules.wrapped_forward import WrappedForward
from ..modules.wrapped_layers import Wraps
from ..signature.tree_spec import Function
from .code_hash import CodeReader
from .code_snapshot import CodeNotes, CodeSnapshot
from .given_functions import GivenCode, GivenFunctions
from .kept_state import packages_of
from .kinds import Kind, Read, WeightSlots, describe, kinds_of, weight_slots
from .plain_values import Indescribable, note_part, settings_of

_SLOT = "_accel_surveys"
"""The attribute of a model that has its `KeptSurveys`."""

_MOST_KEPT = 4
"""Surveys of one model that differ in code or settings: programs that replace these take turns."""

Traceable = Callable[..., AbstractContextManager[None]]
"""Makes a context in which code is read; where its argument is True, in which it is traced or run without values."""


@dataclass(frozen=True)
class Region:
    """One block to compile: its path in the model, the module and its kind.

    strings: every string constant in its code; the dict keys that it may read are among them.
    wraps: recognises the wrappers around its layers, which are not part of its kind.
    plain: shows the block with its weights in place.
    traceable: makes the context that its code is read in.
    notes: where the block's settings were found. read: those that its code reads, as `kinds.template_of` takes them.
    wrapped: where other programs have wrapped its forward.
    codes: of every function that its survey has read.
    known: itself by the functions that it is given. shared: what runs have found of calls of the survey's blocks, for
        the next ones (`inline_cache.KnownCalls`).
    functions: reads those that are given to blocks of the survey. given: what the kind has of such, if any.
    """

    path: str
    block: torch.nn.Module
    kind: Kind
    strings: frozenset[str] = frozenset()
    wraps: Wraps | None = None
    plain: Plain = in_place
    traceable: Traceable = nullcontext
    notes: CodeNotes = field(default_factory=CodeNotes, compare=False, repr=False)
    codes: frozenset[types.CodeType] = field(default=frozenset(), compare=False, repr=False)
    read: Read | None = field(default=None, compare=False, repr=False)
    wrapped: WrappedForward | None = field(default=None, compare=False, repr=False)
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    shared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    functions: GivenFunctions | None = field(default=None, compare=False, repr=False)
    given: GivenCode | None = field(default=None, compare=False, repr=False)

    def of_calls_with(self, functions: tuple[Function, ...]) -> Region:
        """The region of the block where it is given these functions. Raises Indescribable."""
        known = self.known.get(functions)
        if known is None and not {package_of(function.module) for function in functions} <= packages_of(self.block):
            raise Indescribable("a function of another program")
        given = self.functions.read(functions)
        if known is None or known.given is not given:
            code, read = given.hash, dict(self.read or ())
            for path, part in wrapped_layers.modules(self.block, self.wraps):  # which it may be called with
                names = {name for name, _ in settings_of(part)}.difference(read.get(path, ()), ("training",))
                if any(map(code.may_read, names)):
                    raise Indescribable("a function that may read more of the block than its own code does")
            kind = replace(
                self.kind,
                digest=hashlib.sha256(f"{self.kind.digest} {code.digest}".encode()).hexdigest()[:32],
                sources=self.kind.sources | code.sources,
                opaque=self.kind.opaque | code.opaque,
            )
            strings, codes = self.strings | code.strings, self.codes | given.codes
            known = replace(self, kind=kind, strings=strings, codes=codes, known={}, given=given)
            self.known[functions] = known
        return known

    @property
    def tracing(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context that the block is traced in, where its code calls functions that can be traced."""
        return functools.partial(self.traceable, True)

    @functools.cached_property
    def parts(self) -> tuple[torch.nn.Module, ...]:
        """The modules in the block."""
        return tuple(self.block.modules())

    @functools.cached_property
    def states(self) -> tuple[dict[str, Any], ...]:
        """Their attributes."""
        return tuple(map(vars, self.parts))

    @functools.cached_property
    def calls_layers(self) -> bool:
        """Whether graphs of the block call layers in it as they are (`opaque_layers`)."""
        return any(isinstance(part, OpaqueLayer) for _, part in wrapped_layers.modules(self.block, self.wraps))

    @property
    def runs_others_code(self) -> bool:
        """Whether others' code runs in its graphs now, which must not run twice to be compared."""
        parts = wrapped_layers.modules(self.block, self.wraps)
        return any(
            part.is_others or runs_others_code(self.block.get_submodule(path))
            for path, part in parts
            if isinstance(part, OpaqueLayer)
        )

    @functools.cached_property
    def slots(self) -> WeightSlots:
        """Where the block's weights are."""
        return weight_slots(self.block, self.kind.weights, self.wraps, self.kind.forms)


@dataclass(frozen=True)
class Survey:
    """A model's blocks: those to compile, and the paths of those left eager with the reason.

    code, settings: what was read for it, of the program and of the blocks, to be compared with what stands where the
        blocks are called.
    around: the modules in the model outside of the blocks to compile.
    known: what runs have found of the model's calls, for the next ones.
    layout, eager: what else it rests on, to be compared at the start of another run; eager: what may have kept blocks
        from being compiled. That is not compared during a run, in which such a block may change itself. None where
        another program's code has failed, nobody knows why.
    """

    regions: tuple[Region, ...]
    left_eager: tuple[tuple[str, Reason], ...]
    code: CodeSnapshot
    settings: CodeSnapshot
    around: tuple[torch.nn.Module, ...]
    layout: LayoutSnapshot
    eager: CodeSnapshot | None
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(region.kind for region in self.regions))

    @functools.cached_property
    def is_wrapped(self) -> bool:
        """Whether other programs have wrapped the forward of a block."""
        return any(region.wrapped is not None for region in self.regions)

    @property
    def stands(self) -> bool:
        """Whether code and settings are those that it has read."""
        return self.code.is_current() and self.settings.is_current()


class KeptSurveys:
    """The surveys of one model from one run to the next.

    One is used again while all that it rests on stands. That is: the functions, classes, globals and hooks for all
    modules that were read (`Survey.code`); the settings, parts, forwards and hooks of its blocks (`Survey.settings`);
    which modules the model is made of, and how its blocks' weights are stored, in place or streamed (`Survey.layout`);
    of blocks that were left eager, all their settings and which their weights are (`Survey.eager`, `Survey.layout`).
    Values and devices of weights, and so LoRA that is added to them, are no part of a kind.

    They are kept on the model, or by a host where it has something there; they do not follow a copy of it. Nothing here
    refers to the model itself, which goes when nobody needs it.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, Survey], ...] = ()

    def __reduce_ex__(self, protocol: int) -> tuple:
        return type(None), ()

    @classmethod
    def on(cls, model: torch.nn.Module) -> KeptSurveys:
        """The model's kept surveys; creates the store on first use."""
        found = model.__dict__.get(_SLOT)
        if not isinstance(found, cls):
            found = model.__dict__[_SLOT] = cls()
        return found

    def find(self, model: torch.nn.Module, asked: Any, look: Callable[[], Survey]) -> Survey:
        """The survey of the model as it is now, made by `look` where none is kept.

        asked: what it is made with.
        """
        if self._kept:
            _, newest = self._kept[0]
            drop_restored_forwards((model, *newest.layout.parts))
        there = [(of, kept) for of, kept in self._kept if kept.layout.is_current(model)]
        for of, kept in there:
            if of == asked and kept.stands and kept.eager.is_current():
                return kept
        made = look()
        if made.eager is not None:
            there.insert(0, (asked, made))
        self._kept = tuple(there[:_MOST_KEPT])
        return made


def survey(
    model: torch.nn.Module,
    min_repetitions: int = 1,
    ignored: frozenset[tuple[str, str]] = frozenset(),
    wraps: Wraps | None = None,
    plain: Plain = in_place,
    traceable: Traceable = nullcontext,
) -> Survey:
    """The model's blocks and their kinds.

    min_repetitions: kinds with fewer blocks stay eager, since compiling costs more than it gains.
    ignored: as for `CodeReader`.
    wraps: recognises the wrappers around layers; the result is the same with and without them.
    plain: shows blocks with their weights in place; the result is the same wherever they are.
    traceable: as for `Region`; blocks' code is read in it.
    """
    drop_restored_forwards(model.modules())
    described, left_eager = [], []
    eager, noted_of_eager, is_failed = [], CodeNotes(), False
    reader = CodeReader(ignored)
    found = list(blocks(model, wraps))
    shown = []
    everywhere = torch.nn.modules.module
    hooks = everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks
    for path, block in found:
        shown.append(block)
        noted, wrapped = CodeNotes(), WrappedForward.of(block)
        try:
            if any(hooks):
                raise RunEagerly(Reason("hooks_everywhere"))
            if wrapped is None and has_foreign_forward(block):
                raise RunEagerly(Reason("forward_replaced"))
            shown[-1] = plain(block)
            with traceable():
                description = describe(shown[-1], reader, wraps, wrapped, noted)
            described.append((path, block, shown[-1], wrapped, description))
            continue
        except RunEagerly as refusal:
            left_eager.append((path, refusal.reason))
        except Indescribable as why:
            left_eager.append((path, Reason("indescribable", what=str(why))))
        except Exception as error:  # of an extension's class, of any type
            left_eager.append((path, Reason("indescribable", what=one_line(error))))
            is_failed = True
        eager.append(block)
        noted_of_eager.add(_notes_of(block, shown[-1], noted, wraps))
    kinds = kinds_of([description for *_, description in described], shown, wraps)
    for of_all in hooks:
        reader.notes.watch_items(of_all)
    codes, notes = reader.codes, CodeNotes()
    regions, functions, shared = [], GivenFunctions(ignored, traceable), {}
    for (path, block, described_as, wrapped, description), kind in zip(described, kinds, strict=True):
        own = _notes_of(block, described_as, description.notes, wraps, description.read)
        regions.append(
            Region(
                path,
                block,
                kind,
                strings=description.code.strings,
                wraps=wraps,
                plain=plain,
                traceable=traceable,
                notes=own,
                codes=codes,
                read=description.read,
                wrapped=wrapped,
                shared=shared,
                functions=functions,
            )
        )
        notes.add(own)
    counts = Counter(region.kind for region in regions)
    kept = []
    for region in regions:
        if counts[region.kind] >= min_repetitions:
            kept.append(region)
        else:
            left_eager.append((region.path, Reason("too_few_blocks", least=min_repetitions)))
    layout = LayoutSnapshot(model, [(block, as_shown) for _, block, as_shown, *_ in described], eager)
    inside = {model}.union(*(region.parts for region in kept))
    around = tuple(part for part in model.modules() if part not in inside)
    of_eager = None if is_failed else noted_of_eager.snapshot()
    return Survey(tuple(kept), tuple(left_eager), reader.snapshot(), notes.snapshot(), around, layout, of_eager)


def _notes_of(
    block: torch.nn.Module, shown: torch.nn.Module, noted: CodeNotes, wraps: Wraps | None, read: Read | None = None
) -> CodeNotes:
    """Where the settings and the parts of the block are.

    shown: the block as it was described. Where that is a copy, a host keeps account of the weights on the parts.
    noted: while it was. read: the settings that its code reads; None for all that it has but tensors.
    """
    notes = CodeNotes()
    notes.add(noted)
    parts = dict(wrapped_layers.modules(block, wraps))
    if read is None:
        settings = ((path, settings_of(part)) for path, part in wrapped_layers.modules(shown, wraps))
        read = [(path, [name for name, value in of if not isinstance(value, torch.Tensor)]) for path, of in settings]
    for path, names in read:
        part = parts[path]
        for name in names:
            if name in part.__dict__ and name != "training":  # set for a whole model, and before its calls
                notes.watch(part.__dict__, name)
        note_part(part, notes, shown=shown is block, outermost=not path)
    for part, _ in wrapped_layers.wrapped(block, wraps):  # which is called as it is for as long as these are there
        notes.watch_absent(part.__dict__, "forward")
        notes.watch_len(part._forward_hooks)
        notes.watch_len(part._forward_pre_hooks)
    return notes

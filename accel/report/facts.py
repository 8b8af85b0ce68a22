"""What there is to say of a run, once: the report, the nodes' lines and the log show these facts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core.reasons import Reason
from ..core.sentences import EXPECTED, LOADED_IN_PART, OF_CUDA_GRAPHS, OF_OTHERS, count_nouns
from ..step_cache.run import FULL, SKIPPED
from .account import LEAST_SAVED, Account, format_seconds
from .run import Run, Skipping

FEW_STEPS = 12
"""Sampler steps below which neighbouring ones differ too much for DeepCache's defaults to skip many."""

_MOST_REASONS = 8
_MOST_BLOCKS = 3
_LONGEST_TIMELINE = 100


class Fact(NamedTuple):
    """Something to say: a sentence, then indented lines of details. line: the same for a node, in parts of a few words.
    why: what kept the run from gaining more, which a host may have advice on."""

    sentence: str
    line: Sequence[Reason] = ()
    why: Reason | str | None = None


def facts_of(run: Run, node: str | None = None) -> list[Fact]:
    """The facts of a run, what it made and gained first. node: only of what this node did in it."""
    both = run.compiling, run.caching
    compiles, skips = (bool(settings) and node in (None, settings.get("node")) for settings in both)
    account = run.account(node)
    facts = [_make_image_fact(run), _make_gain_fact(run, account)]
    if run.loaded_share is not None and run.loaded_share < 0.98:
        rest = "the rest is copied at every step, which takes longer than compiling saves."
        said = f"Only {run.loaded_share:.0%} of the model fits into the GPU's memory: {rest}"
        facts.append(Fact(said, why=LOADED_IN_PART))
    if compiles:
        facts.append(_make_compile_fact(run, account))
    if skips and (run.skipping.steps_taken or run.skipping.why_full is not None):
        facts.append(make_skip_fact(run.skipping, run.samplings))
    return [*facts, *_make_uncompiled_facts(run)]


def line_of(run: Run, node: str) -> list[Reason]:
    """The line, in parts, of a node that took part in a run that is over: first its quality, if any, and the size of
    the images. Empty for a run that an error ended."""
    facts, settings, size = facts_of(run, node), run.compiling or {}, size_of(run)
    said = [part for fact in (facts[:1] if run.failed else facts[1:]) for part in fact.line]
    quality = settings.get("quality") if settings.get("node") == node else None
    named = Reason("line_image", quality=quality, size=size) if quality else Reason("line_size", size=size)
    return [*([named] if run.pixels else []), *said] if said else []


def size_of(run: Run) -> str:
    """The size of a run's images, such as "768×512 ×2" for a batch of two; that of its latent where they have none."""
    sides = run.pixels or run.latent[2:] or run.latent
    batch = f" ×{run.latent[0]}" if len(run.latent) > 2 and run.latent[0] > 1 else ""
    return f"{'' if run.pixels else 'latent '}{'×'.join(map(str, sides)) or 'unknown'}{batch}"


def _make_image_fact(run: Run) -> Fact:
    contexts, end, line = run.totals.contexts, "", []
    steps = "" if run.steps is None else f", {count_nouns(run.steps, 'step')}"
    sampler = f" of {run.sampler}" if run.sampler and steps else ""
    tokens = f", prompt of {' and '.join(map(str, contexts))} tokens" if contexts else ""
    samplers = f" in {run.samplings} samplers" if run.samplings > 1 else ""
    if run.failed and run.steps_done is not None:
        end = f", until it was stopped after {count_nouns(run.steps_done, 'step')}"
        line = [] if run.steps is None else [Reason("line_stopped", done=run.steps_done, steps=run.steps)]
    elif run.failed:
        end = ", until it failed or was stopped"
    what = f"{run.model}, {size_of(run)}{tokens}{steps}{sampler}{samplers}"
    return Fact(f"Last image: {what}: {format_seconds(run.seconds)} s{end}.", line)


def _make_gain_fact(run: Run, account: Account) -> Fact:
    how = " ".join(map(str, account.how))
    if account.saved is None:
        return Fact(f"Gain: not known. {how}")
    said = f"Gain: {', '.join(map(str, (*account.gain(), *account.describe_later_images())))}."
    if account.paid >= LEAST_SAVED:
        what = ", ".join(str(Reason(code, seconds=format_seconds(took))) for code, took in run.paid.items() if took)
        said += f"\n  {format_seconds(account.paid)} s of this image are paid once, and counted: {what}."
    return Fact(f"{said}\n  How this is known: {how}", account.gain())


def _make_compile_fact(run: Run, account: Account) -> Fact:
    totals, word = run.totals, "traced" if run.is_traced else "compiled"
    calls = totals.compiled_calls + totals.eager_calls
    share = f" ({totals.compiled_calls / calls:.0%})" if calls else ""
    ran = "traced but uncompiled (backend eager)" if run.is_traced else "compiled"
    lines = [f"Compiling: {totals.compiled_calls} of {calls} block calls{share} ran {ran}."]
    if run.blocks:
        lines.append(f"{count_nouns(run.blocks, 'block')} of {count_nouns(run.kinds, 'type')} can be {word}.")
    if totals.model_calls:
        lines.append(f"{totals.replays} of {count_nouns(totals.model_calls, 'model call')} replayed a CUDA graph.")
    why = Reason("line_traced") if run.is_traced and totals.compiled_calls else None
    line = _describe_paid_time(run, account)
    # What ran uncompiled beside compiled blocks; first, where something is wrong with it.
    left = sorted(run.why_uncompiled(), key=lambda why: why.code in EXPECTED)
    if totals.compiled_calls and totals.eager_calls and left:
        line.append(Reason("line_partly", share=f"{max(totals.eager_calls / calls, 0.01):.0%}", why=left[0]))
    return Fact("\n  ".join(lines), line, why)


def _describe_paid_time(run: Run, account: Account) -> list[Reason]:
    """What this image paid for, by name where that is more than a tenth of it all, and what follows."""
    if not run.totals.compiled_calls and not run.totals.replays:
        return [Reason("line_not_compiled", why=[*run.why_uncompiled(), Reason("compiling_unused")][0])]
    if run.is_traced:
        return [Reason("line_traced")]
    after, how = account.pays_back_after, account.how[0]
    named = {code: took for code, took in run.paid.items() if took > account.paid / 10 and account.matters(took)}
    parts = [Reason(code, seconds=format_seconds(took)) for code, took in named.items()]
    if account.saved is None:
        return [*parts, Reason("line_unmeasured") if run.compilations and how.code != "compiling_unmeasured" else how]
    parts += account.describe_later_images()
    if after and after < 50:  # nobody counts on more
        parts.append(Reason("line_paid_back", images=after))
    return parts


def make_skip_fact(skipping: Skipping, samplings: int = 1) -> Fact:
    """What DeepCache did in so many samplings."""
    letters, number = skipping.steps_taken, len(skipping.steps_taken)
    if not skipping.skipped_steps:
        is_short = number / samplings < FEW_STEPS
        why = skipping.why_full or (Reason("few_steps") if is_short else Reason("steps_differ"))
        what = f"none of {count_nouns(number, 'step')}" if number else "no step"
        return Fact(f"DeepCache skipped {what}: {why}.", [Reason("line_none_skipped", why=why)], why)
    skipped = f"DeepCache skipped {skipping.skipped_steps} of {count_nouns(number, 'step')}"
    if skipping.target_db is None:
        line = Reason("line_skipped", skipped=skipping.skipped_steps, steps=number)
    else:
        share = f"{skipping.skipped_work or 0:.0%}"
        line = Reason("line_quality", asked=f"{skipping.target_db:g}", share=share)
        skipped += f", {share} of the work, as planned for {skipping.target_db:g} dB"
    shown = letters if number <= _LONGEST_TIMELINE else f"{letters[:_LONGEST_TIMELINE]}..."
    return Fact(f"{skipped}.\n  {shown}   ({FULL} full, {SKIPPED} skipped)", [line])


def _make_uncompiled_facts(run: Run) -> list[Fact]:
    """A fact for each reason, the most frequent first."""
    facts = []
    for why, calls in run.reasons().items():
        names = ", ".join(list(calls)[:_MOST_BLOCKS]) + (" and others" if len(calls) > _MOST_BLOCKS else "")
        how = "" if why.code in OF_CUDA_GRAPHS else " ran without Accel" if why.code in OF_OTHERS else " ran uncompiled"
        facts.append(Fact(f"{count_nouns(calls.total(), 'call')} of {names}{how}: {str(why).rstrip('.')}.", why=why))
    more = len(facts) - _MOST_REASONS
    return facts if more <= 0 else [*facts[:_MOST_REASONS], Fact(f"There are {count_nouns(more, 'more reason')}.")]


def cache_fact(cache: Mapping[str, Any], store: Mapping[str, Any] | None) -> Fact:
    """How full the cache is, and what it did since the start. cache, store: what `statistics` gives."""
    memory = f"{megabytes(cache['bytes'])} of {megabytes(cache['max_bytes'])}"
    totals = f"{cache['compilations']} compiled in {format_seconds(cache['seconds'])} s, {cache['loaded']} loaded"
    lines = [
        f"Graph cache: {count_nouns(cache['graphs'], 'graph')}, {memory}.",
        f"Since the start: {totals}, used {count_nouns(cache['hits'], 'time')}, {cache['evictions']} dropped.",
    ]
    if store is not None:
        lines.append(f"On disk: {store['loaded']} loaded and {store['saved']} saved by this process.")
    return Fact("\n  ".join(lines))


def megabytes(value: int) -> str:
    """A number of bytes in MB."""
    return f"{value / (1 << 20):.1f} MB" if value < 10 << 20 else f"{value / (1 << 20):.0f} MB"

"""What `bench gpu` was to show, read off its rows: each goal reached, missed or not measured. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .gpu_cases import CAPTURED, CONTENDERS, CORE, EAGER, PARTS
from .report import Row

REACHED, MISSED, NOT_MEASURED = "reached", "missed", "not measured"
JUDGED = "SDXL"
OF_EAGER = {"512x512": 1.3, "1024x1024": 1.15}
WITH_DEEP_CACHE = 2.5
STALLS_OF_CORE = 0.1
MINUTES = 9.0
MOST_GROWTH = 1.03
"""Memory held at the last ten sizes, over the most held before."""

NO_REPLAYS = "compiled blocks"


class Goal(NamedTuple):
    """sentence: with the figures and the state."""

    sentence: str
    state: str


def goals(rows: Sequence[Row], skips: Sequence[Row], has_gpu: bool, seconds: dict[str, float]) -> list[Goal]:
    """All of them. seconds: that each model took; without a GPU only the outputs are judged."""
    judged = [
        *_of_core(rows, skips),
        *_of_eager(rows),
        *_of_sessions(rows),
        *_of_forty(rows),
        _of_minutes(rows, skips, seconds),
    ]
    if not has_gpu:
        judged = [Goal(_unmeasured(goal.sentence), NOT_MEASURED) for goal in judged]
    return [*judged, _of_outputs(rows)]


def failures(rows: Iterable[Row]) -> list[str]:
    """A sentence for each output that is not eager's within tolerance, and for each contender that failed."""
    found = []
    for row in rows:
        where = f"{row['model']}, {_place(row)}{CONTENDERS[row['contender']].label}"
        if "failed" in row:
            found.append(f"{where}: {row['failed']}")
        elif _is_compared(row) and not row["answer_diff"] <= row["tolerance"]:
            found.append(
                f"{where}: differs from eager by {row['answer_diff']:.1e} of the largest value, "
                f"more than {row['tolerance']:.0e}"
            )
    return found


def speedups(rows: Iterable[Row], contender: str, over: str) -> dict[tuple[str, str, int], float]:
    """(model, size, batch) → how many times as many steps a second the contender makes as the other one.

    Over eager: as eager was in the same turns.
    """
    if over == EAGER:
        return {
            (row["model"], row["size"], row["batch"]): row["eager_ms"] / row["step_ms"]
            for row in rows
            if row["part"] == "steps" and row["contender"] == contender and row.get("eager_ms")
        }
    milliseconds: dict[str, dict[tuple[str, str, int], float]] = {contender: {}, over: {}}
    for row in rows:
        if row["part"] == "steps" and row["contender"] in milliseconds and "step_ms" in row:
            milliseconds[row["contender"]][row["model"], row["size"], row["batch"]] = row["step_ms"]
    own, other = milliseconds[contender], milliseconds[over]
    return {case: other[case] / own[case] for case in own if case in other}


def _of_core(rows: Sequence[Row], skips: Sequence[Row]) -> list[Goal]:
    made = []
    for model in _models(rows, "steps"):
        what = f"{model}: CUDA graphs at least as fast as core's TorchCompileModel at every size"
        times = {case: value for case, value in speedups(rows, CAPTURED, CORE).items() if case[0] == model}
        unreplayed = [_name(case) for case in times if not _replays(rows, case, CAPTURED)]
        missing = [row["what"] for row in skips if _is_skip(row, "steps", model, (CAPTURED, CORE))]
        if not times:
            made.append(_goal(what, None, "no case has both"))
            continue
        worst = min(times, key=times.__getitem__)
        figure = f"{times[worst]:.2f} times as fast at the worst of {len(times)} cases, {_name(worst)}"
        if unreplayed:
            made.append(_goal(what, None, f"{figure}, but no CUDA graphs at {', '.join(unreplayed)}"))
        elif times[worst] < 1:
            made.append(_goal(what, False, figure))
        elif missing:
            made.append(_goal(what, None, f"{figure}; left out: {', '.join(dict.fromkeys(missing))}"))
        else:
            made.append(_goal(what, True, figure))
    return made or [_goal("CUDA graphs at least as fast as core's TorchCompileModel at every size", None, "no rows")]


def _of_eager(rows: Sequence[Row]) -> list[Goal]:
    made = []
    wanted = [(CAPTURED, "with CUDA graphs", least) for least in OF_EAGER.values()]
    wanted = [*zip(OF_EAGER, wanted, strict=True)]
    wanted += [(size, ("deepcache-3", "with DeepCache 3", WITH_DEEP_CACHE)) for size in OF_EAGER]
    for size, (contender, label, least) in wanted:
        what = f"{JUDGED}, {size}, {label}: at least {least} times eager"
        case = (JUDGED, size, 1)
        times = speedups(rows, contender, EAGER).get(case)
        if times is None:
            made.append(_goal(what, None, "no such row"))
        elif not _replays(rows, case, contender):
            made.append(_goal(what, None, f"{times:.2f}, but as compiled blocks alone"))
        else:
            made.append(_goal(what, times >= least, f"{times:.2f}"))
    return made


def _of_sessions(rows: Sequence[Row]) -> list[Goal]:
    made = []
    for model in _models(rows, "session"):
        what = f"{model}: the session's stalls with CUDA graphs at most {STALLS_OF_CORE:.0%} of core's"
        own, core = (_stalls(rows, model, contender) for contender in (CAPTURED, CORE))
        common = [step for step in own if step in core]
        if not common:
            made.append(_goal(what, None, "not run by both"))
            continue
        ours, theirs = sum(own.values()), sum(core.values())
        figure = f"{ours:.1f} s in {len(own)} prompts, core {theirs:.1f} s in {len(core)}"
        # A session of core's that was cut stalls no less than this; one of ours that was cut proves nothing.
        if len(own) < len(core):
            made.append(_goal(what, None, figure))
        elif ours <= STALLS_OF_CORE * theirs:
            made.append(_goal(what, True, figure))
        else:
            made.append(_goal(what, False if len(core) == len(own) else None, figure))
    return made or [_goal("The session's stalls with CUDA graphs at most 10% of core's", None, "no rows")]


def _of_forty(rows: Sequence[Row]) -> list[Goal]:
    made = []
    for model in _models(rows, "sizes40"):
        own = [row for row in rows if (row["part"], row["model"]) == ("sizes40", model) and "held_mb" in row]
        what = f"{model}: forty sizes in a row, memory within the budget and flat"
        if len(own) < 40:
            made.append(_goal(what, None, f"{len(own)} sizes were run"))
            continue
        most = max(row["cache_mb"] for row in own)
        held = [row["held_mb"] for row in own]
        grown = max(held[-10:]) / max(held[:-10])
        figure = (
            f"{most:.0f} MB of {own[0]['budget_mb']} MB at most; the last ten sizes held {grown:.3f} of the most before"
        )
        if any(row["ran_as"] == NO_REPLAYS for row in own):
            made.append(_goal(what, None, f"{figure}, but not every size was recorded"))
        else:
            made.append(_goal(what, most <= own[0]["budget_mb"] and grown <= MOST_GROWTH, figure))
    return made or [_goal("Forty sizes in a row, memory within the budget and flat", None, "no rows")]


def _of_minutes(rows: Sequence[Row], skips: Sequence[Row], seconds: dict[str, float]) -> Goal:
    what = f"{JUDGED}: every part within {MINUTES:.0f} minutes"
    if JUDGED not in seconds:
        return _goal(what, None, "not run")
    parts = {row["part"] for row in rows if row["model"] == JUDGED}
    left_out = [row for row in skips if row["model"] == JUDGED]
    figure = f"{seconds[JUDGED] / 60:.1f} minutes, {len(left_out)} things left out"
    if seconds[JUDGED] > 60 * MINUTES or left_out:
        return _goal(what, False, figure)
    missing = [part for part in PARTS if part not in parts]
    return _goal(
        what, None if missing else True, f"{figure}; parts not run: {', '.join(missing)}" if missing else figure
    )


def _is_compared(row: Row) -> bool:
    """Whether its output has a value that should be eager's; on the made-up device none has."""
    return row.get("answer_diff") is not None and row.get("tolerance") is not None


def _of_outputs(rows: Sequence[Row]) -> Goal:
    checked = [row for row in rows if _is_compared(row) and row["contender"] != EAGER]
    wrong = failures(rows)
    what = "Every contender's output is eager's within tolerance"
    if not checked:
        return _goal(what, None, "nothing was compared")
    worst = max(checked, key=lambda row: row["answer_diff"])
    figure = f"{len(checked)} outputs compared, the worst off by {worst['answer_diff']:.1e} ({_place(worst)}"
    figure += f"{CONTENDERS[worst['contender']].label})"
    return _goal(what, not wrong, f"{figure}; {len(wrong)} failures" if wrong else figure)


def _goal(what: str, reached: bool | None, figure: str) -> Goal:
    state = NOT_MEASURED if reached is None else REACHED if reached else MISSED
    return Goal(f"{what}: {state} ({figure}).", state)


def _unmeasured(sentence: str) -> str:
    what = sentence.rpartition(" (")[0].rpartition(": ")[0]
    return f"{what}: {NOT_MEASURED} (no GPU)."


def _stalls(rows: Sequence[Row], model: str, contender: str) -> dict[str, float]:
    return {
        row["step"]: row["stall_s"]
        for row in rows
        if (row["part"], row["model"], row["contender"]) == ("session", model, contender) and "stall_s" in row
    }


def _models(rows: Sequence[Row], part: str) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows if row["part"] == part))


def _replays(rows: Sequence[Row], case: tuple[str, str, int], contender: str) -> bool:
    row: Any = next(
        row
        for row in rows
        if row["part"] == "steps"
        and (row["model"], row["size"], row["batch"]) == case
        and row["contender"] == contender
        and "step_ms" in row
    )
    return row["ran_as"] != NO_REPLAYS


def _is_skip(row: Row, part: str, model: str, contenders: Sequence[str]) -> bool:
    return row["part"] == part and row["model"] == model and row["contender"] in contenders


def _name(case: tuple[str, str, int]) -> str:
    return f"{case[1]} batch {case[2]}"


def _place(row: Row) -> str:
    """Where in its part: the case, the prompt or the start."""
    if row["part"] in ("steps", "profile"):
        return f"{row['size']} batch {row['batch']}, "
    if row["part"] == "session":
        return f"session, {row['step']}, "
    return f"{row['start']} start, " if row["part"] == "cold" else f"size {row['number']} of 40, "

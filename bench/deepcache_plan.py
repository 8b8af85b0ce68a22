"""What `bench deepcache` compares, on which samples, and how its rows are read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .report import Row

Point = tuple[float, float]
"""Share of FLOPs, PSNR in dB."""

STEPS = 30
SAMPLERS = ("euler", "dpmpp_2m")
INTERVALS = (2, 3, 5)
LONGEST = INTERVALS[-1]
"""Interval of the adaptive curve: its bound, and at a high threshold its rhythm."""
GOAL_DB = 3.0
HOLD, FORECAST = "uniform, hold", "adaptive, forecast"
EASY_CACHE = "EasyCache"


@dataclass(frozen=True)
class Case:
    """`runs` runs of the sampler, each of `batch` samples; height and width in latent pixels."""

    height: int
    width: int
    batch: int
    runs: int = 1

    @property
    def samples(self) -> int:
        return self.batch * self.runs


CASES = (Case(16, 16, batch=1, runs=8), Case(16, 16, batch=16), Case(15, 20, batch=24), Case(17, 15, batch=16))
"""Square one by one, square, odd height, both odd: 64 samples a sampler."""


@dataclass(frozen=True)
class Contender:
    """One way to skip. interval, schedule, between and depth are DeepCache's; threshold is that of the
    adaptive schedule, or EasyCache's for reusing a step. depth None: the default of the model.

    on_curve: whether it is a point of its method's curve; the others are rows of the table alone.
    """

    method: str
    interval: int | None = None
    schedule: str | None = None
    between: str | None = None
    threshold: float | None = None
    depth: int | None = None
    on_curve: bool = True

    @property
    def curve(self) -> str:
        return self.method if self.schedule is None else f"{self.schedule}, {self.between}"


def contenders(
    thresholds: Sequence[float], easy_thresholds: Sequence[float], default_threshold: float, depth: int | None = None
) -> list[Contender]:
    """All that is compared: interval 2, 3, 5 in all four kinds, the adaptive curves, and EasyCache."""
    found = []
    for between in ("hold", "forecast"):
        found += [Contender("DeepCache", interval, "uniform", between, depth=depth) for interval in INTERVALS]
        found += [
            Contender("DeepCache", interval, "adaptive", between, default_threshold, depth, interval == LONGEST)
            for interval in INTERVALS
        ]
        others = [value for value in thresholds if value != default_threshold]
        found += [Contender("DeepCache", LONGEST, "adaptive", between, value, depth) for value in others]
    return [*found, *(Contender(EASY_CACHE, threshold=value) for value in easy_thresholds)]


def summary(rows: Iterable[Row]) -> list[Row]:
    """The rows of all cases of a sampler in one, means over its samples."""
    groups: dict[tuple, list[Row]] = {}
    names = ("method", "interval", "schedule", "between", "threshold", "depth", "on_curve", "sampler")
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    table = []
    for values, group in groups.items():
        samples = sum(row["samples"] for row in group)
        means = {
            name: sum(row[name] * row["samples"] for row in group) / samples
            for name in ("flops_share", "psnr_db", "ssim")
        }
        table.append({**dict(zip(names, values, strict=True)), "samples": samples, **means})
    return table


def curves(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Name of the curve → its points, by share; several samplers' points of one contender in one."""
    points: dict[str, dict[tuple, list[Row]]] = {}
    for row in summary(rows):
        if row["on_curve"]:
            name = Contender(row["method"], schedule=row["schedule"], between=row["between"]).curve
            points.setdefault(name, {}).setdefault((row["interval"], row["threshold"]), []).append(row)
    return {
        name: sorted((_mean(group, "flops_share"), _mean(group, "psnr_db")) for group in by_setting.values())
        for name, by_setting in points.items()
    }


def at(curve: Sequence[Point], share: float) -> float | None:
    """PSNR of a curve, sorted by share, at that share: on the line between its neighbours; None outside it."""
    shares = [point[0] for point in curve]
    if not shares or not shares[0] <= share <= shares[-1]:
        return None
    right = bisect_left(shares, share)
    if shares[right] == share:
        return curve[right][1]
    (left_share, left), (right_share, value) = curve[right - 1], curve[right]
    return left + (value - left) * (share - left_share) / (right_share - left_share)


def gains(better: Sequence[Point], base: Sequence[Point]) -> list[Point]:
    """At each share where either curve has a point and both reach: how many dB `better` is above `base`."""
    found = []
    for share in sorted({point[0] for point in (*better, *base)}):
        values = at(better, share), at(base, share)
        if None not in values:
            found.append((share, values[0] - values[1]))
    return found


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A sentence per question and sampler: how many dB at equal cost, and whether the goal is reached."""
    sentences = []
    for sampler in dict.fromkeys(row["sampler"] for row in rows):
        of_sampler = curves(row for row in rows if row["sampler"] == sampler)
        for base, goal in ((HOLD, GOAL_DB), (EASY_CACHE, 0.0)):
            found = gains(of_sampler.get(FORECAST, []), of_sampler.get(base, []))
            sentences.append(f"{sampler}: {FORECAST} over {base} at an equal share of FLOPs: {verdict(found, goal)}")
    return sentences


def verdict(found: Sequence[Point], goal: float) -> str:
    """Of the gains over shares, in words: the least, the most, and whether the least reaches the goal."""
    if not found:
        return "the curves have no share in common, so nothing is shown."
    least, most = (choose(found, key=lambda point: point[1]) for choose in (min, max))
    reached = "reached" if least[1] >= goal and least[1] > 0 else "missed"
    if reached == "missed" and most[1] >= max(goal, 1e-9):
        shares = [share for share, gain in found if gain >= goal]
        reached = f"reached at {len(shares)} of {len(found)} shares, so missed"
    aim = f"at least {goal:g} dB" if goal else "more than 0 dB"
    return (
        f"{least[1]:+.1f} dB (at {least[0]:.2f}) to {most[1]:+.1f} dB (at {most[0]:.2f}), "
        f"shares {found[0][0]:.2f} to {found[-1][0]:.2f}; goal {aim} everywhere: {reached}."
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)

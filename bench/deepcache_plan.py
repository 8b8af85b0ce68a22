"""What `bench deepcache` compares, on which samples, and how its rows are read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .report import Row

if TYPE_CHECKING:
    from comfy_accel.accel.step_cache.config import DeepCacheSettings

Point = tuple[float, float]
"""Share of FLOPs, PSNR in dB."""

SAMPLERS = ("euler", "dpmpp_2m", "heun", "euler_ancestral", "lcm")
STEPS = (4, 8, 12, 20, 30, 50)
PLAIN = SAMPLERS[:2]
"""Of them, those that call the model once a step and add no noise: every way skips with them."""
IN_DETAIL = 30
"""The number of steps at which every policy is compared; at the others the default, the targets and fewer steps."""
TARGETS = (50.0, 40.0, 32.0)
INTERVALS = (2, 3, 5)
LONGEST = INTERVALS[-1]
"""Interval of the adaptive curves: their bound, and at a high threshold their rhythm."""
FEWER = (0.75, 0.5, 0.34)
"""Shares of the steps of the baseline that takes fewer."""
GOAL_DB = 2.0
SHORT, SHORT_DB, SHORT_GAIN = 8, 35.0, 1.25
"""What few steps must gain: so many times fewer FLOPs at this PSNR."""
BELOW, ABOVE = 1.0, 6.0
"""How many dB below and above its target a sample may end."""

DEEP_CACHE, FEWER_STEPS, EASY_CACHE = "DeepCache", "fewer steps", "EasyCache"
TARGET, FIRST_IMAGE = "quality target", "quality target, first image"
"""A quality learns from earlier images of the same model, sampler and guidance; the first image has none."""
DEFAULT, OUTER = "the default", "the default while outer blocks run"
OUTER_DEPTH = {"unet": 2, "dit": 1}
"""Of `OUTER`, by network: as much as ran in skipped steps up to version 0.1."""
SETTING = ("method", "interval", "schedule", "between", "threshold", "depth", "target_db", "fewer_steps", "on_curve")
PLACE = ("network", "sampler", "steps")
CASE = ("width", "height", "batch")


@dataclass(frozen=True)
class Case:
    """`runs` runs of the sampler, each of `batch` samples; height and width in latent pixels. first: the class of the
    first sample, and the seed of the first run."""

    height: int
    width: int
    batch: int
    runs: int = 1
    first: int = 0

    @property
    def samples(self) -> int:
        return self.batch * self.runs


CASES = (Case(16, 16, batch=1, runs=4), Case(20, 15, batch=1, runs=2, first=4), Case(15, 20, batch=4, first=6))
"""Single images, as most people make them, and a batch: ten samples of all eight classes for each sampler and number of
steps."""


@dataclass(frozen=True)
class Contender:
    """One way to spend less. interval, schedule, between and depth are DeepCache's; threshold is that of its schedule,
    or EasyCache's for reusing a step. depth None: the default of the model. target_db: the quality that DeepCache is
    asked for, in place of a schedule. fewer_steps: the sampler's, without any caching.

    on_curve: whether it is a point of its method's curve; the others are rows of the table alone.
    """

    method: str
    interval: int | None = None
    schedule: str | None = None
    between: str | None = None
    threshold: float | None = None
    depth: int | None = None
    target_db: float | None = None
    fewer_steps: int | None = None
    on_curve: bool = True

    @property
    def curve(self) -> str:
        return self.method if self.schedule is None else f"{self.schedule}, {self.between}"


def of_targets(targets: Sequence[float], method: str = TARGET) -> list[Contender]:
    """DeepCache, asked for a quality."""
    return [Contender(method, target_db=target) for target in targets]


def of_fewer_steps(steps: int) -> list[Contender]:
    """The same sampler with fewer steps, without caching."""
    fewer = sorted({max(1, round(share * steps)) for share in FEWER} - {steps}, reverse=True)
    return [Contender(FEWER_STEPS, fewer_steps=number) for number in fewer]


def of_default(settings: DeepCacheSettings, depth: int | None = None, method: str = DEEP_CACHE) -> Contender:
    """DeepCache as its node is when it is added."""
    own = (settings.interval, settings.schedule, settings.between, settings.threshold)
    return Contender(method, *own, depth=depth, on_curve=False)


def of_policies(
    thresholds: Sequence[float], forecasts: Sequence[str], easy_thresholds: Sequence[float]
) -> list[Contender]:
    """Every policy with every forecast, and EasyCache. thresholds: of the adaptive schedule."""
    found = []
    for between in forecasts:
        found += [Contender(DEEP_CACHE, interval, "uniform", between) for interval in INTERVALS]
        found += [Contender(DEEP_CACHE, LONGEST, "adaptive", between, value) for value in thresholds]
    return [*found, *(Contender(EASY_CACHE, threshold=value) for value in easy_thresholds)]


def merged(known: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows, the new ones in place of known ones of the same measurement."""
    names = (*PLACE, *SETTING, *CASE)
    rows = {tuple(row.get(name) for name in names): row for row in (*known, *new)}
    return sorted(rows.values(), key=lambda row: [_order(row.get(name)) for name in names])


def _order(value: object) -> tuple:
    return (value is not None, isinstance(value, str), value if value is not None else 0)


def fields(contender: Contender) -> Row:
    """The contender as fields of its rows."""
    return asdict(contender)


def summary(rows: Iterable[Row]) -> list[Row]:
    """The rows of all cases of one network, sampler and number of steps in one, means over its samples."""
    groups: dict[tuple, list[Row]] = {}
    names = (*PLACE, *SETTING)
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [{**dict(zip(names, values, strict=True)), **_means(group)} for values, group in groups.items()]


def _means(rows: Sequence[Row]) -> Row:
    samples = sum(row["samples"] for row in rows)
    measured = [name for name in ("flops_share", "psnr_db", "ssim", "reached_db") if rows[0].get(name) is not None]
    means = {name: sum(row[name] * row["samples"] for row in rows) / samples for name in measured}
    counts = {name: sum(row[name] for row in rows) for name in ("reached", "above") if rows[0].get(name) is not None}
    return {"samples": samples, **means, **counts}


def curves(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Name of the curve → its points, by share; points of one contender, at several samplers, in one."""
    points: dict[str, dict[tuple, list[Row]]] = {}
    for row in summary(rows):
        if row["on_curve"]:
            name = Contender(row["method"], schedule=row["schedule"], between=row["between"]).curve
            setting = tuple(row[name] for name in ("interval", "threshold", "target_db", "fewer_steps"))
            points.setdefault(name, {}).setdefault(setting, []).append(row)
    return {
        name: sorted((_mean(group, "flops_share"), _mean(group, "psnr_db")) for group in by_setting.values())
        for name, by_setting in points.items()
    }


def default_point(rows: Iterable[Row], method: str = DEEP_CACHE) -> list[Point]:
    """Share and PSNR of the default, in one point, or none. method: or of `OUTER`."""
    own = [row for row in summary(rows) if row["method"] == method and not row["on_curve"]]
    return [(_mean(own, "flops_share"), _mean(own, "psnr_db"))] if own else []


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


def share_at(curve: Sequence[Point], psnr: float) -> float | None:
    """The least share at which a curve, sorted by share, has that PSNR; None where it never has."""
    for (left_share, left), (right_share, right) in zip(curve, curve[1:], strict=False):
        if left < psnr <= right:
            return left_share + (right_share - left_share) * (psnr - left) / (right - left)
    return curve[0][0] if curve and curve[0][1] >= psnr else None


def gains(better: Sequence[Point], base: Sequence[Point]) -> list[Point]:
    """At each share where either curve has a point and both reach: how many dB `better` is above `base`."""
    found = []
    for share in sorted({point[0] for point in (*better, *base)}):
        values = at(better, share), at(base, share)
        if None not in values:
            found.append((share, values[0] - values[1]))
    return found


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A sentence per network and question: whether targets are kept, and what is gained over what else there is."""
    sentences = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        sentences.append(f"{network}: {_of_kept_targets(own)}")
        sentences += [f"{network}: {text}" for text in _of_gains(own)]
        sentences += [f"{network}: {text}" for text in _of_few_steps(own)]
    return sentences


def _of_kept_targets(rows: Sequence[Row]) -> str:
    asked = [row for row in rows if row["method"] == TARGET]
    if not asked:
        return "no target was asked for."
    saved = [row for row in asked if row["flops_share"] < 1]
    idle = sum(row["samples"] for row in asked if row not in saved)
    samples = sum(row["samples"] for row in saved)
    reached = sum(row["reached"] for row in saved)
    share = reached / max(1, samples)
    loose = [row for row in asked if more_was_possible(row, rows)]
    above, of = sum(row["above"] for row in loose), sum(row["samples"] for row in loose)
    return (
        f"{reached} of {samples} samples ({share:.0%}) reached their target within {BELOW:g} dB (goal 95 %: "
        f"{_word(share >= 0.95)}), and {idle} more for which nothing was saved; of {of} where more could have been "
        f"skipped, {above} ({above / max(1, of):.0%}) ended more than {ABOVE:g} dB above it (goal none: "
        f"{_word(not above)})."
    )


def more_was_possible(row: Row, rows: Iterable[Row]) -> bool:
    """Whether another way in `rows` kept the target of `row` on the same samples with fewer FLOPs."""
    same = (*PLACE, *CASE)
    return any(
        other["flops_share"] < min(row["flops_share"] - 0.03, 1) and other["latent_db"] >= row["target_db"]
        for other in rows
        if all(other[name] == row[name] for name in same)
    )


def _of_gains(rows: Sequence[Row]) -> list[str]:
    """Of the target's curve over the default and every other, at each number of steps."""
    sentences = []
    for steps in sorted({row["steps"] for row in rows}):
        own = [row for row in rows if row["steps"] == steps]
        for name in (DEFAULT, OUTER, *(name for name in curves(own) if name != TARGET)):
            found = _gain_by_sampler(own, name)
            if found:
                goal = GOAL_DB if name in (DEFAULT, OUTER) else 0.0
                sentences.append(f"{steps} steps, {TARGET} over {name} at equal FLOPs: {verdict(found, goal)}")
    return sentences


def _gain_by_sampler(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Sampler → how many dB the target's curve is above that one, mean over the shares below 1 that both reach."""
    found = {}
    for sampler in dict.fromkeys(row["sampler"] for row in rows):
        own = [row for row in rows if row["sampler"] == sampler]
        known = curves(own)
        points = {DEFAULT: DEEP_CACHE, OUTER: OUTER}
        base = default_point(own, points[name]) if name in points else known.get(name, [])
        # At the whole work the image is the uncached one, and the PSNR says nothing.
        target, base = ([point for point in curve if point[0] < 1] for curve in (known.get(TARGET, []), base))
        values = [gain for _, gain in gains(target, base)]
        if values:
            found[sampler] = sum(values) / len(values)
    return found


def _of_few_steps(rows: Sequence[Row]) -> list[str]:
    sentences = []
    own = [row for row in rows if row["steps"] == SHORT and row["method"] == TARGET]
    for sampler in dict.fromkeys(row["sampler"] for row in own):
        curve = curves(row for row in own if row["sampler"] == sampler)[TARGET]
        share = share_at(curve, SHORT_DB)
        gain = None if share is None else 1 / share
        words = "never reached" if gain is None else f"{gain:.2f} times fewer FLOPs"
        kept = gain is not None and gain >= SHORT_GAIN
        sentences.append(f"{sampler}, {SHORT} steps at {SHORT_DB:g} dB: {words} (goal {SHORT_GAIN:g}: {_word(kept)}).")
    return sentences


def verdict(found: dict[str, float], goal: float) -> str:
    """Of gains in dB by sampler, in words: the mean, the least, the most, and whether the mean reaches the goal."""
    mean = sum(found.values()) / len(found)
    least, most = (choose(found, key=found.get) for choose in (min, max))
    aim = f"at least {goal:g} dB" if goal else "more than 0 dB"
    spread = (
        f", {found[least]:+.1f} dB ({least}) to {found[most]:+.1f} dB ({most})" if len(found) > 1 else f" ({least})"
    )
    return f"{mean:+.1f} dB{spread}; goal {aim}: {_word(mean >= goal and mean > 0)}."


def _word(reached: bool) -> str:
    return "reached" if reached else "missed"


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)

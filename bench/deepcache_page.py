"""The page and the plots of `bench deepcache`, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import line_plot, report
from .deepcache_plan import (
    ABOVE,
    BELOW,
    EASY_CACHE,
    FEWER_STEPS,
    IN_DETAIL,
    OUTER,
    PLAIN,
    TARGET,
    at,
    curves,
    default_point,
    summary,
    verdicts,
)
from .similarity import IDENTICAL

SHARES = (0.4, 0.5, 0.6, 0.7)
"""Of FLOPs, at which the page compares policies."""
FEW_CURVES = ("uniform, hold", "adaptive, forecast", EASY_CACHE, FEWER_STEPS, TARGET)
"""Drawn beside the best of the others; all of them would hide each other."""

LEGEND = f"""\
**FLOPs** are the floating-point operations of convolutions, matrix products and attention that really ran, counted
layer by layer, as a share of the uncached run's. **dB** is the PSNR to the uncached run, averaged over samples, on the
network's fixed linear RGB view in 0 to 1, one pixel per latent pixel (`psnr_db`). Targets are about the PSNR of the
final latent, relative to its own range of values (`latent_db`, `reached_db`). A sample reached its target if it is at
most {BELOW:g} dB below it, and is above it if more than {ABOVE:g} dB. Targets were asked for after eight other images
with the same sampler, of which a quality learns; where it is the first image, that is said.
{OUTER.capitalize()}: as in DeepCache's node up to version 0.1. A skipped step runs a UNet's two outermost
levels, or a transformer's first and last block. Nothing is corrected.
{FEWER_STEPS.capitalize()}: the same sampler with fewer steps and no caching, compared with the full run."""


def save(folder: Path, rows: Sequence[report.Row]) -> str:
    """Write page and plots to `folder`; return what to print."""
    folder.mkdir(parents=True, exist_ok=True)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    tables = {
        f"{IN_DETAIL} steps, by sampler": report.markdown(*_summary_table(rows, "sampler", "steps", IN_DETAIL)),
        f"{PLAIN[0]}, by number of steps": report.markdown(*_summary_table(rows, "steps", "sampler", PLAIN[0])),
        f"Policies at equal FLOPs, {IN_DETAIL} steps: dB, mean of {_and(PLAIN)}": report.markdown(*_by_policy(rows)),
    }
    conclusion = verdicts(rows)
    pictures = [picture for network in networks for picture in _pictures(folder, network, rows)]
    page = [
        "# DeepCache: quality over cost",
        "",
        "Written by `dev.py bench deepcache --out docs` on the trained test networks: a UNet of SD1.5's kind "
        "([toy_unet.md](../bench/data/toy_unet.md)) and a DiT of Flux's ([toy_dit.md](../bench/data/toy_dit.md)). "
        "Every row by size, sampler and number of steps: `deepcache.json`.",
        "",
        "Each cell: the share of the uncached run's FLOPs → how close the samples come to that run. Beside a target, "
        f"the share of samples that reached it within {BELOW:g} dB.",
        "",
        *(line for title, table in list(tables.items())[:2] for line in (f"## {title}", "", table, "")),
        *(line for name, words in pictures for line in (f"![{words}]({name})", "")),
        *(line for title, table in list(tables.items())[2:] for line in (f"## {title}", "", table, "")),
        "## What it shows",
        "",
        *(f"- {sentence}" for sentence in conclusion),
        "",
        "## How it was measured",
        "",
        LEGEND,
        "",
    ]
    (folder / "deepcache.md").write_text("\n".join(page), encoding="utf-8")
    return "\n\n".join([*tables.values(), "\n".join(conclusion)])


def _summary_table(rows: Sequence[report.Row], by: str, fixed: str, value: object):
    """What the default and each target cost and reach, and fewer steps at the cost of the default."""
    table = []
    rows = [row for row in rows if row[fixed] == value]
    targets = sorted({row["target_db"] for row in rows if row["target_db"] is not None}, reverse=True)
    for key in dict.fromkeys((row["network"], row[by]) for row in rows):
        own = [row for row in rows if (row["network"], row[by]) == key]
        line: report.Row = {"network": key[0], by: key[1]}
        point = default_point(own)
        line["default"] = _cell(*point[0]) if point else None
        for target in targets:
            asked = [row for row in summary(own) if row["target_db"] == target]
            line[f"{target:g} dB asked"] = _reached(asked[0]) if asked else None
        found = at(curves(own).get(FEWER_STEPS, []), point[0][0]) if point else None
        line[FEWER_STEPS] = None if found is None else _cell(point[0][0], found)
        table.append(line)
    return (
        table,
        ["network", by, "default", *(f"{target:g} dB asked" for target in targets), FEWER_STEPS],
        ("network", by),
    )


def _reached(asked: report.Row) -> str:
    kept = asked["reached"] / asked["samples"]
    cell = _cell(asked["flops_share"], asked["reached_db"])
    return cell if asked["flops_share"] >= 1 else f"{cell}, {kept:.0%} kept"


def _cell(share: float, decibels: float) -> str:
    return f"{share:.2f} → {decibels:.1f} dB" if decibels < IDENTICAL else f"{share:.2f}, nothing skipped"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _by_policy(rows: Sequence[report.Row]) -> tuple[list[report.Row], list[str], tuple[str, ...]]:
    table = []
    columns = [f"at {share:g}" for share in SHARES]
    for network in dict.fromkeys(row["network"] for row in rows):
        found = curves(row for row in _in_detail(rows) if row["network"] == network)
        for name, curve in found.items():
            values = {column: at(curve, share) for column, share in zip(columns, SHARES, strict=True)}
            reach = f"{curve[0][0]:.2f} to {curve[-1][0]:.2f}"
            decibels = {column: None if value is None else f"{value:.1f}" for column, value in values.items()}
            table.append({"network": network, "policy": name, "FLOPs": reach, **decibels})
    return table, ["network", "policy", "FLOPs", *columns], ("network", "policy")


def _in_detail(rows: Sequence[report.Row]) -> list[report.Row]:
    return [row for row in rows if row["steps"] == IN_DETAIL and row["sampler"] in PLAIN]


def _pictures(folder: Path, network: str, rows: Sequence[report.Row]) -> list[tuple[str, str]]:
    """File and words of each plot of a network."""
    made = []
    own = [row for row in rows if row["network"] == network]
    detailed = _in_detail(own) or own
    found = curves(detailed)
    others = [name for name in found if name not in FEW_CURVES]
    best = sorted(others, key=lambda name: _mean_level(found[name]), reverse=True)[: len(line_plot.COLOURS) - 5]
    drawn = {name: found[name] for name in (*FEW_CURVES, *best) if name in found}
    if drawn:
        name = "deepcache.png" if network == "unet" else f"deepcache_{network}.png"
        samplers = ", ".join(dict.fromkeys(row["sampler"] for row in detailed))
        words = f"Quality over cost, {network}: {detailed[0]['steps']} steps, mean of {samplers}"
        axes = "FLOPs, as a share of the uncached run", "PSNR to the uncached run, dB"
        line_plot.save(folder / name, words, *axes, drawn)
        made.append((name, words))
    asked = [row for row in summary(own) if row["method"] == TARGET and row["sampler"] in PLAIN]
    asked = [row for row in asked if row["flops_share"] < 1]
    if asked:
        name = f"deepcache_{network}_targets.png"
        words = f"Target against reached, {network}: mean of {_and(PLAIN)}, by number of steps"
        by_steps: dict[str, dict[float, list[float]]] = {}
        for row in asked:
            by_steps.setdefault(f"{row['steps']} steps", {}).setdefault(row["target_db"], []).append(row["reached_db"])
        lines = {key: [(t, sum(v) / len(v)) for t, v in values.items()] for key, values in by_steps.items()}
        ends = sorted({row["target_db"] for row in asked})
        lines["as asked"] = [(target, target) for target in ends]
        line_plot.save(folder / name, words, "PSNR asked for, dB", "PSNR of the final latent, dB", lines)
        made.append((name, words))
    return made


def _mean_level(curve: Sequence[tuple[float, float]]) -> float:
    """How high a curve is for its cost: its mean PSNR, less what the shares alone would give."""
    return sum(decibels - 60 * share for share, decibels in curve) / len(curve)

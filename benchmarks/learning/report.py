"""What a learning study's cells say together: rows, curves, figures, and a picture of them."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.bench import result

Lines = Mapping[str, dict[str, Any]]
"""Cells that have ended, by name."""

KEPT_BESIDE = 3
"""Kept points on either side over which the picture's curves are averaged."""
COLOURS = {0: "#2e8b57", 1: "#2463a8", 4: "#e07b21", 16: "#c0392b"}
DISTILLED = "#6b3fa0"
DASHES = {"none": "-", "tis": "--", "decoupled": ":"}


def of(lines: Lines) -> dict[str, Any]:
    """A benchmark's result, with `curves` by kind of cell."""
    rows, curves = [], {}
    for lag, way, teacher in sorted({(line["lag"], line["way"], line["teacher"]) for line in lines.values()}):
        alike = cells_of(lines, lag, way, teacher)
        found = [line["accuracy"] for line in alike]
        lost = losses(lines, lag, way, teacher) if teacher or lag else []
        rows.append(
            {
                "part": "distillation" if teacher else "staleness",
                "lag": lag,
                "correction": way,
                "seeds": len(found),
                "accuracies": [round(value, 4) for value in found],
                "accuracy_before": statistics.mean(line["accuracy_before"] for line in alike),
                "accuracy_mean": statistics.mean(found),
                "lost_mean": statistics.mean(lost) if lost else None,
                "lost_low95": bound(lost, -1),
                "lost_high95": bound(lost, 1),
                "staleness_mean": statistics.mean(row[3] for line in alike for row in line["curve"]),
                "kl_mean": statistics.mean(row[4] for line in alike for row in line["curve"]),
                "steps": alike[0]["curve"][-1][0],
                "steps_s_median": statistics.median(line["curve"][-1][1] for line in alike),
                "whole_s_median": statistics.median(line["seconds"] for line in alike),
                "tokens_mean": statistics.mean(line["tokens"] for line in alike),
            }
        )
        curves[kind(rows[-1])] = curve(alike) | {"held_out": held_out(alike)}
    made = {key: _one(line[key] for line in lines.values()) for key in ("hardware", "commit")}
    return {**result("learning", rows, figures(lines)), **made, "curves": curves}


def figures(lines: Lines) -> dict[str, float]:
    found = {}
    ways = {line["way"] for line in lines.values() if line["lag"] == 4 and line["way"] != "none"}
    # The best of several corrections: 95 % for the least of two bounds take 97.5 % for each.
    level = 1 - 0.05 / max(1, len(ways))
    bounds = [high for way in ways if (high := bound(losses(lines, 4, way), 1, level)) is not None]
    if bounds:
        found["lag4_loss_bound95"] = min(bounds)
    if uncorrected := losses(lines, 16, "none"):
        found["lag16_uncorrected_reward_gap"] = statistics.mean(uncorrected)
    if (high := bound(losses(lines, 0, "none", teacher=True), 1)) is not None:
        found["distillation_gain_bound95"] = -high
    return found


def cells_of(lines: Lines, lag: int, way: str, teacher: bool = False) -> list[dict[str, Any]]:
    """Seed after seed."""
    alike = [line for line in lines.values() if (line["lag"], line["way"], line["teacher"]) == (lag, way, teacher)]
    return sorted(alike, key=lambda line: int(line["seed"]))


def losses(lines: Lines, lag: int, way: str, teacher: bool = False) -> list[float]:
    """Of each seed, what is lost in accuracy (the mean reward of held-out tasks) against its run with lag 0 and
    without a teacher."""
    fresh = {line["seed"]: line["accuracy"] for line in cells_of(lines, 0, "none")}
    alike = cells_of(lines, lag, way, teacher)
    return [fresh[line["seed"]] - line["accuracy"] for line in alike if line["seed"] in fresh]


def bound(lost: list[float], side: int, level: float = 0.95) -> float | None:
    """Of the mean, from above (side 1) or below (-1); None of fewer than two."""
    if len(lost) < 2:
        return None
    error = statistics.stdev(lost) / math.sqrt(len(lost))
    # To the three places of printed tables, so that it can be checked by hand.
    return statistics.mean(lost) + side * round(student_quantile(level, len(lost) - 1), 3) * error


def student_quantile(level: float, freedom: int) -> float:
    """One-sided, of Student's t; `level` from 0.5 on."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_share(angle: float, freedom: int) -> float:
    """What is below t = sqrt(freedom) * tan(angle): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term, total = math.cos(angle) ** odd, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    within = math.sin(angle) * total
    return (1 + (2 / math.pi * (angle + within) if odd else within)) / 2


def kind(row: Mapping[str, Any]) -> str:
    return "distilled" if row["part"] == "distillation" else f"lag {row['lag']}, {row['correction']}"


def curve(alike: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Over seeds: what the batches were rewarded with by step, and the median time of it."""
    rows = list(zip(*(line["curve"] for line in alike), strict=False))
    rewards = [[one[2] for one in row] for row in rows]
    return {
        "step": [row[0][0] for row in rows],
        "seconds": [round(statistics.median(one[1] for one in row), 2) for row in rows],
        "reward": [round(statistics.mean(some), 4) for some in rewards],
    }


def held_out(alike: list[dict[str, Any]]) -> list[list[float]]:
    """[step, accuracy], its mean over seeds."""
    by_step = zip(*(line["evaluations"] for line in alike), strict=False)
    return [[some[0][0], round(statistics.mean(one[1] for one in some), 4)] for some in by_step]


def picture(file: Path) -> bytes:
    """Of a result: rewards by step and by time, and where seeds ended, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    told = json.loads(file.read_text())
    drawing, panels = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    for row in told["rows"]:
        name = kind(row)
        colour = DISTILLED if name == "distilled" else COLOURS[row["lag"]]
        seen = told["curves"][name]
        for panel, by in zip(panels, ("step", "seconds"), strict=False):
            look = {"color": colour, "linestyle": DASHES[row["correction"]], "label": name}
            panel.plot(seen[by], smooth(seen["reward"]), linewidth=1.4, **look)
        mean = row["accuracy_mean"]
        ends = [mean - min(row["accuracies"])], [max(row["accuracies"]) - mean]
        panels[2].errorbar([mean], [name], xerr=ends, fmt="o", capsize=3, color=colour)
    titles = ("Reward by step", "Reward by time", "Held out, at the end")
    across = ("training step", "seconds", "accuracy of held-out tasks")
    for panel, title, label in zip(panels, titles, across, strict=True):
        panel.set_title(title, loc="left")
        panel.set_xlabel(label)
        panel.grid(color="#e6e8eb")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[:2]:
        panel.set_ylabel("reward of training batches, smoothed")
    apart = round(seen["step"][-1] / len(seen["step"]))
    drawing.supxlabel(
        f"Curves: means of seeds (times: medians) at one step in {apart}, each point the mean of "
        f"{2 * KEPT_BESIDE + 1} around it, of fewer towards the ends; first and last as they were. "
        "Bars: least and most of seeds.",
        fontsize=9,
    )
    panels[2].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=8)
    kept = io.BytesIO()
    drawing.savefig(kept, dpi=110)
    return kept.getvalue()


def smooth(values: list[float], beside: int = KEPT_BESIDE) -> list[float]:
    """A moving mean over as many on either side; fewer near the ends, which stay what they are."""
    last = len(values) - 1
    reaches = [min(beside, i, last - i) for i in range(len(values))]
    return [statistics.mean(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def _one(values: Iterable[Any]) -> Any:
    """What all of them are; cells of several machines or commits are not to be told as those of one."""
    found = list({json.dumps(value, sort_keys=True): value for value in values}.values())
    return found[0] if len(found) == 1 else {str(number): value for number, value in enumerate(found)}

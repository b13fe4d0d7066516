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

# One-sided quantiles of Student's t, by degrees of freedom.
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
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
                "lost_low95": bound(lost, -1, T95),
                "lost_high95": bound(lost, 1, T95),
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
    # The better of two corrections: 95 % for the least of two bounds take 97.5 % for each.
    quantiles = {1: T95, 2: T975}[len(ways)] if ways else {}
    bounds = [high for way in ways if (high := bound(losses(lines, 4, way), 1, quantiles)) is not None]
    if bounds:
        found["lag4_loss_bound95"] = min(bounds)
    if uncorrected := losses(lines, 16, "none"):
        found["lag16_uncorrected_reward_gap"] = statistics.mean(uncorrected)
    if (high := bound(losses(lines, 0, "none", teacher=True), 1, T95)) is not None:
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


def bound(lost: list[float], side: int, quantiles: Mapping[int, float]) -> float | None:
    """Of the mean, from above (side 1) or below (-1); None of fewer than two."""
    if len(lost) < 2:
        return None
    error = statistics.stdev(lost) / math.sqrt(len(lost))
    return statistics.mean(lost) + side * quantiles[len(lost) - 1] * error


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
    for panel, title in zip(panels, ("Reward by step", "Reward by seconds", "Held out, at the end"), strict=True):
        panel.set_title(title, loc="left")
        panel.grid(color="#e6e8eb")
        panel.spines[["top", "right"]].set_visible(False)
    panels[2].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=8)
    kept = io.BytesIO()
    drawing.savefig(kept, dpi=110)
    return kept.getvalue()


def smooth(values: list[float], width: int = 3) -> list[float]:
    return [statistics.mean(values[max(0, i - width) : i + width + 1]) for i in range(len(values))]


def _one(values: Iterable[Any]) -> Any:
    """What all of them are; cells of several machines or commits are not to be told as those of one."""
    found = list({json.dumps(value, sort_keys=True): value for value in values}.values())
    return found[0] if len(found) == 1 else {str(number): value for number, value in enumerate(found)}

"""report.png: a finished run in one picture, drawn from metrics.jsonl and events.jsonl.

`python -m headrace.telemetry.report RUN` draws it, so that a run's controller need not load matplotlib.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.buffer.config import BufferConfig
from headrace.errors import RunFolderError
from headrace.telemetry.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, GREY = "#2463a8", "#e07b21", "#2e8b57", "#c0392b", "#8a9199"


def write_report(folder: str | Path | RunFolder) -> Path:
    """Draw report.png and return its path. Loads matplotlib."""
    place = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    lines = place.read_metrics()
    if not lines:
        raise RunFolderError("a report is drawn from a run's metrics.jsonl, empty or missing here", str(place.path))
    evaluations = [event for event in place.read_events("evaluated") if event.get("pass_1") is not None]

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 3, figsize=(14, 7.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        _reward(axes[0, 0], lines, evaluations)
        _length(axes[0, 1], lines)
        _staleness(axes[0, 2], lines, _staleness_bound(place))
        _idle(axes[1, 0], lines)
        _throughput(axes[1, 1], lines)
        _policy(axes[1, 2], lines)
        for axis in axes.flat:
            axis.set_xlabel("training step")
            axis.margins(x=0.02)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(_title(place, lines, evaluations), fontsize=13, fontweight="bold", x=0.01, ha="left")
        partial = place.report.with_suffix(".partial.png")
        figure.savefig(partial, dpi=110)
        plt.close(figure)
    os.replace(partial, place.report)
    return place.report


def write_report_apart(folder: str | Path, timeout_s: float = 120.0) -> str | None:
    """Draw it in a process of its own. None when done, otherwise what went wrong; never raises."""
    command = [sys.executable, "-m", "headrace.telemetry.report", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"its process ended with status {done.returncode}"


# ── Panels ───────────────────────────────────────────────────────────────────────────────────────────────


def _reward(axis: Axes, lines: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    _curve(axis, lines, "reward_mean", BLUE, "reward, training")
    if evaluations:
        steps = [event["step"] for event in evaluations]
        values = [event["pass_1"] for event in evaluations]
        axis.plot(steps, values, "o-", color=ORANGE, markersize=5, linewidth=1.6, label="accuracy, held out")
    rewards = [line["reward_mean"] for line in lines if line.get("reward_mean") is not None]
    if all(0 <= reward <= 1 for reward in rewards):
        axis.set_ylim(0, 1.02)
    axis.set_title("Reward")
    _legend(axis)


def _length(axis: Axes, lines: list[dict[str, Any]]) -> None:
    _curve(axis, lines, "length_mean", BLUE, "mean length")
    axis.set_title("Length")
    axis.set_ylabel("tokens per completion")
    axis.set_ylim(bottom=0)
    beside = axis.twinx()
    _curve(beside, lines, "truncated_frac", RED, "truncated (right)")
    beside.set_ylim(0, 1.02)
    beside.grid(False)
    beside.yaxis.set_major_formatter(_percent())
    _legend(axis, beside)


def _staleness(axis: Axes, lines: list[dict[str, Any]], bound: int | None) -> None:
    steps, worst = _xy(lines, "staleness_max")
    axis.fill_between(steps, worst, step="mid", color=BLUE, alpha=0.18, linewidth=0, label="oldest token")
    _curve(axis, lines, "staleness_mean", BLUE, "mean")
    if bound is not None:
        axis.axhline(bound, color=RED, linestyle="--", linewidth=1.4, label=f"bound ({bound})")
    axis.set_title("Staleness")
    axis.set_ylabel("versions behind the trainer")
    highest = [bound or 0, *worst[np.isfinite(worst)], 1]
    axis.set_ylim(0, max(highest) * 1.25)
    _legend(axis)


def _idle(axis: Axes, lines: list[dict[str, Any]]) -> None:
    _curve(axis, lines, "engine_idle_frac", ORANGE, "generation")
    _curve(axis, lines, "trainer_idle_frac", BLUE, "training")
    axis.set_title("Idle time")
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(_percent())
    _legend(axis)


def _throughput(axis: Axes, lines: list[dict[str, Any]]) -> None:
    _curve(axis, lines, "gen_tokens_per_s", ORANGE, "generated")
    _curve(axis, lines, "train_tokens_per_s", BLUE, "trained")
    axis.set_title("Throughput")
    axis.set_ylabel("tokens per second")
    axis.set_ylim(bottom=0)
    _legend(axis)


def _policy(axis: Axes, lines: list[dict[str, Any]]) -> None:
    _curve(axis, lines, "entropy", GREEN, "entropy")
    axis.set_title("Policy")
    axis.set_ylabel("entropy, nats per token")
    axis.set_ylim(bottom=0)
    beside = axis.twinx()
    _curve(beside, lines, "mismatch_kl", RED, "mismatch KL (right)")
    _curve(beside, lines, "drift_kl", ORANGE, "drift KL (right)")
    beside.yaxis.set_major_formatter("{x:.2g}")
    beside.set_ylim(bottom=0)
    beside.grid(False)
    _legend(axis, beside)


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────────────


def _curve(axis: Axes, lines: list[dict[str, Any]], key: str, colour: str, label: str) -> None:
    """A metric's values, pale, and their running mean."""
    steps, values = _xy(lines, key)
    smooth = running_mean(values, max(1, len(values) // 30))
    if len(values) > 30:
        axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    axis.plot(steps, smooth, color=colour, linewidth=1.8, label=label)


def _legend(axis: Axes, *beside: Axes) -> None:
    """In the title's line, so that it never covers a curve."""
    pairs = [one.get_legend_handles_labels() for one in (axis, *beside)]
    handles = [handle for handles, _ in pairs for handle in handles]
    labels = [label for _, labels in pairs for label in labels]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.985), "ncols": len(labels)}
    axis.legend(handles, labels, **place, columnspacing=1.0, handlelength=1.2, borderaxespad=0.1, fontsize=8.5)


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean over `reach` values on either side and the value itself, of those that are numbers."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    low, high = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _xy(lines: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    values = [line.get(key) for line in lines]
    numbers = np.array([np.nan if value is None else value for value in values], float)
    return np.array([line["step"] for line in lines], float), numbers


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1, decimals=0)


def _title(place: RunFolder, lines: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    title = f"{place.path.resolve().name}: {lines[-1]['step']} steps"
    if seconds := lines[-1].get("time_s"):
        title += f" in {seconds:,.0f} s"
    if len(evaluations) > 1:
        title += f"   ·   accuracy {evaluations[0]['pass_1']:.1%} → {evaluations[-1]['pass_1']:.1%}"
    return title


def _staleness_bound(place: RunFolder) -> int | None:
    if not place.config.is_file():
        return None
    stored = tomllib.loads(place.config.read_text(encoding="utf-8"))
    return msgspec.convert(stored.get("buffer", {}), BufferConfig).staleness_bound


if __name__ == "__main__":
    print(write_report(sys.argv[1]))

"""report.png: a finished run in one picture, drawn from metrics.jsonl and events.jsonl.

`python -m headrace.telemetry.report RUN` draws it, so that a run's controller need not load matplotlib.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.buffer.config import BufferConfig
from headrace.errors import RunFolderError
from headrace.telemetry.evaluations import metric_of, sets_of, shown, valid_number
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.metrics import USER
from headrace.telemetry.words import steps_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2463a8", "#e07b21", "#2e8b57", "#c0392b", "#8a9199"
SET_COLOURS = (ORANGE, GREEN, RED, "#8e6bbf", GREY)
CAUSE_COLOURS = {
    "training": BLUE,
    "generation": ORANGE,
    "environment": "#d9b03f",
    "scoring": GREEN,
    "publication": "#8e6bbf",
    "evaluation": "#c98bb9",
    "turns": "#5fb3b3",
    "end": "#d5d9dd",
    "controller": GREY,
}
"""Of what is waited for; stacked in this order."""
CAUSE_LABELS = {"training": "trainer's step", "turns": "sleep, wake", "end": "run's end"}
_TOLD = 0.005
"""Causes with smaller shares of the time are not drawn."""
COLUMNS = 3
MAX_USER_PANELS = 9
MAX_NAME = 60
"""Characters of a run's or a metric's name."""


def write_report(folder: str | Path | RunFolder) -> Path:
    """Draw report.png and return its path. Loads matplotlib."""
    place = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    figure = picture_of(place)
    with _style():
        partial = place.report.with_suffix(".partial.png")
        figure.savefig(partial, dpi=110)
    os.replace(partial, place.report)
    return place.report


def picture_of(place: RunFolder) -> Figure:
    """What report.png is of."""
    lines = place.read_metrics()
    if not lines:
        raise RunFolderError("a report is drawn from a run's metrics.jsonl, empty or missing here", str(place.path))
    evaluations = evaluated_sets(place.read_events("evaluated"))
    users = sorted({key for line in lines for key in line if key.startswith(USER)})
    charted = users[:MAX_USER_PANELS]

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = 2 + -(-len(charted) // COLUMNS)
    figure = Figure(figsize=(14, 3.7 * rows), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    with _style():
        _draw(figure, rows, place, lines, evaluations, charted)
        title = _title(place, lines, evaluations)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        if len(users) > len(charted):
            left_out = f"and {len(users) - len(charted):,} more metrics of users in metrics.jsonl"
            figure.supxlabel(left_out, fontsize=9, color=GREY, x=0.99, ha="right")
    return figure


def _style() -> AbstractContextManager[None]:
    import matplotlib

    matplotlib.use("Agg")
    settings: dict[Any, Any] = {
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
        # Names of runs and metrics may hold dollar signs.
        "text.parse_math": False,
    }
    return matplotlib.rc_context(settings)


def _draw(
    figure: Figure,
    rows: int,
    place: RunFolder,
    lines: list[dict[str, Any]],
    evaluations: dict[str, list[dict[str, Any]]],
    users: Sequence[str],
) -> None:
    grid = figure.add_gridspec(rows, COLUMNS)
    cells = [grid[row, column] for row in range(rows) for column in range(COLUMNS)]
    axes = [figure.add_subplot(cell) for cell in (*cells[:3], *cells[4:6], *cells[6 : 6 + len(users)])]
    halves = cells[3].subgridspec(2, 1, hspace=0.0)
    waiting = [figure.add_subplot(halves[half]) for half in range(2)]
    _reward(axes[0], lines, evaluations)
    _length(axes[1], lines)
    _staleness(axes[2], lines, _staleness_bound(place))
    _idle(waiting[0], lines, "trainer", "Trainer idle")
    _idle(waiting[1], lines, "engine", "Engines idle")
    _throughput(axes[3], lines)
    _policy(axes[4], lines)
    for axis, key in zip(axes[5:], users, strict=True):
        _user(axis, lines, key)
    last = max(line["step"] for line in lines)
    first = 0 if evaluations else min(line["step"] for line in lines)
    for axis in (*axes, *waiting):
        axis.set_xlabel("training step")
        _mark_steps(axis, first, last, most=4 if axis in waiting else 7)
    waiting[0].set_xlabel("")
    waiting[0].tick_params(labelbottom=False)


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


def _reward(axis: Axes, lines: list[dict[str, Any]], evaluations: dict[str, list[dict[str, Any]]]) -> None:
    _curve(axis, lines, "reward_mean", BLUE, "reward, training")
    for place, (name, events) in enumerate(list(evaluations.items())[: len(SET_COLOURS)]):
        metric = metric_name(events)
        label = f"{metric}, {shortened(name, 24)}" if len(evaluations) > 1 else f"{metric}, held out"
        steps, values = _xy(events, "pass_1")
        colour = SET_COLOURS[place]
        axis.plot(steps, values, "o-", color=colour, markersize=4.5, linewidth=1.6, label=label)
        low, high = (_xy(events, key)[1] for key in ("low95", "high95"))
        if np.isfinite(low).any():
            axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    rewards = [line["reward_mean"] for line in lines if line.get("reward_mean") is not None]
    rewards += [event["pass_1"] for events in evaluations.values() for event in events]
    if all(0 <= reward <= 1 for reward in rewards):
        axis.set_ylim(0, 1.02)
    axis.set_title("Reward")
    _legend(axis)


def _length(axis: Axes, lines: list[dict[str, Any]]) -> None:
    _curve(axis, lines, "length_mean", BLUE, "mean length")
    axis.set_title("Length")
    axis.set_ylabel("tokens per completion")
    _from_zero(axis)
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


def _idle(axis: Axes, lines: list[dict[str, Any]], who: str, title: str) -> None:
    """Idle shares by cause, one on top of the other; of runs that did not note the causes, their sum alone."""
    steps, whole = _xy(lines, f"{who}_idle_frac")
    reach = _reach(len(steps))
    parts = {why: _xy(lines, f"{who}_idle_{why}_frac")[1] for why in CAUSE_COLOURS}
    known = {
        why: running_mean(np.nan_to_num(part), reach) for why, part in parts.items() if np.isfinite(part).any()
    }
    told = {why: part for why, part in known.items() if part.mean() >= _TOLD}
    if told:
        colours = [CAUSE_COLOURS[why] for why in told]
        labels = [CAUSE_LABELS.get(why, why) for why in told]
        if len(steps) == 1:
            steps, told = (
                np.array([steps[0] - 0.5, steps[0] + 0.5]),
                {why: np.repeat(p, 2) for why, p in told.items()},
            )
        axis.stackplot(steps, *told.values(), colors=colours, labels=labels, alpha=0.75, linewidth=0)
    else:
        _curve(axis, lines, f"{who}_idle_frac", ORANGE if who == "engine" else BLUE, "idle")
    mean = float(np.nanmean(whole)) if np.isfinite(whole).any() else 0.0
    axis.set_title(f"{title} {mean:.0%}" + (", waiting for" if told else ""))
    axis.set_ylim(0, 1.0)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(_percent())
    if told:
        handles, labels = axis.get_legend_handles_labels()
        order: dict[str, Any] = {"handles": handles[::-1], "labels": labels[::-1]}
        axis.legend(**order, loc="upper left", bbox_to_anchor=(1.0, 1.06), handlelength=0.9, fontsize=7.5)


def _throughput(axis: Axes, lines: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import EngFormatter

    _curve(axis, lines, "gen_tokens_per_s", ORANGE, "generated")
    _curve(axis, lines, "train_tokens_per_s", BLUE, "trained")
    axis.set_title("Throughput")
    axis.set_ylabel("tokens per second")
    _from_zero(axis)
    axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(axis)


def _policy(axis: Axes, lines: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    _curve(axis, lines, "entropy", GREEN, "entropy")
    axis.set_title("Policy")
    axis.set_ylabel("nats per token")
    _from_zero(axis)
    beside = axis.twinx()
    _curve(beside, lines, "mismatch_kl", RED, "mismatch KL (right)")
    _curve(beside, lines, "drift_kl", ORANGE, "drift KL (right)")
    _from_zero(beside)
    beside.yaxis.set_major_locator(MaxNLocator(5))
    beside.yaxis.set_major_formatter("{x:g}")
    beside.grid(False)
    _legend(axis, beside)


def _user(axis: Axes, lines: list[dict[str, Any]], key: str) -> None:
    _curve(axis, lines, key, GREEN, key)
    axis.set_title(shortened(key.removeprefix(USER), 40))
    axis.set_ylabel("mean of the step's episodes")
    axis.yaxis.set_major_formatter("{x:g}")


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────────────


def _curve(axis: Axes, lines: list[dict[str, Any]], key: str, colour: str, label: str) -> None:
    """A metric's values, pale, and their running mean."""
    steps, values = _xy(lines, key)
    smooth = running_mean(values, _reach(len(values)))
    if len(values) > 30:
        axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    known = np.isfinite(np.concatenate([[np.nan], smooth, [np.nan]]))
    # A line through one point is invisible.
    alone = (known[1:-1] & ~known[:-2] & ~known[2:]).any()
    axis.plot(steps, smooth, "o-" if alone else "-", markersize=3.5, color=colour, linewidth=1.8, label=label)


def _from_zero(axis: Axes) -> None:
    """Up from 0, with some room above the highest value."""
    highest = axis.dataLim.y1
    axis.set_ylim(0, 1.08 * highest if np.isfinite(highest) and highest > 0 else 1.0)


def _reach(values: int) -> int:
    return values // 30 if values > 30 else 0


def _mark_steps(axis: Axes, first: int, last: int, most: int) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    room = max(0.02 * (last - first), 0.6 if last == first else 0.0)
    axis.set_xlim(first - room, last + room)
    if last - first < most:
        axis.set_xticks(range(first, last + 1))
    else:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter(EngFormatter(sep="") if last >= 10_000 else "{x:.0f}")


def _legend(axis: Axes, *beside: Axes) -> None:
    """In a line of its own between title and axes: it covers neither a curve nor the title."""
    pairs = [one.get_legend_handles_labels() for one in (axis, *beside)]
    handles = [handle for handles, _ in pairs for handle in handles]
    labels = [label for _, labels in pairs for label in labels]
    columns = 3 if sum(map(len, labels)) < 60 else 2
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.985), "ncols": columns}
    axis.legend(handles, labels, **place, columnspacing=1.0, handlelength=1.2, borderaxespad=0.1, fontsize=8.5)
    axis.set_title(axis.get_title(loc="left"), pad=4 + 13 * -(-len(labels) // columns))


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


def _title(place: RunFolder, lines: list[dict[str, Any]], evaluations: dict[str, list[dict[str, Any]]]) -> str:
    title = f"{shortened(place.path.resolve().name, MAX_NAME)}: {_steps(place, lines)}"
    events = next(iter(evaluations.values()), [])
    if len(events) > 1:
        before, after = (shown(event["pass_1"], metric_name(events)) for event in (events[0], events[-1]))
        title += f"   ·   {metric_name(events)} {before} → {after}"
        failed = events[-1].get("failed")
        if isinstance(failed, int) and failed:
            title += f" ({failed:,} failed)"
    return title


def _steps(place: RunFolder, lines: list[dict[str, Any]]) -> str:
    """As the summary says it, where there is one of these steps."""
    step = lines[-1]["step"]
    noun = " step" if step == 1 else " steps"
    try:
        summary = json.loads(place.summary.read_text(encoding="utf-8"))
        if summary["steps"] == step:
            return steps_in_words(summary, noun)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return f"{step:,}{noun} so far"


def shortened(name: str, most: int) -> str:
    """With its middle left out where it is longer than `most` characters."""
    if len(name) <= most:
        return name
    return f"{name[: most // 2]}…{name[len(name) - (most - most // 2 - 1) :]}"


# ── Evaluations ──────────────────────────────────────────────────────────────────────────────────────────


def evaluated_sets(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Valid evaluations by the name of their set; the first set is the one that chooses the best."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        for name, line in sets_of(event).items():
            if isinstance(valid_number(line), int | float):
                found.setdefault(name, []).append({**line, "step": event["step"]})
    return found


def metric_name(events: list[dict[str, Any]]) -> str:
    """What the numbers of a set's evaluations are."""
    return "reward" if any(metric_of(event) == "reward" for event in events) else "accuracy"


def _staleness_bound(place: RunFolder) -> int | None:
    if not place.config.is_file():
        return None
    stored = tomllib.loads(place.config.read_text(encoding="utf-8"))
    return msgspec.convert(stored.get("buffer", {}), BufferConfig).staleness_bound


if __name__ == "__main__":
    print(write_report(sys.argv[1]))

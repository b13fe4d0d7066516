"""A run's progress on standard error: a live bar in a terminal, otherwise a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headrace.telemetry.evaluations import best_of_text, metric_of, result, sets_of, shown, warning
from headrace.telemetry.failures import TOLD_FROM, told

PLAIN_EVERY_S = 5.0


class RunProgress:
    """Takes metric lines and evaluations; a `Watcher` of the telemetry. Not thread-safe."""

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name = name
        self.steps = steps
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._began = clock()
        self._first: int | None = None
        self._evaluated: tuple[str, str] | None = None
        """What the last evaluation counts, and its number."""
        self._failing = ""
        """How many training episodes fail, when that is worth telling."""
        self._line: dict[str, Any] = {}
        self._printed_at = float("-inf")
        self._printed_tenth = -1
        self._live: Live | None = None
        if live if live is not None else self._stream.isatty():
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[left]}"),
                expand=True,
            )
            self._task = self._bar.add_task(name, total=steps, left="starting")
            console = Console(file=self._stream)
            self._live = Live(self._view({}), console=console, refresh_per_second=4, redirect_stdout=False)
            self._live.start()

    def step(self, line: dict[str, Any]) -> None:
        done = int(line["step"])
        if self._first is None:
            # The first line's step was under way when the clock began: it counts as one done step.
            self._first = done - 1
        left = self._left(done)
        if self._live is not None:
            self._bar.update(
                self._task, completed=done, left=f"{duration(left)} left" if done < self.steps else "done"
            )
            self._show(line)
        elif self._due(done):
            print(self._sentence(done, line, left), file=self._stream, flush=True)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "alarm":
            self._alarm(fields)
        if kind == "failing":
            self._failing = told(fields, 60) if fields["share"] >= TOLD_FROM else ""
            self._show(self._line)
        if kind == "evaluated" and "pass_1" in fields:
            self._evaluation(fields)

    def _evaluation(self, fields: dict[str, Any]) -> None:
        metric = metric_of(fields)
        invalid = "" if fields.get("valid", True) else " (invalid)"
        # The reward in training stands beside it.
        name = "held-out reward" if metric == "reward" else metric
        self._evaluated = name, shown(fields["pass_1"], metric) + invalid
        for name, line in sets_of(fields).items():
            where = f" of {name}" if fields.get("sets") else ""
            text = f"evaluation{where} at step {fields.get('step', '?')}: {result(line)}"
            if best := best_of_text(line, metric_of(line)):
                text += f", {best}"
            caution = warning(line)
            if self._live is None:
                self._say(f"{text}. {caution}" if caution else text)
            elif caution:
                self._say(f"{text}. {caution}", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        if self._live is not None:
            self._live.console.print(Text(f"[{self.name}] {text}", style=style))
        else:
            print(f"[{self.name}] {text}", file=self._stream, flush=True)

    def _alarm(self, fields: dict[str, Any]) -> None:
        if fields["metric"] == "failed_frac":
            self._failure_alarm(fields)
            return
        text = f"step {fields['step']}: {fields['metric']} is {fields['value']:.3g}, "
        healthy = f"healthy is {fields['low']:g} to {fields['high']:g}"
        advice = fields["advice"][:1].upper() + fields["advice"][1:]
        text += f"{healthy}. {advice}." if fields["on"] else f"healthy again ({healthy})."
        self._say(text, "yellow" if fields["on"] else "green")

    def _failure_alarm(self, fields: dict[str, Any]) -> None:
        where = f"step {fields['step']}: training episodes"
        if not fields["on"]:
            self._say(
                f"{where} succeed again: {fields['share']:.0%} of the last {fields['episodes']:,} failed.", "green"
            )
            return
        advice = fields["advice"][:1].upper() + fields["advice"][1:]
        self._say(f"{where} fail: {told(fields)}. {advice}.", "yellow")

    def _show(self, line: dict[str, Any]) -> None:
        self._line = line
        if self._live is not None:
            self._live.update(self._view(line))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ── Numbers ──────────────────────────────────────────────────────────────────────────────────────────

    def _left(self, done: int) -> float:
        """Seconds until the end, at the pace so far."""
        trained = done - (self._first or 0)
        return (self._clock() - self._began) / max(trained, 1) * max(self.steps - done, 0)

    def _due(self, done: int) -> bool:
        now = self._clock()
        tenth = 10 * done // max(self.steps, 1)
        # Hours-long runs say less and less: a fiftieth of the time gone by.
        pause = max(PLAIN_EVERY_S, (now - self._began) / 50)
        due = tenth > self._printed_tenth or now - self._printed_at >= pause or done >= self.steps
        if due:
            self._printed_at, self._printed_tenth = now, tenth
        return due

    # ── Pictures ─────────────────────────────────────────────────────────────────────────────────────────

    def _sentence(self, done: int, line: dict[str, Any], left: float) -> str:
        facts = "  ".join(f"{label} {value}" for label, value in self._facts(line))
        return f"[{self.name}] step {done}/{self.steps}  {facts}  left {duration(left)}"

    def _view(self, line: dict[str, Any]) -> Table:
        view = Table.grid(expand=True)
        view.add_row(self._bar)
        text = Text("  ")
        for label, value in self._facts(line):
            text.append(f"{label} ", style="dim").append(f"{value}   ", style="bold")
        view.add_row(text)
        return view

    def _facts(self, line: dict[str, Any]) -> list[tuple[str, str]]:
        def show(key: str, form: str) -> str:
            value = line.get(key)
            return format(value, form) if isinstance(value, int | float) else "–"

        facts = [
            ("reward", show("reward_mean", ".3f")),
            ("tok/s", f"{show('gen_tokens_per_s', ',.0f')} gen, {show('train_tokens_per_s', ',.0f')} train"),
            ("staleness", f"{show('staleness_mean', '.1f')} (max {show('staleness_max', '.0f')})"),
            ("idle", f"{show('engine_idle_frac', '.0%')} gen, {show('trainer_idle_frac', '.0%')} train"),
        ]
        if self._failing:
            facts.append(("failed", self._failing))
        if self._evaluated is not None:
            facts.insert(1, self._evaluated)
        return facts


def duration(seconds: float) -> str:
    """As people say it: 42s, 3m 05s, 2h 14m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"

"""Weights & Biases: a run's metrics, evaluations and some episodes, by a thread of its own.

step, evaluated, examples ──▶ queue ──▶ thread ──▶ wandb's own process ──▶ its server, or RUN/wandb offline

step, evaluated, examples ──▶ queue ──▶ thread ──▶ wandb's process ──▶ its server, or RUN/wandb when offline
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InputError
from headrace.telemetry.config import WandbConfig
from headrace.telemetry.examples import Example

MAX_PENDING = 10_000
"""Jobs that may wait; further ones are left out."""


class WandbTracker:
    """One session of a run. Methods return at once and raise nothing; not thread-safe."""

    def __init__(self, folder: Path, settings: WandbConfig, config: Mapping[str, Any]):
        self._folder, self._settings, self._config = folder, settings, config
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(MAX_PENDING)
        self.failure: Exception | None = None
        """Why nothing is sent any more."""
        self._thread = threading.Thread(target=self._serve, name="wandb", daemon=True)
        self._thread.start()

    def step(self, line: Mapping[str, Any]) -> None:
        values = {f"train/{key}": value for key, value in line.items() if _number(value)}
        self._put(lambda run: run.log({"step": int(line["step"]), **values}))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """`values` by their whole names."""
        self._put(lambda run: run.log({"step": step, **values}))

    def examples(self, examples: Sequence[Example]) -> None:
        def log(run: Any) -> None:
            import wandb

            names = sorted({name for one in examples for name in one.metrics})
            columns: list[str | int] = [
                *(name for name in Example._fields if name != "metrics"),
                *(f"user/{name}" for name in names),
            ]
            rows = [[*one[:-1], *(one.metrics.get(name) for name in names)] for one in examples]
            run.log({"step": examples[0].step, "episodes": wandb.Table(columns=columns, data=rows)})

        if examples:
            self._put(log)

    def close(self, timeout_s: float) -> None:
        """Everything said so far is handed to wandb, unless that takes longer."""
        self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"is still sending after {timeout_s:.0f} s")

    def _put(self, job: Callable[[Any], None] | None) -> None:
        if self.failure is None:
            try:
                self._queue.put_nowait(job)
            except queue.Full:
                self._give_up(
                    InputError(f"at most {MAX_PENDING:,} messages wait for wandb", None, "look at its log")
                )

    def _serve(self) -> None:
        try:
            run = self._open()
            while self.failure is None and (job := self._queue.get()) is not None:
                job(run)
            run.finish()
        except Exception as error:
            self._give_up(error)

    def _open(self) -> Any:
        import wandb

        mode = self._settings.mode
        # Without credentials it would ask for them in the terminal, and wait.
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise InputError(
                'recording.wandb.mode = "online" needs wandb\'s credentials',
                None,
                'run `wandb login`, set WANDB_API_KEY, or use mode = "offline"',
            )
        run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=self._settings.name or self._folder.resolve().name,
            mode=mode,
            dir=str(self._folder),
            config=dict(self._config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run begins again at an earlier step: the x axis is ours, not wandb's count of messages.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _give_up(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._warn(f"gets nothing more, training goes on: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        print(f"headrace: wandb {text}", file=sys.stderr, flush=True)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

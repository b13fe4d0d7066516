"""Where a run goes on: the ledger's books closed, the version's number decided. Used by every orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.ledger import Ledger, Lost
from headrace.pipeline import Progress


@dataclass(frozen=True)
class Start:
    """How a session begins."""

    session: int
    progress: Progress
    first_sequence: int
    """Of the next group to be admitted."""
    task_position: int = 0
    returned_tasks: tuple[int, ...] = ()


def open_session(
    ledger: Ledger, state: dict[str, Any] | None, *, config: str = "", lost: Lost | None = None
) -> Start:
    """Begin a run, or go on from a checkpoint's `state` (None when there is none).

    Weights restored from a checkpoint keep their version's number only when no later one was given out; otherwise
    they get a new number whose parent is the old, and what was sampled or trained beyond it is orphaned. `config`
    and `lost` are the ledger's (`Ledger.recover`).
    """
    restored = None if state is None else int(state["version"])
    session = ledger.recover(restored, config, lost)
    following = ledger.next_version()
    keeps_number = restored is not None and restored == following - 1
    progress = Progress(
        step=0 if state is None else int(state["step"]),
        version=restored if keeps_number and restored is not None else following,
        parent=None if keeps_number else restored,
        recorded=keeps_number,
    )
    first = ledger.next_sequence()
    if state is None:
        return Start(session, progress, first)
    progress.teacher = state["teacher"]
    progress.best = state["best"]
    progress.evaluations = list(state["evaluations"])
    tasks = state["tasks"]
    return Start(session, progress, first, tasks["position"], tuple(tasks["returned"]))

"""`headrace audit`: laws 1 to 4 on a finished or crashed run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.audit.laws import PROVENANCE, Violation, check_laws
from headrace.audit.tolerance import Comparison, tolerance_of
from headrace.config.load import read_config
from headrace.config.run import RunConfig
from headrace.ledger import Ledger
from headrace.records import Turn
from headrace.telemetry.episodes import StoredEpisode, read_episodes
from headrace.telemetry.folder import RunFolder


@dataclass
class AuditReport:
    """What an audit found."""

    ledger: dict[str, Any]
    violations: list[Violation] = field(default_factory=list)
    episodes: int = 0
    """Stored episodes looked at."""
    recomputed: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return not self.violations


def run_audit(folder: Path, recompute: int = 0) -> AuditReport:
    """Check the laws on what the run left; with `recompute`, also that many episodes' log-probs."""
    place = RunFolder(folder).require()
    config = read_config(place.config)
    ledger = Ledger(place.ledger, create=False)
    stored = list(read_episodes(place))
    report = AuditReport(ledger=ledger.sums(), episodes=len(stored))
    report.violations += check_laws(
        ledger,
        stored,
        place.read_events(),
        bound=config.buffer.staleness_bound,
        group_size=config.training.group_size,
        epochs=config.training.epochs,
    )
    ledger.close()
    if recompute:
        _recompute(report, config, place, stored, recompute)
    return report


def _recompute(
    report: AuditReport, config: RunConfig, place: RunFolder, stored: list[StoredEpisode], wanted: int
) -> None:
    from headrace.audit.kept import KeptVersions
    from headrace.audit.recompute import replay_logprobs

    kept = KeptVersions(Path(config.model.path), place.versions, config.engine, config.training.lora)
    chosen = _spread([item for item in stored if _replayable(item, kept.numbers)], wanted)
    comparison = Comparison(tolerance := tolerance_of(config.engine))
    replayed: list[tuple[str, Turn, np.ndarray]] = []
    for item in chosen:
        for index, turn in enumerate(item.episode.turns):
            if not len(turn.tokens):
                continue
            context = item.episode.full_context(index)
            again = replay_logprobs(kept.model, context, turn)
            shaken = replay_logprobs(kept.shaken, context, turn) if tolerance.needs_shaking else again
            comparison.add(turn, len(context), abs(again - turn.logprobs), abs(shaken - again))
            replayed.append((f"{item.episode.id} turn {index}", turn, again))
    found: list[Violation] = []
    for number, token in comparison.broken_turns():
        which, turn, again = replayed[number]
        what = (
            f"token {token} of version {turn.versions[token]}: log-prob {turn.logprobs[token]:.6f},"
            f" recomputed {again[token]:.6f}"
        )
        found.append(Violation(PROVENANCE, which, what))
    if not found:
        for kind, off, rounding in comparison.broken_kinds():
            what = f"log-probs are {off:.2g} from the recomputed on average; rounding explains some {rounding:.2g}"
            found.append(Violation(PROVENANCE, f"all tokens after {kind} of {len(chosen)} episodes", what))
    every = comparison.differences
    report.violations += found
    report.recomputed = {
        "asked": wanted,
        "episodes": len(chosen),
        "tokens": len(every),
        "max_abs_diff": float(every.max(initial=0.0)),
        "mean_abs_diff": float(every.sum()) / max(len(every), 1),
    }


def _replayable(item: StoredEpisode, kept: set[int]) -> bool:
    needed = {event.version for turn in item.episode.turns for event in turn.lineage}
    return bool(needed) and needed <= kept


def _spread(items: list[StoredEpisode], wanted: int) -> list[StoredEpisode]:
    """An even choice over the run, those that saw a swap first."""
    swapped = [item for item in items if item.episode.version_min != item.episode.version_max]
    steady = [item for item in items if item.episode.version_min == item.episode.version_max]
    half = min(len(swapped), max(wanted // 2, wanted - len(steady)))
    return [*_evenly(swapped, half), *_evenly(steady, wanted - half)]


def _evenly(items: list[StoredEpisode], wanted: int) -> list[StoredEpisode]:
    if wanted >= len(items):
        return items
    return [items[i * len(items) // wanted] for i in range(wanted)]

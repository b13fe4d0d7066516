"""Recompute stored episodes under the very versions that sampled them: log-probs, and what sampling kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headrace.audit.draws import Margin, draw_problems, margin_of
from headrace.audit.evidence import Evidence
from headrace.audit.findings import PROVENANCE, Findings
from headrace.audit.kept import KeptVersions
from headrace.audit.recompute import Look, replay_logprobs
from headrace.audit.sample import Place, Sample
from headrace.audit.tolerance import Comparison, tolerance_of
from headrace.errors import RecordError
from headrace.records import Turn
from headrace.telemetry.episodes import StoredEpisode


def recompute_episodes(evidence: Evidence, sample: Sample, findings: Findings) -> dict[str, Any]:
    """Log-probs of the chosen episodes. Fewer than were asked for is a violation, unless no more are stored."""
    assert evidence.folder is not None
    config, wanted = evidence.config, sample.wanted
    kept = KeptVersions(Path(config.model.path), evidence.folder.versions, config.engine, config.training.lora)
    chosen = sample.places()
    comparison, margin = Comparison(tolerance := tolerance_of(config.engine)), margin_of(config.engine)
    replayed: list[tuple[str, Turn, np.ndarray]] = []
    for item in _read(evidence, chosen):
        for index, turn in enumerate(item.episode.turns):
            if not len(turn.tokens) or turn.fault() is not None:
                continue
            where = f"{item.episode.id} turn {index}"
            try:
                context = item.episode.full_context(index)
                problems: dict[int, str] = {}
                again = replay_logprobs(kept.model, context, turn, _looking_at(turn, margin, problems))
                shaken = replay_logprobs(kept.shaken, context, turn) if tolerance.needs_shaking else again
            except (RecordError, IndexError, ValueError) as error:
                findings.add(PROVENANCE, where, f"it cannot be recomputed: {error}")
                continue
            comparison.add(turn, len(context), abs(again - turn.logprobs), abs(shaken - again))
            replayed.append((where, turn, again))
            for token, problem in problems.items():
                findings.add(PROVENANCE, where, f"token {token}: {problem}")
    _judge(comparison, replayed, len(chosen), findings)
    stored = findings.checked["episodes"]
    if len(chosen) < min(wanted, stored):
        what = f"{len(chosen)} of the {wanted} asked for: weights are kept of no more, or were deleted"
        findings.add(PROVENANCE, "recomputed episodes", what)
    every = comparison.differences
    return {
        "asked": wanted,
        "episodes": len(chosen),
        "tokens": len(every),
        "max_abs_diff": float(every.max(initial=0.0)),
        "mean_abs_diff": float(every.sum()) / max(len(every), 1),
    }


def _looking_at(turn: Turn, margin: Margin, problems: dict[int, str]) -> Look:
    def look(hidden: Tensor, head: Tensor, rows: slice) -> None:
        problems.update(draw_problems(hidden, head, turn, rows, margin))

    return look


def _judge(
    comparison: Comparison, replayed: list[tuple[str, Turn, np.ndarray]], episodes: int, findings: Findings
) -> None:
    broken = False
    for number, token in comparison.broken_turns():
        which, turn, again = replayed[number]
        what = (
            f"token {token} of version {turn.versions[token]}: log-prob {turn.logprobs[token]:.6f},"
            f" recomputed {again[token]:.6f}"
        )
        findings.add(PROVENANCE, which, what)
        broken = True
    if broken:
        return
    for kind, off, rounding in comparison.broken_kinds():
        what = f"log-probs are {off:.2g} from the recomputed on average; rounding explains some {rounding:.2g}"
        findings.add(PROVENANCE, f"all tokens after {kind} of {episodes} episodes", what)


def _read(evidence: Evidence, places: list[Place]) -> Iterator[StoredEpisode]:
    wanted: dict[int, set[int]] = {}
    for place in places:
        wanted.setdefault(place.step, set()).add(place.line)
    for stored in evidence.steps:
        lines = wanted.get(stored.step)
        if lines is not None:
            yield from (item for number, item in enumerate(stored.episodes()) if number in lines)

"""What a simulated run leaves for the audit."""

from __future__ import annotations

from typing import NamedTuple

from headrace.audit.laws import Violation, check_laws
from headrace.config.run import RunConfig
from headrace.records import Episode
from headrace.simulator.run import Outcome


class Stored(NamedTuple):
    episode: Episode
    trained_version: int
    produced_version: int


def violations(outcome: Outcome, config: RunConfig) -> list[Violation]:
    stored = [
        Stored(episode, batch.version, produced)
        for batch, produced in outcome.world.batches
        for episode in batch.episodes
    ]
    return list(
        check_laws(
            outcome.world.ledger,
            stored,
            outcome.world.events,
            bound=config.buffer.staleness_bound,
            group_size=config.training.group_size,
            epochs=config.training.epochs,
        )
    )

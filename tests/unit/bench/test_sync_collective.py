"""bench sync's broadcasts, end to end on a shape that takes no time."""

from __future__ import annotations

import pytest

from headrace.bench.sync import collective


def test_every_way_delivers_and_the_figures_are_ratios_of_the_rows() -> None:
    rows, figures = collective.measure("tiny", rounds=2, options={"bucket_bytes": 1 << 16})
    assert [row["way"] for row in rows] == list(collective.WAYS)
    assert {row["mb"] for row in rows} == {0.215168}
    seconds = {row["way"]: row["seconds"] for row in rows}
    assert figures == {
        f"{ours}_over_{theirs}": pytest.approx(seconds[theirs] / seconds[ours])
        for ours in ("bucketed", "checked")
        for theirs in ("per_parameter", "in_place")
    }


def test_what_does_not_arrive_as_it_was_sent_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    take = collective._Trainer.take
    monkeypatch.setattr(collective._Trainer, "take", lambda self, way, digest=False: (take(self, way)[0], 1))
    with pytest.raises(RuntimeError, match="in_place: what arrived is not what was sent"):
        collective.measure("tiny", rounds=1, ways=["in_place"])

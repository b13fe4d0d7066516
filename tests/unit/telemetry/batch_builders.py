"""Batches with every column filled, and the numbers that are hard to write down."""

from __future__ import annotations

import numpy as np

from headrace.records import Batch, Episode, Group, KvEvent, Routes, Sampling, Support, Task, Turn


def make_turn(seed: int, length: int = 5, **changes: object) -> Turn:
    random = np.random.default_rng(seed)
    fields: dict[str, object] = {
        "tokens": random.integers(0, 1000, length).astype(np.int32),
        "logprobs": -random.random(length).astype(np.float32) * 10,
        "versions": np.sort(random.integers(3, 6, length)).astype(np.int32),
        "context": np.array([1, 2, 3], np.int32),
        "stop": "end",
        "seed": 2**62 + seed,
        "engine": "engine-0",
    }
    return Turn(**(fields | changes))  # type: ignore[arg-type]


def full_turn(seed: int) -> Turn:
    """A truncated, routed, twice-swapped continuation of the turn before it."""
    return make_turn(
        seed,
        length=3,
        sampling=Sampling(temperature=0.7, top_k=2, top_p=0.9, min_p=0.01),
        lineage=(
            KvEvent(position=0, version=3, before="recomputed", cause="start"),
            KvEvent(position=5, version=4, before="kept"),
        ),
        support=Support.from_rows([np.array([4, 9]), np.array([7]), np.array([1, 2])]),
        routes=Routes(
            experts=np.arange(12, dtype=np.int16).reshape(3, 2, 2),
            gates=np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 2, 2),
        ),
        stop="length",
        parent=0,
        joins=(0,),
        adapter="lora-a",
        policy="solver",
    )


def make_batch(step: int = 11, groups: int = 2, size: int = 2) -> Batch:
    made = []
    for place in range(groups):
        task = Task(id=f"task-{place}", prompt=f"{place}+1=", answer=str(place + 1), data={"level": place})
        episodes = tuple(
            Episode(
                id=f"g{place}/{number}",
                task=task,
                turns=(make_turn(10 * place + number), full_turn(10 * place + number + 5)),
                reward=0.1 * (number + 1),
                metrics={"tries": 2.0},
                started=1.25,
                finished=3.5 + number,
            )
            for number in range(size)
        )
        made.append(Group(id=f"s{step}-g{place}", sequence=place, task=task, episodes=episodes, admitted_version=3))
    advantages = np.linspace(-1, 1, groups * size, dtype=np.float32)
    return Batch(step=step, version=6, groups=tuple(made), advantages=advantages)


def metric_line(step: int, **changes: float) -> dict[str, float]:
    """A line of metrics.jsonl in which every key is there."""
    from headrace.telemetry.metrics import METRIC_KEYS

    return dict.fromkeys(METRIC_KEYS, 0.5) | {"step": step, "version": step, "time_s": 1.5 * step} | changes

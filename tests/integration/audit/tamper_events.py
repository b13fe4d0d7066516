"""Forgeries of events.jsonl and metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forging import Line, Tampering, on_event, on_file

# ── Events ──────────────────────────────────────────────────────────────────────────────────────────────


def _without(kind: str, **fields: Any) -> Callable[[list[Line]], list[Line]]:
    def change(lines: list[Line]) -> list[Line]:
        return [e for e in lines if e["kind"] != kind or any(e.get(k) != v for k, v in fields.items())]

    return change


def _exchange_checksums(lines: list[Line]) -> None:
    one, other = [e for e in lines if e["kind"] == "published"][2:4]
    one["checksum"], other["checksum"] = other["checksum"], one["checksum"]


def _invent_drop(lines: list[Line]) -> None:
    found = next(e for e in lines if e["kind"] == "dropped")
    lines.append({**found, "episode": "g0000000/0"})


def _reverse_times(lines: list[Line]) -> None:
    times = [e["time"] for e in lines]
    for event, time in zip(lines, reversed(times), strict=True):
        event["time"] = time


def _second_before_first(lines: list[Line]) -> list[Line]:
    at = [place for place, e in enumerate(lines) if e["kind"] == "started"][-1]
    return [*lines[at:], *lines[:at]]


EVENTS = [
    Tampering("one publication removed", on_file("events.jsonl", _without("published", version=12)), True),
    Tampering("all publications removed", on_file("events.jsonl", _without("published")), True),
    Tampering("checksums of two publications exchanged", on_file("events.jsonl", _exchange_checksums), True),
    Tampering(
        "a publication's step changed", on_event("published", lambda e: e.update(step=e["step"] + 1), 3), True
    ),
    Tampering(
        "a publication's version changed to one published already",
        on_event("published", lambda e: e.update(version=e["version"] - 1), 3),
        True,
    ),
    Tampering(
        "a publication to another engine", on_event("published", lambda e: e.update(engines=["engine-9"]), 3), True
    ),
    Tampering("a publication's bytes changed", on_event("published", lambda e: e.update(bytes=1), 3), True),
    Tampering(
        "a publication after its tokens were sampled",
        on_event("published", lambda e: e.update(time=e["time"] + 60), 8),
        True,
    ),
    Tampering("times of events reversed", on_file("events.jsonl", _reverse_times), True),
    Tampering("the sessions' events in the other order", on_file("events.jsonl", _second_before_first), True),
    Tampering(
        "a session's start removed from the events", on_file("events.jsonl", _without("started", session=2)), True
    ),
    Tampering(
        "a session's start has another version",
        on_event("started", lambda e: e.update(version=e["version"] + 1), 1),
        True,
    ),
    Tampering(
        "a drop removed from the events",
        on_file("events.jsonl", lambda lines: lines.remove(next(e for e in lines if e["kind"] == "dropped"))),
        True,
    ),
    Tampering("all drops removed from the events", on_file("events.jsonl", _without("dropped")), True),
    Tampering(
        "a drop's reason changed in the events", on_event("dropped", lambda e: e.update(reason="late")), True
    ),
    Tampering(
        "a drop's detail changed in the events", on_event("dropped", lambda e: e.update(detail="all is well")), True
    ),
    Tampering("a trained episode dropped in the events", on_file("events.jsonl", _invent_drop), True),
    Tampering(
        "a checkpoint removed from the events", on_file("events.jsonl", _without("checkpoint", step=14)), True
    ),
    Tampering(
        "a checkpoint's version changed in the events",
        on_event("checkpoint", lambda e: e.update(version=e["version"] - 1), -1),
        True,
    ),
    Tampering(
        "recorded counts changed",
        on_event("recorded", lambda e: e.update(episodes_written=e["episodes_written"] - 8), -1),
        True,
    ),
    Tampering(
        "the recorded fraction lowered in the events",
        on_event("recording", lambda e: e.update(fraction_of_groups=0.5), -1),
        True,
    ),
    Tampering(
        "an evaluation invented",
        on_file(
            "events.jsonl",
            lambda lines: lines.append(
                {
                    "kind": "evaluated",
                    "time": lines[-1]["time"],
                    "step": 14,
                    "version": 18,
                    "pass_1": 0.99,
                    "best": True,
                }
            ),
        ),
        True,
    ),
    Tampering(
        "a failed publication invented",
        on_file(
            "events.jsonl",
            lambda lines: lines.append(
                {"kind": "sync_failed", "time": lines[-1]["time"], "version": 9, "who": "engine-0", "why": "x"}
            ),
        ),
        True,
    ),
]


# ── Metrics ─────────────────────────────────────────────────────────────────────────────────────────────


def _each(**changes: Callable[[float], float]) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        for line in lines:
            for name, of in changes.items():
                line[name] = of(line[name])

    return change


def _one(**changes: Any) -> Callable[[list[Line]], None]:
    return lambda lines: lines[7].update(changes)


METRICS = [
    Tampering(
        "all mean rewards raised", on_file("metrics.jsonl", _each(reward_mean=lambda value: value + 0.5)), True
    ),
    Tampering("one step's mean reward changed", on_file("metrics.jsonl", _one(reward_mean=9.0)), True),
    Tampering("trained tokens of a step changed", on_file("metrics.jsonl", _one(tokens_trained=9999.0)), True),
    Tampering(
        "staleness of all steps set to 0",
        on_file("metrics.jsonl", _each(staleness_max=lambda value: 0.0, staleness_mean=lambda value: 0.0)),
        True,
    ),
    Tampering("a step's version changed in the metrics", on_file("metrics.jsonl", _one(version=3)), True),
    Tampering("a step's metrics removed", on_file("metrics.jsonl", lambda lines: lines[:7] + lines[8:]), True),
    Tampering("a step's metrics doubled", on_file("metrics.jsonl", lambda lines: [*lines[:8], *lines[7:]]), True),
    Tampering("all metrics removed", on_file("metrics.jsonl", lambda lines: []), True),
    Tampering("the loss changed", on_file("metrics.jsonl", _each(loss=lambda value: value - 1)), True),
    Tampering(
        "the gradients' norms halved", on_file("metrics.jsonl", _each(grad_norm=lambda value: value / 2)), True
    ),
    Tampering("the entropy changed", on_file("metrics.jsonl", _each(entropy=lambda value: value * 2)), True),
    Tampering(
        "the mismatch between engine and trainer hidden",
        on_file("metrics.jsonl", _each(mismatch_kl=lambda value: 0.0, kl=lambda value: 0.0)),
        True,
    ),
    Tampering(
        "the learning rate changed in the metrics",
        on_file("metrics.jsonl", _each(learning_rate=lambda value: value / 10)),
        True,
    ),
    Tampering("the drops changed in the metrics", on_file("metrics.jsonl", _each(dropped=lambda value: 0)), True),
    Tampering(
        "the trainer's idle share lowered",
        on_file("metrics.jsonl", _each(trainer_idle_frac=lambda value: 0.0)),
        True,
    ),
    Tampering("the times of steps changed", on_file("metrics.jsonl", _each(time_s=lambda value: value / 2)), True),
    Tampering(
        "metrics that were set aside are changed",
        on_file("metrics.orphaned.jsonl", _each(reward_mean=lambda value: value + 1)),
        True,
    ),
    Tampering(
        "metrics that were set aside are removed", lambda run: (run / "metrics.orphaned.jsonl").unlink(), True
    ),
]

ALL = [*EVENTS, *METRICS]

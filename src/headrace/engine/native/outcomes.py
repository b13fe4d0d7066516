"""Taking in what a step's passes gave: tokens and log-probs to their sequences, and who has ended by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headrace.engine.base import SampleRequest
from headrace.engine.native.plan import Plan, Running
from headrace.engine.native.requests import Sequence
from headrace.engine.native.slots import Slots
from headrace.engine.native.turns import stop_string_met
from headrace.errors import HeadraceError
from headrace.records import Stop

Decode = Callable[[list[int]], str]


class Step(NamedTuple):
    """A step that was begun."""

    plan: Plan
    sequences: list[Sequence]
    """Of the plan's samples."""
    scored: list[Sequence]
    versions: np.ndarray
    """What it was served, by adapter."""
    running: Running


class TakenIn(NamedTuple):
    tokens: int
    """Sampled, of sequences that are still there."""
    ended: list[tuple[Sequence, Stop]]


def begun(plan: Plan, slots: Slots, versions: np.ndarray, running: Running) -> Step:
    sequences = [slots.sequence(slot) for slot in plan.samples.tolist()]
    scored = [slots.sequence(chunk.slot) for chunk in plan.chunks if len(chunk.targets)]
    return Step(plan, sequences, scored, versions.copy(), running)


def take_in(step: Step, slots: Slots, decode: Decode | None, engine: str) -> TakenIn:
    """Waits for the passes. Raises HeadraceError where they gave what is not a number."""
    rows = step.plan.samples
    sampled, scores = step.running.outcome()
    # What was cancelled or ended meanwhile has left its slot, or another has it.
    still = np.array([slots.sequences[r] is s for r, s in zip(rows.tolist(), step.sequences, strict=True)], bool)
    broken = np.flatnonzero(np.isnan(sampled.logprobs) & still)
    _check_numbers(step, [step.sequences[i] for i in broken], engine)
    for place, ids in zip(sampled.truncated.tolist(), sampled.supports, strict=True):
        if still[place]:
            step.sequences[place].supports.append(ids)
    rows, tokens = rows[still], sampled.tokens[still]
    slots.append(rows, tokens, sampled.logprobs[still], step.versions[slots.adapter[rows]])
    at_end = (slots.stop_ids[rows] == tokens[:, None]).any(1)
    at_string = np.zeros_like(at_end)
    for i in np.flatnonzero(slots.has_stop_strings[rows] & ~at_end).tolist():
        at_string[i] = _meets_stop_string(int(rows[i]), slots, decode)
    full = slots.sampled[rows] >= slots.limit[rows]
    ended: list[tuple[Sequence, Stop]] = [
        (slots.sequence(int(rows[i])), "end" if at_end[i] else "stop_string" if at_string[i] else "length")
        for i in np.flatnonzero(at_end | at_string | full).tolist()
    ]
    return TakenIn(len(rows), ended + _take_scores(step, scores, slots, engine))


def _take_scores(step: Step, scores: list[np.ndarray], slots: Slots, engine: str) -> list[tuple[Sequence, Stop]]:
    ended: list[tuple[Sequence, Stop]] = []
    chunks = [chunk for chunk in step.plan.chunks if len(chunk.targets)]
    for chunk, sequence, logprobs in zip(chunks, step.scored, scores, strict=True):
        if slots.sequences[chunk.slot] is not sequence:
            continue
        assert sequence.targets is not None
        _check_numbers(step, [sequence] if np.isnan(logprobs).any() else [], engine)
        last = chunk.last - (sequence.length - len(sequence.targets))
        sequence.logprobs[last - len(logprobs) : last] = logprobs
        sequence.versions[last - len(logprobs) : last] = step.versions[sequence.adapter]
        if last == len(sequence.targets):
            ended.append((sequence, "length"))
    return ended


def _check_numbers(step: Step, broken: list[Sequence], engine: str) -> None:
    if broken:
        # What this step sampled is lost for all of its sequences, so nothing goes on from here. An adapter's B that
        # is no number breaks them all.
        version, *adapters = step.versions.tolist()
        raise HeadraceError(
            f"logits are numbers ({engine}, version {version}{f', adapters {adapters}' if adapters else ''})",
            f"NaN or infinity for requests {[sequence.request.id for sequence in broken]}",
            "the weights published as this version are broken: look at the trainer's loss and gradients",
        )


def _meets_stop_string(slot: int, slots: Slots, decode: Decode | None) -> bool:
    sequence = slots.sequence(slot)
    assert isinstance(sequence.request, SampleRequest)
    assert decode is not None
    sequence.stop_string = stop_string_met(sequence.request, slots.tokens[slot, : slots.sampled[slot]], decode)
    return sequence.stop_string is not None

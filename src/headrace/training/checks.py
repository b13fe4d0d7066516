"""What is not trained on: an episode's flaws, seen at the door, and batches that the trainer refuses. No torch."""

from __future__ import annotations

import numpy as np

from headrace.errors import LawBroken, RecordError
from headrace.records import Batch, Episode, Turn

ROUNDING = 1e-3
"""That a log-prob may be above 0."""
LEAST = -1000.0
"""A log-prob that no sampled token has."""


def flaw(episode: Episode, *, newest: int, vocabulary: int | None = None, policy: str = "policy") -> str | None:
    """Why what was sampled in an episode cannot be trained on, or None.

    `newest`: the last version there is. `vocabulary`: every token's id is below it.
    """
    for index, turn in enumerate(episode.turns):
        # Other policies' turns are context.
        why = _unreadable(turn, index, vocabulary)
        if why is None and turn.policy == policy and len(turn.tokens):
            why = _flaw(turn, newest, vocabulary)
        if why is not None:
            return f"turn {index} of episode {episode.id!r}, sampled by {turn.engine or 'an engine'}: {why}"
    return None


def _unreadable(turn: Turn, index: int, vocabulary: int | None) -> str | None:
    if fault := turn.fault():
        return f"{fault[0]} (got {fault[1]})"
    if turn.parent is None and not len(turn.context):
        return "it has no context"
    if turn.parent is not None and not 0 <= turn.parent < index:
        return f"it continues turn {turn.parent}, which is not before it"
    return _outside("token", turn.context, vocabulary) or _outside("token", turn.tokens, vocabulary)


def _outside(what: str, ids: np.ndarray, vocabulary: int | None) -> str | None:
    if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
        return f"{what} ids {ids.min()} to {ids.max()}, of a vocabulary of {vocabulary or 'some'} tokens"
    return None


def _flaw(turn: Turn, newest: int, vocabulary: int | None) -> str | None:
    least, most = turn.logprobs.min(), turn.logprobs.max()
    if not np.isfinite(least + most):
        return "a log-prob is not finite"
    if most > ROUNDING:
        return f"a log-prob is {most:.3g}, more than log 1"
    if least < LEAST:
        return f"a log-prob is {least:.3g}, of a token that is never sampled"
    if turn.versions.max() > newest or turn.versions.min() < 0:
        return f"versions {turn.versions.min()} to {turn.versions.max()}, and the newest is {newest}"
    if fault := turn.sampling.fault():
        return f"{fault[0]} (got {fault[1]})"
    if turn.sampling.truncates and turn.support is None:
        return "its sampling truncates, and no support is recorded"
    if turn.support is not None:
        if why := _outside("support", turn.support.ids, vocabulary):
            return why
        offsets = turn.support.offsets
        hits = np.flatnonzero(turn.support.ids == np.repeat(turn.tokens, np.diff(offsets)))
        # A row of nothing stands for everything, which greedy sampling never keeps.
        within = (np.diff(offsets) == 0) & (turn.sampling.temperature > 0)
        within[np.searchsorted(offsets, hits, side="right") - 1] = True
        if not within.all():
            place = int(np.argmin(within))
            return f"token {turn.tokens[place]}, its {place + 1}., is not within its recorded support"
    return None


def check_batch(
    batch: Batch,
    *,
    version: int,
    max_staleness: int | None,
    vocab_size: int,
    teacher_size: int | None = None,
    policy: str = "policy",
) -> None:
    """Raise LawBroken where the batch breaks the staleness bound or its provenance is impossible, and RecordError
    where a number in it cannot be trained on. Looks at `policy`'s turns; others have versions of their own.

    `teacher_size`: of the vocabulary of a teacher, if there is one.
    """
    if batch.version != version:
        raise LawBroken(
            "staleness",
            "trainer",
            f"batch {batch.step} was made for version {batch.version}, the trainer is at {version}",
        )
    if not np.isfinite(batch.advantages).all():
        index = int(np.flatnonzero(~np.isfinite(batch.advantages))[0])
        episode = list(batch.episodes)[index]
        raise RecordError(
            f"an advantage is finite; episode {episode.id!r}'s is not", float(batch.advantages[index])
        )
    turns = [
        (episode, turn)
        for episode in batch.episodes
        for turn in episode.turns
        if turn.policy == policy and len(turn.tokens)
    ]
    for episode, turn in turns:
        if fault := turn.fault():
            raise RecordError(f"{fault[0]}; in episode {episode.id!r} it is not so", fault[1])
    if not turns:
        return
    versions = np.concatenate([turn.versions for _, turn in turns])
    oldest = int(versions.min())
    if int(versions.max()) > version:
        late = next(episode for episode, turn in turns if turn.versions.max() > version)
        raise LawBroken(
            "provenance",
            "trainer",
            f"episode {late.id!r} has a token of version {versions.max()}, not yet trained at version {version}",
        )
    if max_staleness is not None and version - oldest > max_staleness:
        stale = next(episode for episode, turn in turns if version - turn.versions.min() > max_staleness)
        raise LawBroken(
            "staleness",
            "trainer",
            f"episode {stale.id!r} has a token of version {oldest}; at version {version} with max_staleness "
            f"{max_staleness} the oldest allowed is {version - max_staleness}",
        )
    if not np.isfinite(np.concatenate([turn.logprobs for _, turn in turns])).all():
        bad = next(episode for episode, turn in turns if not np.isfinite(turn.logprobs).all())
        raise _bad_number("log-prob", bad, "look at the engine that sampled it")
    # Every policy's turns: the others' are context.
    columns = [(e, column) for e in batch.episodes for turn in e.turns for column in (turn.context, turn.tokens)]
    supports = [(e, turn.support.ids) for e in batch.episodes for turn in e.turns if turn.support is not None]
    same = "sample and train with the same model and tokenizer"
    _check_tokens([*columns, *supports], vocab_size, "the vocabulary's", same)
    if teacher_size is not None:
        _check_tokens(
            columns, teacher_size, "the teacher's vocabulary's", "name a teacher with rows for all tokens"
        )


def _check_tokens(columns: list[tuple[Episode, np.ndarray]], vocab_size: int, whose: str, remedy: str) -> None:
    tokens = np.concatenate([column for _, column in columns])
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        outside = ((e, column[(column < 0) | (column >= vocab_size)]) for e, column in columns)
        bad, ids = next((e, ids) for e, ids in outside if len(ids))
        raise RecordError(
            f"a token's id is at least 0 and below {whose} size {vocab_size}; in {bad.id!r} one is not",
            int(ids[0]),
            remedy,
        )


def _bad_number(what: str, episode: Episode, remedy: str) -> RecordError:
    return RecordError(
        f"a sampled token's {what} is finite; episode {episode.id!r} has one that is not", remedy=remedy
    )

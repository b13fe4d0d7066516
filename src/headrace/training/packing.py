"""A batch as packed micro-batches: sequences laid end to end, without padding. Pure functions, NumPy only.

    batch ──▶ training_sequences ──▶ partition (by token budget) ──▶ pack ──▶ one Packed per micro-batch

Shape letters: t input tokens, n trained tokens, s sequences, k support ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.errors import RecordError
from headrace.records import Batch, Episode, Turn


class TrainingSequence(NamedTuple):
    """A path of an episode's graph from a root down to the last turn that is trained on it."""

    episode: str
    turns: tuple[Turn, ...]
    trained: tuple[bool, ...]
    """Per turn, whether its sampled tokens are trained here; elsewhere on the path they are only context."""
    advantage: float
    length: int
    """Tokens that go through the model: all but the last, which predicts nothing."""
    num_trained: int
    proximal: np.ndarray | None = None
    """Of its trained tokens, the trainer's log-probs before the batch's first update, where there are several."""
    reference: np.ndarray | None = None
    """Likewise those of the reference policy, where there is one."""


@dataclass(frozen=True)
class Packed:
    """One micro-batch. Input columns have an entry per token that goes through the model, the others one per
    trained token, in the same order."""

    tokens_t: np.ndarray
    positions_t: np.ndarray
    """Each token's place in its own sequence."""
    lengths_s: np.ndarray
    trained_s: np.ndarray
    """Trained tokens of each sequence, all at least 1."""
    trained_turns: np.ndarray
    """Those of each turn that is trained, likewise: another cut of the same column."""
    sources_n: np.ndarray
    """Index, among the input tokens, of the one whose output predicts the trained token."""
    targets_n: np.ndarray
    behaviour_n: np.ndarray
    """float32: the log-prob the token was sampled with."""
    versions_n: np.ndarray
    advantages_n: np.ndarray
    temperatures_n: np.ndarray
    """float32, above 0: a greedy turn's single-token support says it all, and its temperature reads 1."""
    support: tuple[np.ndarray, np.ndarray] | None
    """(ids_k, offsets with n + 1 entries): what each token could have been; an empty row means anything.
    None when no turn truncates."""
    proximal_n: np.ndarray | None = None
    reference_n: np.ndarray | None = None


def training_sequences(batch: Batch, policy: str = "policy") -> list[TrainingSequence]:
    """Every token that `policy` sampled in the batch, in exactly one sequence, in batch order.

    A chain of turns is one sequence. Where an episode forks, each leaf has its own, and what the branches share
    is trained in the first of them and context in the others. Other policies' turns are only context. An
    episode without a sampled token gives nothing.
    """
    sequences: list[TrainingSequence] = []
    for episode, advantage in zip(batch.episodes, batch.advantages.tolist(), strict=True):
        paths = [(0,)] if len(episode.turns) == 1 else _root_to_leaf(episode)
        claimed: set[int] = set()
        for path in paths:
            own = [i not in claimed and _is_trained(episode.turns[i], policy) for i in path]
            if any(own):
                claimed.update(path)
                sequences.append(_sequence(episode, path, own, advantage))
    return sequences


def partition(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in as few micro-batches as a longest-first greedy finds, each within `budget`, of similar size.

    A sequence longer than the budget is alone in its micro-batch. Indices rise within a micro-batch.
    """
    alone = [[i] for i, length in enumerate(lengths) if length > budget]
    rest = sorted((i for i, length in enumerate(lengths) if length <= budget), key=lambda i: -lengths[i])
    total = sum(lengths[i] for i in rest)
    bins = -(-total // budget)
    while rest:
        members: list[list[int]] = [[] for _ in range(bins)]
        heap = [(0, b) for b in range(bins)]
        for i in rest:
            filled, b = heap[0]
            if filled + lengths[i] > budget:
                break
            members[b].append(i)
            heapq.heapreplace(heap, (filled + lengths[i], b))
        else:
            return alone + [sorted(group) for group in members]
        bins += 1
    return alone


def pack(sequences: Sequence[TrainingSequence]) -> Packed:
    """Lay the sequences end to end."""
    turns = [turn for sequence in sequences for turn in sequence.turns]
    is_trained = np.array([flag for sequence in sequences for flag in sequence.trained], bool)
    advantages = [sequence.advantage for sequence in sequences]
    trained_s = np.array([sequence.num_trained for sequence in sequences])
    lengths_s = np.array([sequence.length for sequence in sequences])

    # Whole sequences first, their last tokens included.
    pieces = [piece for turn in turns for piece in (turn.context, turn.tokens)]
    whole = np.concatenate(pieces).astype(np.int64)
    piece_trained = np.zeros(len(pieces), bool)
    piece_trained[1::2] = is_trained
    places_n = np.flatnonzero(np.repeat(piece_trained, [len(piece) for piece in pieces]))

    # Then without them: one place fewer for every sequence that came before.
    tokens_t = np.delete(whole, np.cumsum(lengths_s + 1) - 1)
    starts_s = np.cumsum(lengths_s) - lengths_s
    chosen = [turn for turn, flag in zip(turns, is_trained, strict=True) if flag]
    sizes = [len(turn.tokens) for turn in chosen]
    temperatures = [turn.sampling.temperature or 1.0 for turn in chosen]
    return Packed(
        tokens_t=tokens_t,
        positions_t=np.arange(len(tokens_t)) - np.repeat(starts_s, lengths_s),
        lengths_s=lengths_s,
        trained_s=trained_s,
        trained_turns=np.array(sizes),
        sources_n=places_n - 1 - np.repeat(np.arange(len(sequences)), trained_s),
        targets_n=whole[places_n],
        behaviour_n=np.concatenate([turn.logprobs for turn in chosen]).astype(np.float32),
        versions_n=np.concatenate([turn.versions for turn in chosen]),
        advantages_n=np.repeat(np.array(advantages, np.float32), trained_s),
        temperatures_n=np.repeat(np.array(temperatures, np.float32), sizes),
        support=_support(chosen),
        proximal_n=_joined([sequence.proximal for sequence in sequences]),
        reference_n=_joined([sequence.reference for sequence in sequences]),
    )


def pack_micro_batches(
    sequences: Sequence[TrainingSequence], budget: int, *, shared: bool = False
) -> Iterable[Packed]:
    """`micro_batches`, packed."""
    for members in micro_batches(sequences, budget, shared=shared):
        yield pack([sequences[i] for i in members])


def micro_batches(sequences: Sequence[TrainingSequence], budget: int, *, shared: bool = False) -> list[list[int]]:
    """Indices of the sequences, in micro-batches of at most `budget` tokens; a longer sequence is alone in one.

    Neighbours with the same beginning stay together, as far as a balanced cut allows: a back end may compute
    what they share once. With `shared` it does, and what they begin with counts once.
    """
    units, tokens = _units(sequences, budget, shared)
    return [[i for unit in members for i in units[unit]] for members in partition(tokens, budget)]


def minibatches(
    batch: Batch, sequences: Sequence[TrainingSequence], count: int, seed: Sequence[int]
) -> list[list[TrainingSequence]]:
    """`count` of them, each of as many whole groups as the others or one more, drawn by `seed`; one is all."""
    if count == 1:
        return [list(sequences)]
    group_of = {episode.id: place for place, group in enumerate(batch.groups) for episode in group.episodes}
    places = np.random.default_rng(seed).permutation(len(batch.groups))
    number = {place: i for i, part in enumerate(np.array_split(places, count)) for place in part.tolist()}
    parts: list[list[TrainingSequence]] = [[] for _ in range(count)]
    for sequence in sequences:
        parts[number[group_of[sequence.episode]]].append(sequence)
    return [part for part in parts if part] or [[]]


def _units(sequences: Sequence[TrainingSequence], budget: int, shared: bool) -> tuple[list[list[int]], list[int]]:
    """(runs of sequences with equal first contexts; the tokens of each), cut where they pass a quarter of `budget`.
    With `shared` a context does not count for that cut, and they stay within the budget."""
    units: list[list[int]] = []
    tokens: list[int] = []
    before, beyond = None, 0
    for i, sequence in enumerate(sequences):
        context = sequence.turns[0].context
        more = sequence.length - (len(context) if shared else 0)
        alike = before is not None and np.array_equal(context, before)
        if not alike or beyond + more > budget // 4 or tokens[-1] + more > budget:
            units.append([])
            tokens.append(sequence.length - more)
            beyond = 0
        units[-1].append(i)
        tokens[-1] += more
        beyond += more
        before = context
    return units, tokens


def _is_trained(turn: Turn, policy: str) -> bool:
    return turn.policy == policy and len(turn.tokens) > 0


def _root_to_leaf(episode: Episode) -> list[tuple[int, ...]]:
    parents = {turn.parent for turn in episode.turns}
    for index, turn in enumerate(episode.turns):
        if turn.parent is not None and not 0 <= turn.parent < index:
            raise RecordError(
                f"a turn's parent comes before it; turn {index} of episode {episode.id!r} breaks this", turn.parent
            )
    paths = []
    for leaf in range(len(episode.turns)):
        if leaf not in parents:
            path = [leaf]
            while (parent := episode.turns[path[-1]].parent) is not None:
                path.append(parent)
            paths.append(tuple(reversed(path)))
    return paths


def _sequence(episode: Episode, path: Sequence[int], own: list[bool], advantage: float) -> TrainingSequence:
    end = len(own)
    while not own[end - 1]:  # what follows the last trained token is read by none
        end -= 1
    turns = tuple(episode.turns[i] for i in path[:end])
    length = 0
    for turn, flag in zip(turns, own, strict=False):
        length += len(turn.context)
        if flag and length == 0:
            raise RecordError(
                f"a sampled token has at least one before it; episode {episode.id!r} begins with one",
                remedy="begin the context with the tokenizer's first token",
            )
        if flag and turn.sampling.truncates and turn.support is None:
            raise RecordError(
                f"a turn whose sampling truncates records its support; episode {episode.id!r} has one without",
                turn.sampling,
                "make the engine record the support column",
            )
        length += len(turn.tokens)
    return TrainingSequence(
        episode=episode.id,
        turns=turns,
        trained=tuple(own[:end]),
        advantage=advantage,
        length=length - 1,
        num_trained=sum(len(turn.tokens) for turn, flag in zip(turns, own, strict=False) if flag),
    )


def _joined(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [column for column in columns if column is not None]
    return np.concatenate(known) if known else None


def _support(turns: list[Turn]) -> tuple[np.ndarray, np.ndarray] | None:
    if all(turn.support is None for turn in turns):
        return None
    sizes = [
        np.diff(turn.support.offsets) if turn.support is not None else np.zeros(len(turn.tokens), np.int64)
        for turn in turns
    ]
    offsets = np.zeros(sum(len(size) for size in sizes) + 1, np.int64)
    np.cumsum(np.concatenate(sizes), out=offsets[1:])
    return np.concatenate([turn.support.ids for turn in turns if turn.support is not None]), offsets

"""What the columns of a turn say of each other, of its episode and of the configuration. No weights are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from headrace.audit.findings import PROVENANCE, STALENESS
from headrace.config.run import RunConfig
from headrace.records import Episode, KvEvent, Sampling, Turn
from headrace.rollout.asked import greedy
from headrace.rollout.base import call_of, episode_seed
from headrace.rollout.single_turn import SingleTurn

_ROUNDING = 1e-4
"""A log-prob may be above 0 by this, and that of the only token of a support may differ from 0 by it."""
_OF_THE_FOLDER = -1
"""Version of the weights that an engine loads from the model's folder."""
SINGLE_TURN = f"{SingleTurn.__module__}:{SingleTurn.__qualname__}"
_MOST_CALLS = 1 << 20
"""An episode asks its policy less often: seeds of its turns are of consecutive calls."""

_STOPS = get_args(get_type_hints(Turn)["stop"])
_CAUSES, _BEFORE = (get_args(get_type_hints(KvEvent)[name]) for name in ("cause", "before"))

Problem = tuple[str, str]
"""A law, and what breaks it."""


def engine_names(count: int) -> set[str]:
    """Of the engines that sample what is trained on."""
    return {f"engine-{i}" for i in range(count)}


class TurnRules:
    """Checks the turns of a run's episodes."""

    def __init__(self, config: RunConfig, versions: set[int], vocabulary: int | None = None):
        """`versions`: those that a token may be of."""
        self._versions = versions
        self._vocabulary = vocabulary
        self._bound = config.buffer.staleness_bound
        self._sampling = config.environment.sampling.sampling()
        self._asks_nothing = config.environment.source == SINGLE_TURN
        self._adapter = config.adapter
        self._seed = config.seed
        self._engines = engine_names(config.engine.count)

    def problems(
        self, episode: Episode, *, sequence: int, place: int, trained_at: int
    ) -> Iterator[tuple[int, Problem]]:
        """(the turn's index, what is wrong with it)."""
        base, seeds = episode_seed(self._seed, sequence, place), set()
        lengths: list[int] = []
        for index, turn in enumerate(episode.turns):
            fault = turn.fault() or self._unfit_ids(turn)
            if fault is not None:
                yield index, (PROVENANCE, f"{fault[0]} (got {fault[1]})")
                return
            if turn.parent is not None and not 0 <= turn.parent < index:
                yield index, (PROVENANCE, f"it continues turn {turn.parent}, which is not before it")
                return
            lengths.append(len(turn.context))
            if turn.parent is not None:
                lengths[index] += lengths[turn.parent] + len(episode.turns[turn.parent].tokens)
            for problem in self._joins(episode, index):
                yield index, problem
            for problem in self._turn(turn, lengths[index], trained_at):
                yield index, problem
            call = call_of(base, turn.seed)
            if call >= _MOST_CALLS or call in seeds:
                yield index, (PROVENANCE, f"its seed {turn.seed} is not one of its episode's")
            seeds.add(call)

    def _unfit_ids(self, turn: Turn) -> tuple[str, Any] | None:
        if turn.parent is None and not len(turn.context):
            return "a turn has a context", 0
        columns = [turn.context, turn.tokens, *([] if turn.support is None else [turn.support.ids])]
        for column in columns:
            if len(column) and (column.min() < 0 or column.max() >= (self._vocabulary or 2**31)):
                return "tokens are of the vocabulary", (int(column.min()), int(column.max()))
        return None

    def _joins(self, episode: Episode, index: int) -> Iterator[Problem]:
        """A turn that continues a part of another has that part in its own context."""
        turn = episode.turns[index]
        for other in turn.joins:
            if not 0 <= other < index:
                yield PROVENANCE, f"it was made from turn {other}, which is not before it"
                continue
            source = episode.turns[other]
            if len(turn.joins) == 1 and turn.parent == source.parent:
                shared = np.concatenate([source.context, source.tokens])
                common = min(len(shared), len(turn.context))
                differs = np.flatnonzero(shared[:common] != turn.context[:common])
                if len(differs) and differs[0] < len(source.context):
                    yield PROVENANCE, f"it continues turn {other}, and has another context"

    def _turn(self, turn: Turn, context: int, trained_at: int) -> Iterator[Problem]:
        if turn.policy != "policy" or turn.adapter != self._adapter or turn.engine not in self._engines:
            yield PROVENANCE, f"sampled by {turn.policy!r}, adapter {turn.adapter!r}, at {turn.engine!r}: no such"
        if turn.stop not in _STOPS:
            yield PROVENANCE, f"it stopped for {turn.stop!r}, and turns stop for {', '.join(_STOPS)}"
        yield from self._sampled_with(turn)
        if not len(turn.tokens):
            return
        versions = turn.versions
        if not set(versions.tolist()) <= self._versions or int(versions.max()) > trained_at:
            yield PROVENANCE, f"tokens of versions {_few(versions)}, which version {trained_at} does not come from"
        if self._bound is not None and trained_at - int(versions.min()) > self._bound:
            yield STALENESS, f"a token of version {versions.min()} was trained at {trained_at}, bound {self._bound}"
        if not np.isfinite(turn.logprobs).all() or (turn.logprobs > _ROUNDING).any():
            yield PROVENANCE, "a log-prob is not a log-probability"
        yield from self._lineage(turn, context)
        yield from _support(turn)

    def _sampled_with(self, turn: Turn) -> Iterator[Problem]:
        """The configuration's sampling, but for what the call asked for; the built-in environment asks for nothing.
        That a call did ask is no more than a record here: recomputing tells whether log-probs and draws are so."""
        known = Sampling.__struct_fields__
        if any(name not in known for name in turn.asked):
            yield PROVENANCE, f"its call asked for {turn.asked}, and sampling has {known}"
            return
        if turn.asked and self._asks_nothing:
            yield PROVENANCE, f"its call asked for {turn.asked}, and the run's environment asks for nothing"
            return
        asked = {name: getattr(turn.sampling, name) for name in turn.asked}
        if not all(isinstance(value, int | float) for value in asked.values()):
            yield PROVENANCE, f"its call asked for what is no number: {asked}"
            return
        expected = msgspec.structs.replace(self._sampling, **asked)
        if not _same(turn.sampling, expected):
            yield PROVENANCE, f"sampled with {turn.sampling}, and the run samples with {expected}"
        elif fault := greedy(asked) or turn.sampling.fault():
            yield PROVENANCE, f"its call asked for what is refused: {fault[0]} (got {fault[1]})"

    def _lineage(self, turn: Turn, context: int) -> Iterator[Problem]:
        events = turn.lineage
        if not events or events[0].position != 0:
            yield PROVENANCE, "the KV lineage does not begin at position 0"
            return
        positions = np.asarray([event.position for event in events])
        lineage = np.asarray([event.version for event in events])
        at = context - 1 + np.arange(len(turn.tokens))
        computed = lineage[np.searchsorted(positions, at, side="right") - 1]
        if (np.diff(positions) < 0).any() or (computed != turn.versions).any():
            what = f"token versions {_few(turn.versions)} do not follow from the lineage {_few(lineage)}"
            yield PROVENANCE, what
        if (np.diff(lineage) < 0).any() or positions[-1] > context + len(turn.tokens):
            yield (
                PROVENANCE,
                f"the lineage goes back, or past the end: versions {_few(lineage)} at {_few(positions)}",
            )
        base = None if self._adapter is None else _OF_THE_FOLDER
        if any(event.base != base for event in events):
            yield PROVENANCE, "the lineage names the weights beneath an adapter where there is one, and only there"
        for name, known in (("cause", _CAUSES), ("before", _BEFORE)):
            said = {getattr(event, name) for event in events}
            if not said <= set(known):
                yield (
                    PROVENANCE,
                    f"the lineage has a {name} {sorted(said - set(known))}, and knows {', '.join(known)}",
                )


def _same(one: Any, other: Any) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in one.__struct_fields__)


def _support(turn: Turn) -> Iterator[Problem]:
    sampling, support = turn.sampling, turn.support
    if support is None:
        if sampling.truncates:
            yield PROVENANCE, "sampling was truncated and its support is missing"
        return
    sizes = np.diff(support.offsets)
    rows = np.repeat(np.arange(len(sizes)), sizes)
    inside = np.zeros(len(sizes), bool)
    inside[rows[support.ids == np.repeat(turn.tokens, sizes)]] = True
    if not sampling.truncates:
        inside |= sizes == 0
    if not inside.all():
        yield PROVENANCE, f"token {int(np.argmin(inside))} is not in its own support"
    order = np.lexsort((support.ids, rows))
    twice = (np.diff(support.ids[order]) == 0) & (np.diff(rows[order]) == 0)
    if twice.any():
        yield PROVENANCE, f"the support of token {int(rows[order][1:][twice][0])} has an id twice"
    most = 1 if sampling.temperature == 0 else sampling.top_k
    if most and (sizes > most).any():
        yield PROVENANCE, f"a support has {sizes.max()} tokens, and sampling keeps {most}"
    if most and sampling.top_p == 1 and sampling.min_p == 0 and (sizes < min(most, sizes.max())).any():
        yield PROVENANCE, f"a support has {sizes.min()} tokens, and sampling keeps {most}"
    only = np.abs(turn.logprobs[sizes == 1])
    if (only > _ROUNDING).any():
        yield PROVENANCE, f"the only token of a support has the log-prob {-only.max():.3g}"


def _few(column: np.ndarray) -> str:
    numbers = ", ".join(map(str, column[:8].tolist()))
    return f"[{numbers}]" if len(column) <= 8 else f"[{numbers}, …]"

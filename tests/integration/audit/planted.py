"""Bugs planted in what the controller writes: a real run goes to its end, and its records are wrong.

Each is a patch of one of our own classes in the controller's process. The laws that are checked while a run goes on
do not see any of them. Where a bug can strike now and then it strikes every few times, as bugs do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from audited_runs import CONVERSATION, make_project

import headrace.groups
import headrace.pipeline
import headrace.publication
import headrace.telemetry.writer
from headrace import load_config, train
from headrace.engine.remote import RemoteEngine
from headrace.ledger import _TRAIN, Journal
from headrace.orchestration.vault import FolderVault
from headrace.records import Batch, Episode, Group, Support, Turn, WeightVersion
from headrace.rollout.worker import WorkerRollouts, _Recorder
from headrace.scoring.worker import WorkerScorers
from headrace.telemetry.episodes import episode_lines
from headrace.telemetry.writer import FolderTelemetry

Patch = Callable[[pytest.MonkeyPatch], None]
EVERY = 5
"""A bug that strikes now and then does so every so many times."""

SETTINGS = {"training.steps": 12, "buffer.max_staleness": 6, "buffer.depth": 8}
"""A bound so loose that versions recorded one too low do not end the run, and lags as small as with a tight one."""


@dataclass(frozen=True)
class Planted:
    """One bug."""

    name: str
    plant: Patch
    unseeable: str = ""
    """Why nothing in the folder can tell, where that is so in principle."""


def planted_run(folder: Path, model: Path, bug: Planted | None) -> Path:
    """The folder of a finished run with this bug in it; None: without any."""
    project = make_project(folder, model, CONVERSATION.replace('"user.py:', f'"{folder}/user.py:'))
    config = load_config(str(folder / "config.toml"), [f"{key}={value}" for key, value in SETTINGS.items()])
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            bug.plant(patch)
        summary = train(config, folder=project.run, progress=False)
    assert summary["finished"]
    assert summary["steps"] == SETTINGS["training.steps"]
    return project.run


def replace(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)


# ── What the controller receives from engines ────────────────────────────────────────────────────────────


def on_turns(change: Callable[[Turn], Turn | None]) -> Patch:
    """Change turns on their arrival: every fifth of those for which `change` has another."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sample, count = RemoteEngine.sample, itertools.count()

        async def changed(self: RemoteEngine, request: Any) -> Turn:
            turn = await sample(self, request)
            other = change(turn)
            return turn if other is None or next(count) % EVERY else other

        patch.setattr(RemoteEngine, "sample", changed)

    return plant


def _first_version_lower(turn: Turn) -> Turn | None:
    if not len(turn.tokens) or turn.versions[0] == 0:
        return None
    versions = turn.versions.copy()
    versions[0] -= 1
    return replace(turn, versions=versions)


def _all_versions_lower(turn: Turn) -> Turn | None:
    if not len(turn.tokens) or turn.versions.min() == 0:
        return None
    lineage = tuple(replace(event, version=event.version - 1) for event in turn.lineage)
    return replace(turn, versions=turn.versions - 1, lineage=lineage)


def _swap_unseen(turn: Turn) -> Turn | None:
    """All tokens have the version the turn began with, and so has the lineage."""
    if turn.versions.min() == turn.versions.max():
        return None
    return replace(turn, versions=np.full_like(turn.versions, turn.versions[0]), lineage=turn.lineage[:1])


def _event_missing(turn: Turn) -> Turn | None:
    return replace(turn, lineage=turn.lineage[:-1]) if len(turn.lineage) > 1 else None


def _cache_recomputed(turn: Turn) -> Turn | None:
    if len(turn.lineage) < 2:
        return None
    return replace(turn, lineage=tuple(replace(event, before="recomputed") for event in turn.lineage))


def _support_cut(turn: Turn) -> Turn | None:
    """Each row is cut off after three tokens, the sampled one among them."""
    if turn.support is None:
        return None
    rows = []
    for t, token in enumerate(turn.tokens):
        others = turn.support.row(t)
        rows.append(np.concatenate([[token], others[others != token][:2]]))
    return replace(turn, support=Support.from_rows(rows))


def _shifted(turn: Turn) -> Turn | None:
    return replace(turn, logprobs=np.roll(turn.logprobs, 1)) if len(turn.tokens) > 2 else None


def _untempered(turn: Turn) -> Turn:
    return replace(turn, sampling=replace(turn.sampling, temperature=1.0))


def _unstopped(turn: Turn) -> Turn | None:
    """The token that ended the sequence is not recorded."""
    if turn.stop != "end" or len(turn.tokens) < 2 or turn.support is None:
        return None
    rows = [turn.support.row(t) for t in range(len(turn.tokens) - 1)]
    columns = {name: getattr(turn, name)[:-1] for name in ("tokens", "logprobs", "versions")}
    return replace(turn, **columns, support=Support.from_rows(rows))


# ── How turns become episodes ────────────────────────────────────────────────────────────────────────────


def on_recorded(change: Callable[[_Recorder, Turn], Turn]) -> Patch:
    """Change turns as they are recorded."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        as_continued = _Recorder._as_continued

        def changed(self: _Recorder, turn: Turn, call: Any) -> Turn:
            return change(self, as_continued(self, turn, call))

        patch.setattr(_Recorder, "_as_continued", changed)

    return plant


def _context_of_the_first(recorder: _Recorder, turn: Turn) -> Turn:
    return replace(turn, context=recorder.turns[0].context) if recorder.turns else turn


def _no_parent(recorder: _Recorder, turn: Turn) -> Turn:
    return replace(turn, parent=None)


def _no_joins(recorder: _Recorder, turn: Turn) -> Turn:
    return replace(turn, joins=())


def _one_seed(patch: pytest.MonkeyPatch) -> None:
    """All of a group are sampled with the first one's seed."""
    seed = headrace.groups._episode_seed
    patch.setattr(headrace.groups, "_episode_seed", lambda run, sequence, index: seed(run, sequence, 0))


def _turns_of_another(patch: pytest.MonkeyPatch) -> None:
    """An episode gets the turns of the one that ended before it."""
    run, ended = WorkerRollouts.run, []

    async def changed(self: WorkerRollouts, request: Any) -> Episode:
        episode = await run(self, request)
        ended.append(episode)
        if len(ended) % EVERY or len(ended) < 2 or episode.failure or ended[-2].failure:
            return episode
        return episode.with_(turns=ended[-2].turns)

    patch.setattr(WorkerRollouts, "run", changed)


def _reward_of_another(patch: pytest.MonkeyPatch) -> None:
    """Now and then an episode gets the reward of the one that was scored before it."""
    score, before = WorkerScorers.score, []

    async def changed(self: WorkerScorers, episode: Episode) -> Episode:
        scored = await score(self, episode)
        if scored.reward is None:
            return scored
        before.append(scored.reward)
        return scored.with_(reward=before[-2]) if len(before) > 1 and not len(before) % EVERY else scored

    patch.setattr(WorkerScorers, "score", changed)


# ── How episodes become batches ──────────────────────────────────────────────────────────────────────────


def _advantages_of_another_group(patch: pytest.MonkeyPatch) -> None:
    """Each group is trained with the advantages of the one before it."""
    found = headrace.pipeline.compared

    def rolled(groups: Any, how: Any) -> np.ndarray:
        return np.roll(found(groups, how), len(groups[-1].episodes))

    patch.setattr(headrace.pipeline, "compared", rolled)


def _trained_twice(patch: pytest.MonkeyPatch) -> None:
    """A group has one of its episodes twice when it comes to training. It is booked once."""
    book, build = Journal.train, headrace.pipeline.Batch

    def doubled(**columns: Any) -> Batch:
        first, *others = columns["groups"]
        group = replace(first, episodes=(first.episodes[0], *first.episodes))
        advantages = np.concatenate([columns["advantages"][:1], columns["advantages"]])
        return build(**{**columns, "groups": (group, *others), "advantages": advantages})

    def once(self: Journal, batch: Batch, *rest: Any) -> None:
        first, *others = batch.groups
        group = replace(first, episodes=first.episodes[1:])
        book(self, replace(batch, groups=(group, *others), advantages=batch.advantages[1:]), *rest)

    patch.setattr(headrace.pipeline, "Batch", doubled)
    patch.setattr(Journal, "train", once)


# ── What is booked ───────────────────────────────────────────────────────────────────────────────────────


def on_booking(change: Callable[[Batch, WeightVersion], tuple[Batch, WeightVersion, int]]) -> Patch:
    """Change what the ledger is told of a step: its batch, what it produced, how often it was trained on."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        book = Journal.train

        def changed(
            self: Journal, batch: Batch, produced: WeightVersion, times: int = 1, teacher: Any = None
        ) -> None:
            batch, produced, times = change(batch, produced)
            book(self, batch, produced, times, teacher)

        patch.setattr(Journal, "train", changed)

    return plant


def _booked_twice(batch: Batch, produced: WeightVersion) -> tuple[Batch, WeightVersion, int]:
    return batch, produced, 2 if produced.number == 6 else 1


def _booked_a_version_late(batch: Batch, produced: WeightVersion) -> tuple[Batch, WeightVersion, int]:
    return replace(batch, version=batch.version + 1), produced, 1


def _wrong_parent(batch: Batch, produced: WeightVersion) -> tuple[Batch, WeightVersion, int]:
    other = replace(produced, parent=0) if produced.number == 6 else produced
    return batch, other, 1


def _wrong_step_of_version(batch: Batch, produced: WeightVersion) -> tuple[Batch, WeightVersion, int]:
    return batch, replace(produced, step=produced.step - 1), 1


def _tokens_counted_twice(patch: pytest.MonkeyPatch) -> None:
    receive, count = Journal.receive, itertools.count()

    def changed(self: Journal, episode: str, tokens: int) -> None:
        receive(self, episode, tokens if next(count) % EVERY else 2 * tokens)

    patch.setattr(Journal, "receive", changed)


def _dropped_booked_as_trained(patch: pytest.MonkeyPatch) -> None:
    """What a scorer could not judge is booked like the last step's episodes."""
    book, drop, last = Journal.train, Journal.drop, []

    def train_and_remember(self: Journal, batch: Batch, produced: WeightVersion, *rest: Any) -> None:
        book(self, batch, produced, *rest)
        first = next(batch.episodes)
        last[:] = [(first.version_min, first.version_max, batch.version, produced.number, 1, None)]

    def changed(self: Journal, episode: str, reason: str) -> None:
        if reason != "unreadable" or not last:
            return drop(self, episode, reason)
        self.tokens_trained += self._leave(episode)
        self.trained += 1
        self._pending.append((_TRAIN, (*last[0], episode)))

    patch.setattr(Journal, "train", train_and_remember)
    patch.setattr(Journal, "drop", changed)


def _other_reason(patch: pytest.MonkeyPatch) -> None:
    """A user's reason is booked as a time-out."""
    drop = Journal.drop

    def changed(self: Journal, episode: str, reason: str) -> None:
        drop(self, episode, "timeout" if reason == "unreadable" else reason)

    patch.setattr(Journal, "drop", changed)


def _admitted_later_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    admit = Journal.admit

    def changed(self: Journal, group: str, sequence: int, task: str, version: int, episodes: Any) -> None:
        admit(self, group, sequence, task, version + (sequence % EVERY == 0), episodes)

    patch.setattr(Journal, "admit", changed)


def _other_task_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    """A group is booked under the task of the one before."""
    admit, tasks = Journal.admit, ["t0"]

    def changed(self: Journal, group: str, sequence: int, task: str, version: int, episodes: Any) -> None:
        tasks.append(task)
        admit(self, group, sequence, tasks[-2] if sequence % EVERY == 0 else task, version, episodes)

    patch.setattr(Journal, "admit", changed)


# ── What is stored ───────────────────────────────────────────────────────────────────────────────────────


def on_stored(change: Callable[[Batch, int], tuple[Batch, int]]) -> Patch:
    """Change what the writer is given: a batch, and the version it produced."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        batch_of = FolderTelemetry.batch

        def changed(self: FolderTelemetry, batch: Batch, produced: int, teacher: int | None = None) -> None:
            batch_of(self, *change(batch, produced), teacher)

        patch.setattr(FolderTelemetry, "batch", changed)

    return plant


def _consumed_early(batch: Batch, produced: int) -> tuple[Batch, int]:
    return replace(batch, version=batch.version - 1), produced


def with_groups(change: Callable[[Group], Group]) -> Patch:
    def changed(batch: Batch, produced: int) -> tuple[Batch, int]:
        return replace(batch, groups=tuple(change(group) for group in batch.groups)), produced

    return on_stored(changed)


def _admitted_later(group: Group) -> Group:
    return replace(group, admitted_version=group.admitted_version + (group.sequence % EVERY == 0))


def _rewards_moved(group: Group) -> Group:
    rewards = [episode.reward for episode in group.episodes]
    moved = zip(group.episodes, rewards[1:] + rewards[:1], strict=True)
    return replace(group, episodes=tuple(episode.with_(reward=reward) for episode, reward in moved))


def _both_a_version_early(patch: pytest.MonkeyPatch) -> None:
    """Ledger and file say that batches without a fresh token were consumed one version earlier."""

    def early(batch: Batch) -> Batch:
        newest = max(episode.version_max or 0 for episode in batch.episodes)
        return replace(batch, version=batch.version - 1) if newest < batch.version else batch

    on_booking(lambda batch, produced: (early(batch), produced, 1))(patch)
    on_stored(lambda batch, produced: (early(batch), produced))(patch)


def on_lines(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Patch:
    """Change the lines of a step's file as they are written."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def changed(*arguments: Any) -> Any:
            lines = [msgspec.json.decode(line) for line in episode_lines(*arguments)]
            return [msgspec.json.encode(line) + b"\n" for line in change(lines)]

        patch.setattr(headrace.telemetry.writer, "episode_lines", changed)

    return plant


def _texts_moved(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [line["text"] for line in lines]
    return [{**line, "text": text} for line, text in zip(lines, texts[1:] + texts[:1], strict=True)]


# ── Events, metrics and kept versions ────────────────────────────────────────────────────────────────────


def _checksum_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    digest, seen = headrace.publication.digest_of, [0]

    def before(seal: Any) -> int:
        seen.append(digest(seal))
        return seen[-2]

    patch.setattr(headrace.publication, "digest_of", before)


def _kept_under_the_next_number(patch: pytest.MonkeyPatch) -> None:
    version = FolderVault.version
    patch.setattr(FolderVault, "version", lambda self, number: version(self, number + 1))


def _metrics_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Rewards and lengths of a step are those of the one before."""
    tell, lines = FolderTelemetry.step, []
    names = ("reward_mean", "length_mean", "tokens_trained")

    def changed(self: FolderTelemetry, line: dict[str, Any]) -> None:
        lines.append(dict(line))
        tell(self, {**line, **{name: lines[-2][name] for name in names}} if len(lines) > 1 else line)

    patch.setattr(FolderTelemetry, "step", changed)


PLANTED: list[Planted] = [
    Planted("a token's version one too low", on_turns(_first_version_lower)),
    Planted("a turn's versions and lineage one too low", on_turns(_all_versions_lower)),
    Planted("a swap in mid-sequence not noticed", on_turns(_swap_unseen)),
    Planted("a lineage event missing", on_turns(_event_missing)),
    Planted("kept caches recorded as recomputed", on_turns(_cache_recomputed)),
    Planted("a support cut off", on_turns(_support_cut)),
    Planted("log-probs moved by one token", on_turns(_shifted)),
    Planted("another temperature than was sampled with", on_turns(_untempered)),
    Planted("the token that ends a sequence not recorded", on_turns(_unstopped)),
    Planted("the context of another turn", on_recorded(_context_of_the_first)),
    Planted("parents not recorded", on_recorded(_no_parent)),
    Planted(
        "joins not recorded",
        on_recorded(_no_joins),
        "an environment may give the same tokens itself, and then nothing is joined",
    ),
    Planted("one seed for all of a group", _one_seed),
    Planted("the turns of another episode", _turns_of_another),
    Planted(
        "the reward of another episode, given before advantages",
        _reward_of_another,
        "all that follows was made with it; only the user's scorer, asked again, knows the reward",
    ),
    Planted("the advantages of another group", _advantages_of_another_group),
    Planted("an episode trained twice and booked once", _trained_twice),
    Planted("episodes booked twice", on_booking(_booked_twice)),
    Planted("the consuming version booked one too high", on_booking(_booked_a_version_late)),
    Planted("the consuming version one too low, booked and stored", _both_a_version_early),
    Planted("a version's parent wrong", on_booking(_wrong_parent)),
    Planted("versions' steps one too low", on_booking(_wrong_step_of_version)),
    Planted("tokens counted twice", _tokens_counted_twice),
    Planted("a dropped episode booked as trained", _dropped_booked_as_trained),
    Planted("another reason booked", _other_reason),
    Planted("the admitted version booked one too high", _admitted_later_in_the_ledger),
    Planted("the task of another group booked", _other_task_in_the_ledger),
    Planted("the admitted version stored one too high", with_groups(_admitted_later)),
    Planted("the rewards of other episodes stored", with_groups(_rewards_moved)),
    Planted(
        "the consuming version stored one too low", on_stored(lambda b, v: (replace(b, version=b.version - 1), v))
    ),
    Planted("the produced version stored one too high", on_stored(lambda b, v: (b, v + 1))),
    Planted("the step stored one too high", on_lines(lambda lines: [{**e, "step": e["step"] + 1} for e in lines])),
    Planted("an episode lost from a stored file", on_lines(lambda lines: lines[:-1])),
    Planted("an episode stored twice", on_lines(lambda lines: [lines[0], *lines])),
    Planted("the texts of other episodes stored", on_lines(_texts_moved)),
    Planted("the checksum of the version before published", _checksum_of_the_one_before),
    Planted("weights kept under the next number", _kept_under_the_next_number),
    Planted("metrics of the step before", _metrics_of_the_step_before),
]

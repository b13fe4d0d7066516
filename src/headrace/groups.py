"""From a ticket to a group: its episodes, each scored as it ends.

ticket ─▶ episodes, sampled side by side ─▶ scores ─▶ the buffer, or dropped with a reason
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.buffer.base import Buffer, Ticket
from headrace.config.run import RunConfig
from headrace.engine.base import Sampler
from headrace.errors import GaveUp
from headrace.ledger import Journal, episode_name, group_name
from headrace.records import Episode, Group, Task
from headrace.rollout.base import EpisodeRequest, Rollouts, episode_seed
from headrace.scoring.advantages import compared
from headrace.scoring.base import Scorers
from headrace.telemetry.base import Telemetry
from headrace.training.checks import flaw
from headrace.waits import Waits


@dataclass
class GroupsParts:
    """What groups use."""

    engines: Sampler
    rollouts: Rollouts
    scorers: Scorers
    buffer: Buffer
    journal: Journal
    telemetry: Telemetry
    waits: Waits
    vocabulary: int | None = None
    """As the trainer's model has it."""


class Groups:
    """Those that were admitted, until the trainer takes them or they are dropped."""

    def __init__(
        self,
        config: RunConfig,
        parts: GroupsParts,
        newest: Callable[[], int],
        give_up: Callable[[GaveUp], None],
        on_ended: Callable[[Episode], None] = lambda episode: None,
    ):
        """`newest`: the highest version that a token can have by now. `give_up` is told when nothing succeeds,
        `on_ended` of each episode, scored or failed."""
        self._config, self._parts, self._newest, self._give_up = config, parts, newest, give_up
        self._on_ended = on_ended
        self._running: dict[int, _Running] = {}
        """By the ticket's sequence."""
        self._failures_in_row = 0

    def begin(self, ticket: Ticket, place: int, task: Task, side: asyncio.TaskGroup) -> None:
        """Run it beside all else. `place` is its task's, in the walk through the tasks."""
        name = group_name(ticket.sequence)
        episodes = [episode_name(name, i) for i in range(self._config.training.group_size)]
        self._parts.journal.admit(name, ticket.sequence, task.id, ticket.admitted_version, episodes)
        group = self._running[ticket.sequence] = _Running(name, place, ticket, task, episodes)
        group.task = side.create_task(self._run(group))

    def taken(self, groups: Iterable[Group]) -> None:
        """By the trainer."""
        for group in groups:
            del self._running[group.sequence]

    @property
    def names(self) -> list[str]:
        return sorted(group.id for group in self._running.values())

    @property
    def places(self) -> list[int]:
        """Of their tasks, which will be needed again if the run ends now."""
        return sorted(group.place for group in self._running.values())

    def cancel(self) -> None:
        for group in self._running.values():
            group.task.cancel()

    def drop(self, reason: str) -> None:
        """All that is left of them."""
        for group in self._running.values():
            group.drop_rest(self._parts.journal, reason)

    async def _run(self, group: _Running) -> None:
        """Run a ticket's episodes, score each as it ends, and hand the group over or drop it."""
        parts = self._parts
        episodes = await asyncio.gather(*(self._run_episode(group, i) for i in range(len(group.episodes))))
        parts.waits.group_scored()
        kept = [e for e in episodes if e.failure is None]
        for episode in episodes:
            if episode.failure is not None:
                parts.telemetry.event("dropped", episode=episode.id, reason=episode.failure, detail=episode.detail)
        record = Group(
            id=group.id,
            sequence=group.ticket.sequence,
            task=group.work,
            episodes=tuple(kept),
            admitted_version=group.ticket.admitted_version,
        )
        reason = self._unfit(record)
        if reason is None:
            self._failures_in_row = 0
            await parts.buffer.put(group.ticket, record)
            parts.waits.look_at_groups()
            return
        group.drop_rest(parts.journal, reason)
        parts.telemetry.event("group_dropped", group=group.id, reason=reason)
        del self._running[group.ticket.sequence]
        await parts.buffer.drop(group.ticket)
        parts.waits.look_at_groups()
        self._count_failure(reason, record, episodes)

    def _unfit(self, group: Group) -> str | None:
        """Why a finished group is not trained on, and another is admitted in its place."""
        training = self._config.training
        if len(group.episodes) < training.min_group:
            return "group_below_minimum"
        how = training.comparison._replace(baseline="group", scale="none")
        if training.algorithm.recipe.resample and not compared([group], how).any():
            return "equal_rewards"
        return None

    async def _run_episode(self, group: _Running, index: int) -> Episode:
        parts, name = self._parts, group.episodes[index]
        request = EpisodeRequest(
            id=name,
            task=group.work,
            seed=episode_seed(self._config.seed, group.ticket.sequence, index),
            engine=parts.engines,
            on_tokens=lambda count: parts.journal.receive(name, count),
            on_wasted=lambda count: parts.journal.waste(name, count),
        )
        parts.waits.generates(1)
        try:
            episode = await parts.rollouts.run(request)
        finally:
            parts.waits.generates(-1)
        parts.buffer.ended(group.ticket)
        group.generating -= 1
        if group.generating == 0:
            parts.waits.group_generated()
        if episode.failure is None:
            if episode.num_tokens == 0:
                episode = episode.with_(failure="no_tokens")
            elif why := flaw(episode, newest=self._newest(), vocabulary=parts.vocabulary):
                episode = episode.with_(failure="bad_turn", detail=why)
            else:
                parts.waits.scores(1)
                try:
                    episode = await self._score(group, episode)
                finally:
                    parts.waits.scores(-1)
        if episode.failure is not None:
            group.drop(parts.journal, name, episode.failure)
        self._on_ended(episode)
        return episode

    async def _score(self, group: _Running, episode: Episode) -> Episode:
        if self._config.buffer.late == "wait":
            return await self._parts.scorers.score(episode)
        score = asyncio.ensure_future(self._parts.scorers.score(episode))
        try:
            await asyncio.wait({score, group.late}, return_when=asyncio.FIRST_COMPLETED)
            return score.result() if score.done() else episode.with_(failure="late")
        finally:
            score.cancel()

    def cut(self, ticket: Ticket) -> None:
        """The bound does not wait for this group: what is not finished of it is dropped."""
        group = self._running[ticket.sequence]
        group.late.set_result(None)
        for name in group.episodes:
            self._parts.rollouts.cut(name)

    def _count_failure(self, reason: str, group: Group, episodes: Sequence[Episode]) -> None:
        """A run in which nothing succeeds ends with the reason, rather than burning tasks for ever."""
        self._failures_in_row += 1
        if self._failures_in_row < 8 * self._config.training.groups_per_batch + 100:
            return
        if reason == "equal_rewards":
            why = GaveUp(
                f"of the last {self._failures_in_row} groups none had anything to learn from",
                f"all rewards are {group.episodes[0].reward:g} in the last",
                "begin a run with checkpoints/final, the model so far, and tasks neither solved nor hopeless",
            )
        else:
            last = next(e for e in reversed(episodes) if e.failure)
            why = GaveUp(
                f"the last {self._failures_in_row} groups all failed",
                f"{last.failure}: {last.detail}",
                "look at the environment, the scorer and events.jsonl; --resume goes on",
            )
        self._give_up(why)


@dataclass
class _Running:
    """A ticket's group until the trainer takes it or it is dropped."""

    id: str
    place: int
    """Of its task, in the walk through the tasks."""
    ticket: Ticket
    work: Task
    episodes: list[str]
    gone: set[str] = field(default_factory=set)
    late: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when what is not finished of it is to be dropped."""
    task: asyncio.Task[None] = field(init=False)
    generating: int = field(init=False)
    """Episodes that an environment has, or will have."""

    def __post_init__(self) -> None:
        self.generating = len(self.episodes)

    def drop(self, journal: Journal, episode: str, reason: str) -> None:
        self.gone.add(episode)
        journal.drop(episode, reason)

    def drop_rest(self, journal: Journal, reason: str) -> None:
        for episode in self.episodes:
            if episode not in self.gone:
                self.drop(journal, episode, reason)

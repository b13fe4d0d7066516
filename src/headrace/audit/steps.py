"""Each training step three times over: its rows in the ledger, its stored episodes, its line of metrics.

ledger     ORDER BY produced      ─┐
episodes/step-NNNNNN.jsonl         ├─▶  one step after another, none of them held longer than that
metrics.jsonl                     ─┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from headrace.audit.books import COLUMNS, Row
from headrace.audit.evidence import Evidence, StoredStep
from headrace.audit.findings import LEDGER, RECORDS, STALENESS, Findings
from headrace.audit.outside import Outside
from headrace.audit.sample import Place, Sample
from headrace.audit.turns import TurnRules
from headrace.audit.versions import Tree
from headrace.errors import RecordError
from headrace.ledger import DROPPED, LOST_IN_CRASH, LOST_WITH_LEDGER, ORPHANED, TRAINED
from headrace.records import Episode, Group, Task
from headrace.scoring.advantages import compared, is_masked, shuffle_rewards
from headrace.scoring.base import Truncated
from headrace.scoring.weighted import metric_of, weighted_sum
from headrace.telemetry.episodes import StoredEpisode, is_kept
from headrace.telemetry.metrics import USER, users_keys
from headrace.training.metrics import lag_histogram

_CLOSE = 1e-5
"""Relative difference of sums whose order may differ from one machine to another."""


def check_steps(
    evidence: Evidence, tree: Tree, outside: Outside, findings: Findings, sample: Sample | None = None
) -> None:
    """Every step that the surviving weights come from, and stored steps that there should not be."""
    checker = _Steps(evidence, tree, outside, findings, sample)
    stored = {step.step: step for step in evidence.steps}
    metrics = None if evidence.metrics is None else _Lines(evidence.metrics())
    rows = (Row(*row) for row in evidence.ledger.rows(
        f"SELECT {COLUMNS} FROM episodes WHERE state = 'trained' ORDER BY produced, sequence, place"
    ))  # fmt: skip
    for produced, members in groupby(rows, key=lambda row: row.produced):
        version = tree.versions.get(-1 if produced is None else produced)
        if version is None or version.orphaned:
            continue  # `check_books` tells of it
        batch = _Batch(version.step, version.number, {row.id: row for row in members})
        checker.batch(batch, stored.pop(version.step, None))
        if metrics is not None:
            checker.metrics(batch, metrics.of_step(version.step))
    for step in stored.values():
        checker.beyond(step)
    for step in evidence.orphaned:
        checker.orphans(step)
    if metrics is not None:
        metrics.finish(ahead=evidence.crashed)
        if metrics.problem is not None:
            findings.add(RECORDS, "metrics.jsonl", metrics.problem)


@dataclass
class _Batch:
    """What a step consumed, as the ledger has it."""

    step: int
    produced: int
    rows: dict[str, Row]
    episodes: list[StoredEpisode] = field(default_factory=list)
    """Those that are stored."""

    @property
    def whole(self) -> bool:
        """Whether all of it is stored."""
        return len(self.episodes) == len(self.rows)


class _Lines:
    """Lines of metrics.jsonl, which stand in the order of their steps."""

    def __init__(self, lines: Iterable[dict[str, Any]]):
        self._lines = iter(lines)
        self._next: dict[str, Any] | None = next(self._lines, None)
        self._last = 0
        """The last step that was asked for."""
        self.problem: str | None = None

    def of_step(self, step: int) -> dict[str, Any] | None:
        """The step's line, None if there is none."""
        self._last = step
        while self._next is not None:
            found = self._next.get("step")
            if not isinstance(found, int) or found < step:
                self.problem = self.problem or f"its line of step {found} stands where step {step} should"
            elif found > step:
                return None
            line, self._next = self._next, next(self._lines, None)
            if found == step:
                return line
        return None

    def finish(self, *, ahead: bool) -> None:
        """No line is left. `ahead`: a crash may have come before the ledger's commit of later steps, or before
        those that a restore left behind were set aside."""
        while self._next is not None:
            found = self._next.get("step")
            if not (ahead and isinstance(found, int) and found > self._last):
                self.problem = self.problem or f"it has a line of step {found} after that of step {self._last}"
            self._next = next(self._lines, None)


class _Steps:
    def __init__(self, evidence: Evidence, tree: Tree, outside: Outside, findings: Findings, sample: Sample | None):
        self._sample = sample
        self._evidence, self._tree, self._outside, self._findings = evidence, tree, outside, findings
        config = evidence.config
        self._rules = TurnRules(config, tree.surviving, outside.vocabulary)
        self._training = config.training
        self._seed = config.seed

    # ── A step of the ledger ─────────────────────────────────────────────────────────────────────────────

    def batch(self, batch: _Batch, stored: StoredStep | None) -> None:
        """The stored episodes of a step, against the rows and against themselves."""
        session = next(iter(batch.rows.values())).session
        fraction = self._evidence.fractions.get(session, 1.0)
        expected = {row.id for row in batch.rows.values() if is_kept(row.group, fraction)}
        if stored is None:
            if expected:
                self._findings.checked["episodes_not_stored"] += len(expected)
            return
        seen: set[str] = set()
        for line, item in enumerate(stored.episodes()):
            name = item.episode.id
            self._findings.checked["episodes"] += 1
            if self._sample is not None:
                self._sample.offer(item, Place(batch.step, line))
            if name in seen:
                self._findings.add(LEDGER, name, f"it stands twice in {stored.where}")
            elif name not in batch.rows:
                self._findings.add(LEDGER, name, self._where_else(name, stored.where))
            else:
                seen.add(name)
                self._against_row(item, batch.rows[name], batch)
                batch.episodes.append(_light(item))
        for name in sorted(expected - seen):
            what = f"trained into version {batch.produced}, and not among the stored episodes of {stored.where}"
            self._findings.add(LEDGER, name, what)
        self._groups(batch)

    def _where_else(self, name: str, where: str) -> str:
        rows = self._evidence.ledger.query("SELECT state, reason, produced FROM episodes WHERE id = ?", (name,))
        if not rows:
            return f"it stands in {where}, and is not in the ledger"
        state, reason, produced = rows[0]
        if produced is None:
            return f"it stands in {where}, and the ledger has it {state} ({reason})"
        return f"it stands in {where}, and was trained into version {produced}, which is of another step"

    def _against_row(self, item: StoredEpisode, row: Row, batch: _Batch) -> None:
        episode = item.episode
        pairs = {
            "group": (item.group, row.group),
            "sequence": (item.sequence, row.sequence),
            "task": (episode.task.id, row.task),
            "step": (item.step, batch.step),
            "produced_version": (item.produced_version, row.produced),
            "trained_version": (item.trained_version, row.trained_at),
            "admitted_version": (item.admitted_version, row.admitted),
            "oldest version": (episode.version_min, row.low),
            "newest version": (episode.version_max, row.high),
            "tokens": (episode.num_tokens, row.tokens),
            "teacher": (item.teacher, row.teacher),
        }
        for name, (here, there) in pairs.items():
            if here != there:
                law = STALENESS if "version" in name and name != "produced_version" else LEDGER
                self._findings.add(law, episode.id, f"{name}: stored {here}, in the ledger {there}")
        if item.trained_version is not None and row.trained_at is not None:
            problems = self._rules.problems(
                episode, sequence=row.sequence, place=row.place, trained_at=row.trained_at
            )
            for index, (law, what) in problems:
                self._findings.add(law, f"{episode.id} turn {index}", what)
        self._findings.checked["turns"] += len(episode.turns)
        self._findings.checked["tokens"] += episode.num_tokens
        if episode.failure is not None or episode.finished < episode.started:
            self._findings.add(
                RECORDS, episode.id, f"it ended at {episode.finished}, and began at {episode.started}"
            )
        self._reward(episode)
        for law, what in self._outside.problems(item):
            self._findings.add(law, episode.id, what)

    def _reward(self, episode: Episode) -> None:
        """Against what the scorers gave, where there are several."""
        weights = {one.called: one.weight for one in self._evidence.config.scorer.rewards}
        if not weights:
            return
        given = {name: episode.metrics.get(metric_of(name)) for name in weights}
        rewards = {name: reward for name, reward in given.items() if reward is not None}
        lacking = weights.keys() - rewards.keys()
        if lacking or episode.reward is None:
            self._findings.add(RECORDS, episode.id, f"what {', '.join(sorted(lacking))} gave it is not recorded")
            return
        found = weighted_sum(weights, rewards)
        if not abs(episode.reward - found) <= _CLOSE * (1 + abs(found)):
            what = f"its reward is {episode.reward:.6g}, and what its scorers gave makes {found:.6g}"
            self._findings.add(RECORDS, episode.id, what)

    # ── Rewards and advantages ───────────────────────────────────────────────────────────────────────────

    def _groups(self, batch: _Batch) -> None:
        tasks: dict[str, Task] = {}
        for item in batch.episodes:
            task = tasks.setdefault(item.group, item.episode.task)
            if msgspec.to_builtins(task) != msgspec.to_builtins(item.episode.task):
                self._findings.add(RECORDS, item.episode.id, "its task is another than that of its group")
        recipe, shuffled = self._training.algorithm.recipe, self._training.shuffle_rewards
        members: dict[str, list[StoredEpisode]] = {}
        for item in batch.episodes:
            members.setdefault(item.group, []).append(item)
        counts: dict[str, int] = {}
        for row in batch.rows.values():
            counts[row.group] = counts.get(row.group, 0) + 1
        if shuffled or recipe.scale == "batch":
            if not batch.whole:
                self._findings.checked["advantages_not_checked"] += len(batch.episodes)
                return
            self._advantages(list(members.values()), batch)
        else:
            whole = [group for name, group in members.items() if len(group) == counts[name]]
            self._advantages(whole, batch)

    def _advantages(self, members: list[list[StoredEpisode]], batch: _Batch) -> None:
        groups = [
            Group(
                id=items[0].group,
                sequence=items[0].sequence,
                task=items[0].episode.task,
                episodes=tuple(item.episode for item in items),
            )
            for items in members
        ]
        how = self._training.comparison
        if not groups:
            return
        try:
            if self._training.shuffle_rewards:
                trained_at = next(iter(batch.rows.values())).trained_at or 0
                groups = shuffle_rewards(groups, seed=self._seed + trained_at)
                how = how._replace(overlong=None)
            found = compared(groups, how)
        except RecordError as error:
            self._findings.add(RECORDS, f"step {batch.step}", str(error))
            return
        items = [item for group in members for item in group]
        for item, advantage in zip(items, found.tolist(), strict=True):
            self._findings.checked["advantages"] += 1
            if not abs(item.advantage - advantage) <= _CLOSE * (1 + abs(advantage)):
                what = f"its advantage is {item.advantage:.6g}, and the rewards of its batch give {advantage:.6g}"
                self._findings.add(RECORDS, item.episode.id, what)

    # ── Metrics ──────────────────────────────────────────────────────────────────────────────────────────

    def metrics(self, batch: _Batch, line: dict[str, Any] | None) -> None:
        """The step's line of metrics against the rows, and against the stored episodes where all of them are."""
        if line is None:
            if batch.step not in self._tree.may_lack:
                self._findings.add(RECORDS, f"step {batch.step}", "metrics.jsonl has no line of it")
            return
        rows = batch.rows.values()
        expected: dict[str, float] = {
            "version": batch.produced,
            "groups_trained": len({row.sequence for row in rows}),
            "tokens_trained": sum(row.tokens for row in rows),
            "staleness_max": max((row.trained_at or 0) - (row.low or 0) for row in rows),
        }
        if batch.whole:
            expected |= _measured(batch, self._training.truncated)
            self._users_metrics(batch, line)
        self._findings.checked["metrics_lines"] += 1
        for name, value in expected.items():
            said = line.get(name)
            if not (isinstance(said, int | float) and abs(said - value) <= _CLOSE * (1 + abs(value))):
                what = f"metrics.jsonl has {name} {said!r}, its episodes give {value:.6g}"
                self._findings.add(RECORDS, f"step {batch.step}", what)

    def _users_metrics(self, batch: _Batch, line: dict[str, Any]) -> None:
        said = {name: value for name, value in line.items() if name.startswith(USER)}
        has = users_keys(item.episode.metrics for item in batch.episodes)
        if not said and "failed_frac" not in line:
            return  # of a run from before users' metrics had their place here
        for name in sorted(said.keys() ^ has.keys()):
            where = "metrics.jsonl alone has it" if name in said else "metrics.jsonl does not have it"
            self._findings.add(RECORDS, f"step {batch.step}", f"{name}: {where}")
        for name in said.keys() & has.keys():
            value = said[name]
            if not (isinstance(value, int | float) and abs(value - has[name]) <= _CLOSE * (1 + abs(has[name]))):
                what = f"metrics.jsonl has {name} {value!r}, its episodes give {has[name]:.6g}"
                self._findings.add(RECORDS, f"step {batch.step}", what)

    # ── Stored steps that are not of the surviving weights ───────────────────────────────────────────────

    def beyond(self, stored: StoredStep) -> None:
        """A stored step that no surviving version comes from: a crash may have come before the ledger's commit."""
        for item in stored.episodes():
            ahead = item.produced_version > self._tree.newest
            if self._evidence.crashed and ahead and stored.step > self._tree.step_of_newest:
                self._findings.checked["episodes_ahead_of_the_ledger"] += 1
                continue
            version = self._tree.versions.get(item.produced_version)
            if self._evidence.crashed and version is not None and version.orphaned:
                # The last session died after its restore was booked and before it had set the files aside.
                self._orphan(item, stored.where)
                continue
            what = f"it stands in {stored.where}, and no version of the ledger comes from that step"
            self._findings.add(LEDGER, item.episode.id, what)

    def orphans(self, stored: StoredStep) -> None:
        """Episodes of steps that a restore left behind."""
        if len(self._tree.sessions) < 2:
            what = f"{stored.where} was set aside, and no session was ever restored"
            self._findings.add(LEDGER, f"step {stored.step}", what)
        for item in stored.episodes():
            self._orphan(item, stored.where)

    def _orphan(self, item: StoredEpisode, where: str) -> None:
        name = item.episode.id
        self._findings.checked["orphaned_episodes"] += 1
        rows = self._evidence.ledger.query(
            "SELECT state, reason, produced, trained_at, tokens FROM episodes WHERE id = ?", (name,)
        )
        left = (DROPPED, ORPHANED, item.produced_version, item.trained_version, item.episode.num_tokens)
        unknown = ((DROPPED, LOST_IN_CRASH, None, None), (DROPPED, LOST_WITH_LEDGER, None, None))
        if rows and (rows[0] == left or rows[0][:4] in unknown):
            return
        if rows and rows[0][0] == TRAINED:
            self._findings.add(LEDGER, name, f"it stands in {where}, and the ledger has it trained")
        elif rows:
            self._findings.add(LEDGER, name, f"it stands in {where}, and the ledger has {rows[0]}")
        else:
            self._findings.checked["orphans_unknown_to_the_ledger"] += 1


def _light(item: StoredEpisode) -> StoredEpisode:
    """Without the columns that are not needed any more: a step is held until its last episode is read."""
    turns = tuple(
        msgspec.structs.replace(turn, context=_NONE, logprobs=_NONE, support=None, routes=None, lineage=())
        for turn in item.episode.turns
    )
    return item._replace(episode=item.episode.with_(turns=turns))


_NONE = np.empty(0, np.int32)


def _measured(batch: _Batch, truncated: Truncated) -> dict[str, float]:
    """What a line of metrics says of a batch that is stored whole."""
    rewards = np.array([item.episode.reward for item in batch.episodes], np.float64)
    turns = [turn for item in batch.episodes for turn in item.episode.turns]
    lags = [item.trained_version - turn.versions for item in batch.episodes for turn in item.episode.turns]
    together = np.concatenate(lags)
    moved = {item.group for item in batch.episodes if item.advantage}
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "length_mean": float(np.mean([item.episode.num_tokens for item in batch.episodes])),
        "truncated_frac": float(np.mean([turn.stop == "length" for turn in turns])),
        "staleness_mean": float(together.mean()),
        "staleness_max": float(together.max(initial=0)),
        "zero_advantage_frac": float(np.mean([item.group not in moved for item in batch.episodes])),
        "masked_frac": float(np.mean([is_masked(item.episode, truncated) for item in batch.episodes])),
        "version_spread_batch": float(np.ptp(together)),
        **_spread_of_turns(batch),
        **lag_histogram(together),
    }


def _spread_of_turns(batch: _Batch) -> dict[str, float]:
    """`version_spread_max`, where every sequence is one turn."""
    if any(len(item.episode.turns) != 1 for item in batch.episodes):
        return {}
    return {"version_spread_max": float(max(np.ptp(item.episode.turns[0].versions) for item in batch.episodes))}

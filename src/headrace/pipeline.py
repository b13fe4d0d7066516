"""THE MAP: how a run moves. The same code locally, on a cluster and under the simulator.

             tasks
               │ TaskOrder.take
      ┌────────▼────────┐  episodes   ┌─────────┐  groups   ┌────────┐  batches  ┌──────────┐
      │  rollouts       │────────────▶│ scorers │──────────▶│ buffer │──────────▶│ trainer  │
      │  (envs×engines) │             └─────────┘           └────────┘           └────┬─────┘
      └────────▲────────┘                                                             │ manifest
               └────────────────────────── publisher ◀────────────────────────────────┘

    loop        consumes              waits for                          is unblocked by
    admit       tasks                 the buffer to admit a group        a batch leaving, engines on a newer version
    group ×n    a ticket              its episodes and their scores      engines, workers, being cut (groups.py)
    train       batches               a batch, then its own step         groups finishing
    publish     the newest version    the ledger, then the engines       transfers and swaps (publication.py)
    evaluate    a pinned version      held-out episodes                  the evaluator
    report      finished steps        the components' own clocks         the components answering
    revive      an engine's death     another engine in its place        its start and its first weights
    watch       nothing               a component dying                  never, in a good run

Where engines and trainer share a machine's memory by turns, the engines sleep during a training step (turns.py).
Everything it uses is injected as `Parts`; it imports no torch and touches no disk itself. Time is the event loop's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from headrace.buffer.base import Buffer
from headrace.config.run import RunConfig
from headrace.engine.base import Engine, Sampler
from headrace.engine.pool import EnginePool
from headrace.errors import DeadlineExceeded, GaveUp, HeadraceError, InputError
from headrace.evaluation import Evaluation, evaluate, evaluation_line, is_best
from headrace.groups import Groups, GroupsParts
from headrace.ledger import Journal
from headrace.publication import Publication, PublicationParts
from headrace.records import Batch, Episode, Group, Task, WeightVersion
from headrace.rollout.base import Rollouts
from headrace.rollout.tasks import TaskOrder
from headrace.scoring.advantages import compared, shuffle_rewards
from headrace.scoring.base import Scorers
from headrace.sync.schedule import Publisher
from headrace.telemetry.alarms import RULES, Alarms
from headrace.telemetry.base import Telemetry
from headrace.telemetry.failures import FailureWatch
from headrace.telemetry.metrics import users_keys
from headrace.training.base import StepReport, Trainer
from headrace.turns import Turns, TurnsParts
from headrace.usage import Usage
from headrace.waits import Around, Doing, TimeSpent, Waits

T = TypeVar("T")

RATE_WINDOW_S = 3.0
"""Rates and idle shares in the metrics are means over this long, or over one step if that takes longer."""


class Engines(Sampler, Protocol):
    """The rollout engines as one (see engine/pool.py)."""

    members: list[Any]
    on_idle_changed: Callable[[], None]
    """Called when a member has got its first request, or has answered its last."""

    @property
    def idle_members(self) -> int:
        """How many have no request."""
        ...

    @property
    def version(self) -> int: ...

    async def usage(self) -> Usage: ...


class Vault(Protocol):
    """Where checkpoints and kept versions go. Paths are the trainer's to write; names are the vault's to give."""

    def checkpoint(self, step: int) -> str: ...

    def candidate(self, version: int) -> str: ...

    def final(self) -> str:
        """Where a finished run's model goes."""
        ...

    def version(self, number: int) -> str: ...

    def kept_bytes(self) -> int:
        """Disk space of the kept versions."""
        ...

    async def choose(self, candidate: str, best: bool) -> None:
        """Keep the candidate as the best model so far, or remove it."""
        ...

    async def prune(self) -> None:
        """Remove checkpoints beyond the number to keep."""
        ...


@dataclass
class Parts:
    """What a pipeline is made of."""

    engines: Engines
    rollouts: Rollouts
    scorers: Scorers
    buffer: Buffer
    trainer: Trainer
    publisher: Publisher
    journal: Journal
    telemetry: Telemetry
    vault: Vault
    tasks: TaskOrder
    vocabulary: int | None = None
    """Tokens that the trainer's model knows. None: nobody has said."""
    evaluator: Engine | None = None
    """Serves the version under evaluation, and nothing else."""
    eval_tasks: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    """By the name of their set, as `EvaluationConfig.by_name` has them."""
    deaths: Sequence[Awaitable[Exception]] = ()
    """Each done, with the error, when a component has died that nothing replaces."""
    replace: Callable[[Engine], Awaitable[None]] | None = None
    """Give an engine that is dead or stuck a new process, without weights yet. None: its failure ends the run."""
    cpu_s: Callable[[], float] = time.thread_time
    """Seconds that the controller's own thread has computed."""
    engine_deaths: Callable[[], Awaitable[Engine]] | None = None
    """The next engine that has died, to be replaced."""


@dataclass
class Progress:
    """Where a run stands: what a checkpoint keeps of the controller."""

    step: int = 0
    version: int = 0
    parent: int | None = None
    """What `version` was restored from, when it is a new number for old weights."""
    recorded: bool = False
    """Whether the ledger has `version` already."""
    teacher: int | None = None
    """In self-distillation: the version that the policy learned from last."""
    best: float | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class Pipeline:
    """One run, or the rest of one, from `progress` on."""

    def __init__(self, config: RunConfig, parts: Parts, progress: Progress):
        self.config = config
        self.parts = parts
        self.progress = progress
        self._stopping = asyncio.Event()
        self._gave_up: GaveUp | None = None
        taught = config.training.learns_from_rewards
        self.waits = Waits(asyncio.get_running_loop().time, most_generating=config.generating_episodes)
        self.waits.look_around, self.waits.only_scoring = self._look_around, self._only_scoring
        parts.engines.on_idle_changed = self.waits.look
        self._alarms = Alarms([rule for rule in RULES if taught or rule.metric != "zero_advantage_frac"])
        window = config.training.groups_per_batch * config.training.group_size
        self._failures = FailureWatch(min(max(window, 128), 1024))
        self.publication = Publication(
            config.sync,
            PublicationParts(
                trainer=parts.trainer,
                publisher=parts.publisher,
                engines=parts.engines,
                journal=parts.journal,
                telemetry=parts.telemetry,
                served=self._served,
                replace=parts.replace,
            ),
        )
        self._turns = self._take_turns() if config.placement == "turns" else None
        self._publishing: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[None] | None = None
        self._steps_done: asyncio.Queue[tuple[StepReport, dict[str, float | None]] | None] = asyncio.Queue()
        self._begun = 0.0
        self._batches_taken = progress.step
        self.time_spent: TimeSpent | None = None
        """From the first version on until the last step."""
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._groups = Groups(
            config,
            GroupsParts(
                engines=parts.engines,
                rollouts=parts.rollouts,
                scorers=parts.scorers,
                buffer=parts.buffer,
                journal=parts.journal,
                telemetry=parts.telemetry,
                waits=self.waits,
                vocabulary=parts.vocabulary,
            ),
            newest=lambda: progress.version,
            give_up=self._give_up,
            on_ended=self._watch_failures,
        )
        parts.buffer.on_late = self._groups.cut

    def _served(self) -> None:
        self.parts.buffer.engines_serve(self.parts.engines.version)
        self.waits.look()

    def _look_around(self) -> Around:
        """What the waits do not know by themselves."""
        parts, training = self.parts, self.config.training
        batches_left = training.steps - self._batches_taken
        return Around(
            engines=len(parts.engines.members),
            without_request=parts.engines.idle_members,
            only_scoring=self._only_scoring(),
            publishing=parts.engines.version < self.progress.version,
            all_begun=parts.buffer.outstanding >= batches_left * training.groups_per_batch,
        )

    def _only_scoring(self) -> bool:
        ready = self.parts.buffer.ready
        return ready < self.config.training.groups_per_batch <= ready + self.waits.groups_only_scored

    def _take_turns(self) -> Turns:
        parts = self.parts
        return Turns(
            self.config,
            TurnsParts(
                publication=self.publication,
                engines=parts.engines,
                rollouts=parts.rollouts,
                telemetry=parts.telemetry,
                evaluator=parts.evaluator,
                replace=parts.replace,
            ),
        )

    def stop(self) -> None:
        """End after the current step, with a checkpoint."""
        self._stopping.set()

    def _give_up(self, why: GaveUp) -> None:
        """End in the same way, and then with the reason."""
        self._gave_up = why
        self.stop()

    @property
    def _version(self) -> WeightVersion:
        """The trainer's, between two steps."""
        progress = self.progress
        return WeightVersion(number=progress.version, parent=progress.parent, step=progress.step)

    @property
    def stopped_early(self) -> bool:
        return self._stopping.is_set() and self.progress.step < self.config.training.steps

    async def run(self) -> None:
        """Train to the configured step, or until `stop`."""
        self._begun = asyncio.get_running_loop().time()
        watch = asyncio.ensure_future(self._watch())
        try:
            await self._with(watch, self._run())
        finally:
            watch.cancel()

    async def _run(self) -> None:
        await self._publish_first()
        async with asyncio.TaskGroup() as side:
            admit = side.create_task(self._admit_loop(side))
            report = side.create_task(self._report_loop())
            loops = [admit, side.create_task(self._flush_loop()), side.create_task(self.publication.run())]
            if self.parts.engine_deaths is not None:
                loops.append(side.create_task(self._revive_loop(self.parts.engine_deaths)))
            try:
                await self._train_loop()
            finally:
                for loop in loops:
                    loop.cancel()
                self._groups.cancel()
                self._steps_done.put_nowait(None)
            await report
        await self._finish()
        if self._gave_up is not None and self.stopped_early:
            raise self._gave_up

    # ── admit: tasks → tickets → groups ──────────────────────────────────────────────────────────────────

    async def _admit_loop(self, side: asyncio.TaskGroup) -> None:
        while True:
            ticket = await self.parts.buffer.admit()
            self._groups.begin(ticket, *self.parts.tasks.take(), side)

    # ── train: batches → versions ────────────────────────────────────────────────────────────────────────

    async def _train_loop(self) -> None:
        progress, training = self.progress, self.config.training
        while progress.step < training.steps:
            batch = await self._next_batch()
            if batch is None:
                return
            report = await self._trained(batch)
            progress.step, progress.version = batch.step, report.version
            produced = WeightVersion(number=report.version, parent=batch.version, step=progress.step)
            self.parts.journal.train(batch, produced, training.epochs, report.teacher)
            self._notice_teacher(report)
            self.parts.journal.check()
            self.parts.telemetry.batch(batch, produced.number, report.teacher)
            self._steps_done.put_nowait((report, {**self._at_step_end(), **_users_metrics(batch)}))
            await self._after_step(produced)

    async def _trained(self, batch: Batch) -> StepReport:
        if self._turns is None:
            with self.waits.doing("training"):
                return await self.parts.trainer.train(batch)
        step = batch.step
        if self._evaluates(step):
            # Afterwards the evaluator gets another version, and an evaluation does not end while it sleeps.
            await self._wait_for("evaluation", self._evaluation)
        outdated = self._publishes(step) or step == self.config.training.steps
        with self.waits.doing("turns"):
            self.waits.asleep(True)
            async with self._turns.trainers_turn(outdated=outdated, evaluating=self._evaluating):
                with self.waits.doing("training"):
                    return await self.parts.trainer.train(batch)

    def _notice_teacher(self, report: StepReport) -> None:
        if report.teacher != self.progress.teacher:
            self.progress.teacher = report.teacher
            self.parts.telemetry.event("teacher", step=report.step, version=report.teacher)

    async def _next_batch(self) -> Batch | None:
        """The next batch, or None when the run is being stopped."""
        take = asyncio.ensure_future(self._take())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            with self.waits.doing("batch"):
                await asyncio.wait({take, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not take.done() or self._stopping.is_set():
                return None
            version, groups = take.result()
        finally:
            take.cancel()
            stop.cancel()
        self._batches_taken = self.progress.step + 1
        self._groups.taken(groups)
        how, control = self.config.training.comparison, self.config.training.shuffle_rewards
        rewarded = shuffle_rewards(groups, seed=self.config.seed + version) if control else groups
        # Lengths would be a signal.
        found = compared(rewarded, how._replace(overlong=None) if control else how)
        return Batch(step=self.progress.step + 1, version=version, groups=tuple(groups), advantages=found)

    async def _take(self) -> tuple[int, list[Group]]:
        limit = self.config.limits.batch_s
        try:
            async with asyncio.timeout(limit):
                return await self.parts.buffer.take()
        except TimeoutError:
            waiting = ", ".join(self._groups.names[:5])
            whom = f"a batch ({self.parts.buffer.ready} groups ready; unfinished: {waiting or 'none'})"
            raise DeadlineExceeded(
                "the trainer", whom, limit, "engines and workers, or raise limits.batch_s"
            ) from None

    async def _after_step(self, produced: WeightVersion) -> None:
        """Stage what has to leave the trainer before its weights change again."""
        config, step = self.config, self.progress.step
        last = step == config.training.steps
        publish, judge, turns = self._publishes(step), self._evaluates(step), self._turns
        if self._keeps(step):
            with self.waits.doing("training"):
                await self._keep(produced)
        if judge:
            await self._wait_for("evaluation", self._evaluation)
        if judge or (publish and turns is not None):
            with self.waits.doing("publication"):
                await self._publish_now(produced, rollouts=publish, judge=judge)
        self.publication.produced(produced, due=publish)
        if turns is not None:
            await self._wait_for("publication", self._publishing)
            with self.waits.doing("turns"):
                await turns.engines_turn(step=step, generating=not last, evaluating=self._evaluating)
            self.waits.asleep(False)
        if step % config.training.checkpoint_every == 0 and not last:
            with self.waits.doing("training"):
                await self._checkpoint()

    def _publishes(self, step: int) -> bool:
        """Whether the rollout engines get this step's version. Nothing is sampled under the last."""
        return step % self.config.sync.interval == 0 and step < self.config.training.steps

    def _keeps(self, step: int) -> bool:
        """Whether this version's weights are kept for the audit: runs of as many as one episode can span."""
        bound, recording = self.config.buffer.staleness_bound, self.config.recording
        span = (8 if bound is None else bound) + 2
        room = recording.keep_versions_gib * 2**30 - self.parts.vault.kept_bytes()
        return step % recording.keep_versions_every < span and self.publication.version_bytes <= room

    async def _keep(self, version: WeightVersion) -> None:
        """Keep its weights for the audit. A disk that does not take them costs the audit, not the run."""
        try:
            await self.parts.trainer.keep(version.number, self.parts.vault.version(version.number))
        except InputError as error:
            self.parts.telemetry.event("not_kept", version=version.number, why=str(error))
        else:
            self.parts.telemetry.event("kept", version=version.number)

    def _evaluates(self, step: int) -> bool:
        every, steps = self.config.evaluation.every, self.config.training.steps
        return self.parts.evaluator is not None and (step % every == 0 or step == steps)

    @property
    def _evaluating(self) -> bool:
        """Whether an evaluation is under way, or waits for its version."""
        return self._evaluation is not None and not self._evaluation.done()

    # ── publish: a staged version → engines ──────────────────────────────────────────────────────────────

    async def _publish_first(self) -> None:
        """Before anything is sampled, the engines get the trainer's weights under the trainer's version."""
        progress = self.progress
        version = self._version
        if not progress.recorded:
            self.parts.journal.version(version)
        judged = any(line["step"] == progress.step for line in progress.evaluations)
        judge = self._evaluates(progress.step) and not judged
        await self._publish_now(version, rollouts=True, judge=judge)
        if self._keeps(0):
            await self._keep(version)
        await self._settled(self._publishing)

    async def _publish_now(self, version: WeightVersion, *, rollouts: bool, judge: bool) -> None:
        """This very version, and not a later one. The trainer may go on when this returns."""
        engines: list[Engine] = list(self.parts.engines.members) if rollouts else []
        candidate = self.parts.vault.candidate(version.number)
        if judge:
            assert self.parts.evaluator is not None
            engines.append(self.parts.evaluator)
            await self.parts.trainer.export(candidate)
        self._publishing = self._beside(await self.publication.begin(version, engines))
        if judge:
            self._evaluation = self._beside(
                asyncio.create_task(self._evaluate(version, candidate, self._publishing))
            )

    # ── revive: dead engines → others in their places ────────────────────────────────────────────────────

    async def _revive_loop(self, next_death: Callable[[], Awaitable[Engine]]) -> None:
        while True:
            await self.publication.revive(await next_death())

    # ── evaluate: a pinned version → pass rates ──────────────────────────────────────────────────────────

    async def _evaluate(self, version: WeightVersion, candidate: str, published: asyncio.Task[None]) -> None:
        await asyncio.shield(published)
        parts = self.parts
        assert parts.evaluator is not None
        engine = EnginePool([parts.evaluator], adapter=self.config.adapter, revive_s=self.config.revive_s)
        found: dict[str, Evaluation] = {}
        for name, settings in self.config.evaluation.by_name.items():
            found[name] = await evaluate(
                parts.eval_tasks[name],
                settings,
                rollouts=parts.rollouts,
                scorers=parts.scorers,
                engine=engine,
                seed=self.config.seed,
                concurrency=3 * self.config.engine.max_running // 2,
                name=name,
            )
        await self._judge(version, candidate, found)

    async def _judge(self, version: WeightVersion, candidate: str, found: dict[str, Evaluation]) -> None:
        """The first set chooses the best; what few completions of it count for chooses nothing."""
        before = self.progress.evaluations
        lines = {name: evaluation_line(name, result, before) for name, result in found.items()}
        first, *others = lines
        result = found[first]
        best = result.valid and result.pass_1 is not None and is_best(result.pass_1, first, before)
        if best:
            self.progress.best = result.pass_1
        await self.parts.vault.choose(candidate, best)
        line = {"step": version.step, "version": version.number, "set": first, **lines[first]}
        if others:
            line["sets"] = {name: lines[name] for name in others}
        before.append(line)
        self.parts.telemetry.event("evaluated", **line, best=best)

    # ── report: finished steps → metrics ─────────────────────────────────────────────────────────────────

    async def _report_loop(self) -> None:
        parts = self.parts
        begun = await self._look_at_time()
        seen = deque([begun])
        while (done := await self._steps_done.get()) is not None:
            report, at_end = done
            seen.append(await self._look_at_time())
            while len(seen) > 2 and seen[1].at < seen[-1].at - RATE_WINDOW_S:
                seen.popleft()
            recent, self.time_spent = seen[-1].since(seen[0]), seen[-1].since(begun)
            engines, trainer = recent.engines, recent.trainer
            self._tell(
                {
                    **report.metrics,
                    **at_end,
                    "step": report.step,
                    "version": report.version,
                    "trainer_idle_frac": _share(trainer.idle_s, trainer.wall_s),
                    "engine_idle_frac": _share(engines.idle_s, engines.wall_s),
                    "gen_tokens_per_s": _share(engines.tokens * len(parts.engines.members), engines.wall_s),
                    "train_tokens_per_s": _share(trainer.tokens, trainer.wall_s),
                    **recent.idle_metrics(),
                    **_spent("engine", seen[-1].engines),
                    **_spent("trainer", seen[-1].trainer),
                }
            )

    async def _look_at_time(self) -> TimeSpent:
        engines, trainer = await asyncio.gather(self.parts.engines.usage(), self.parts.trainer.usage())
        return TimeSpent(
            at=asyncio.get_running_loop().time(),
            engines=engines,
            trainer=trainer,
            waited=self.waits.waited(),
            controller_s=self.parts.cpu_s(),
        )

    def _tell(self, line: dict[str, Any]) -> None:
        self.parts.telemetry.step(line)
        for on, rule, value in self._alarms.look(line):
            healthy = {"metric": rule.metric, "value": value, "low": rule.low, "high": rule.high}
            self.parts.telemetry.event("alarm", step=line["step"], on=on, **healthy, advice=rule.advice)

    def _watch_failures(self, episode: Episode) -> None:
        """Tell at once when many fail: a step may be far away."""
        for kind, fields in self._failures.ended(episode.failure, episode.detail):
            self.parts.telemetry.event(kind, step=self.progress.step, **fields)

    def _at_step_end(self) -> dict[str, float | None]:
        return {
            "time_s": asyncio.get_running_loop().time() - self._begun,
            "dropped": sum(self.parts.journal.dropped.values()),
            "failed_frac": self._failures.take_frac(),
            "sync_s": self.publication.last.seconds,
            "swap_pause_s": self.publication.last.pause_s,
            "buffer_groups": self.parts.buffer.ready,
        }

    async def _flush_loop(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self.parts.journal.flush()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────

    async def _finish(self) -> None:
        """Settle what runs beside training, drop what was not trained, and leave a checkpoint."""
        await self._settled(self._publishing)
        if self.stopped_early:
            if self._evaluation is not None:
                self._evaluation.cancel()
        else:
            await self._settled(self._evaluation)
        self._groups.drop("shutdown" if self.stopped_early else "run_finished")
        await self._checkpoint()
        if not self.stopped_early or self._gave_up is not None:
            await self.parts.trainer.export(self.parts.vault.final())
        self.parts.journal.check()
        self.parts.journal.finish()
        await self.parts.journal.flush()

    async def _checkpoint(self) -> None:
        """Durable in this order: the ledger up to this version, then the weights that have it."""
        parts, progress = self.parts, self.progress
        state = {
            "step": progress.step,
            "version": progress.version,
            "teacher": progress.teacher,
            "best": progress.best,
            "evaluations": list(progress.evaluations),
            "tasks": {"position": parts.tasks.position, "returned": [*self._groups.places, *parts.tasks.returned]},
        }
        await parts.journal.flush()
        digest = await parts.trainer.save(parts.vault.checkpoint(progress.step), state)
        parts.journal.checkpoint(self._version, digest)
        await parts.vault.prune()
        parts.telemetry.event("checkpoint", step=progress.step, version=progress.version)

    # ── watch: nothing waits on the dead ─────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Ends with an error as soon as a component has died or something beside training has failed."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(death) for death in self.parts.deaths]
        done, _ = await asyncio.wait([self._failed, *waits], return_when=asyncio.FIRST_COMPLETED)
        raise next(iter(done)).result()

    def _beside(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Let it go on beside training; its failure ends the run as soon as it happens."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None and not self._failed.done():
                self._failed.set_result(task.exception() or HeadraceError("unknown"))

        task.add_done_callback(done)
        return task

    async def _with(self, watch: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
        """Do the work, unless a component dies first."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, watch}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return task.result()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group
        finally:
            ends = [t for t in (task, self._publishing, self._evaluation) if t is not None and not t.done()]
            for end in ends:
                end.cancel()
            # One error has been raised already; what its aftermath raises is not news.
            await asyncio.gather(*ends, return_exceptions=True)

    async def _wait_for(self, what: Doing, task: asyncio.Task[None] | None) -> None:
        with self.waits.doing(what):
            await self._settled(task)

    async def _settled(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            await task


def _users_metrics(batch: Batch) -> dict[str, float]:
    return users_keys(episode.metrics for episode in batch.episodes)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _spent(who: str, usage: Usage) -> dict[str, float]:
    """A component's seconds since it started, as it counts them itself."""
    return {f"{who}_busy_s": usage.busy_s, f"{who}_idle_s": usage.idle_s, f"{who}_overhead_s": usage.overhead_s}


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error a person wants to see: ours before others."""
    causes: list[BaseException] = []

    def walk(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                walk(inner)
        else:
            causes.append(error)

    walk(group)
    return next((c for c in causes if isinstance(c, HeadraceError)), causes[0])

"""A run on one machine: one command, a process for each role.

    controller    this process: the pipeline on an asyncio loop; no tensors, no user's code
    engine-N      samples; engine-eval serves versions under evaluation
    trainer       trains
    environment-N, scorer-N   users' code

All of them end with the controller, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from headrace.bounds import MAX_MESSAGE_BYTES
from headrace.buffer.memory import MemoryBuffer
from headrace.config.advice import advice
from headrace.config.dump import dump_config
from headrace.config.load import check_config
from headrace.config.outside import check_models
from headrace.config.run import RunConfig
from headrace.engine.base import Engine
from headrace.engine.messages import EngineReady
from headrace.engine.pool import EnginePool
from headrace.engine.remote import RemoteEngine
from headrace.errors import ComponentDied, ConfigError, GaveUp
from headrace.ipc import Notice, Peer
from headrace.ledger import Change, Journal, Ledger
from headrace.memory_plan import Plan
from headrace.memory_plan.table import beside, plan_lines
from headrace.orchestration.folder import in_folder, prepare, settle, write_whole
from headrace.orchestration.machine import this_machine
from headrace.orchestration.measured import Peaks, highest, peaks_of
from headrace.orchestration.opening import Given, open_run, refuse_windows, with_source
from headrace.orchestration.planning import plan_of
from headrace.orchestration.processes import CHILD, compute_threads, ready, spawn
from headrace.orchestration.resuming import Standing, inspect_run
from headrace.orchestration.stopping import SIGNALS, execute_beside, handlers_restored
from headrace.orchestration.variables import passed
from headrace.orchestration.vault import FolderVault
from headrace.pipeline import Parts, Pipeline
from headrace.records import Task
from headrace.resume import Start, open_session
from headrace.rollout.tasks import TaskOrder
from headrace.rollout.worker import WorkerRollouts
from headrace.scoring.worker import WorkerScorers
from headrace.sync import open_channel
from headrace.sync.schedule import Publisher
from headrace.telemetry.evaluations import summary_of, warnings_of
from headrace.telemetry.failures import training_warning
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.metrics import users_summary
from headrace.telemetry.progress import RunProgress
from headrace.telemetry.report import write_report_apart
from headrace.telemetry.writer import FolderTelemetry
from headrace.tokenizer import Tokenizer
from headrace.training.remote import RemoteTrainer, TrainerReady
from headrace.workers import Pool

WORKER_NICENESS = 5
"""By how much the priority of users' code is lower. At 5 a busy worker gets a third of what the trainer gets where
they compete for a core, and still all that nobody else wants; where scoring computes much, more would starve it."""


def train(
    config: Given | None = None,
    *,
    environment: Any = None,
    scorer: Any = None,
    run: str | Path | None = None,
    resume: bool = False,
    from_step: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """Execute a run and return its summary.

    `config` is a `RunConfig`, a dict with the tables that a file would have, or a file's path; each is checked in
    the same way. `environment` and `scorer`, and a `source` in a dict, may be classes or functions: of a module, of
    the script that calls this (under `if __name__ == "__main__":`), or of a notebook's cells. The run's folder is
    `run`, or else runs/NAME.

    `resume` goes on from the last checkpoint, or from that of `from_step`, 0 being the model the run began with;
    the folder alone is enough then: `train("runs/mine", resume=True)`. `overwrite` removes a run that is there.
    Ctrl-C, or a notebook's interrupt, ends the run in order; `summary["finished"]` is false then. `folder` is the
    older name of `run`.
    """
    refuse_windows()
    if CHILD in os.environ:
        raise ConfigError(
            'a script calls headrace.train under `if __name__ == "__main__":`, since workers import the script',
            os.environ[CHILD],
            "put the call there",
        )
    place, chosen, definitions, file = open_run(config, run=run or folder, resume=resume)
    for room, thing in (("environment", environment), ("scorer", scorer)):
        if thing is not None:
            chosen = with_source(chosen, room, definitions.reference(thing))
    check_config(chosen)
    # Not the code it names: the calling script may be its own environment, and is not to be run once more.
    check_models(chosen)
    chosen = prepare(place, chosen, resume=resume, overwrite=overwrite, from_step=from_step, file=file)
    with in_folder(place, resume=resume):
        for path, text in definitions.files.items():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, text)
        return execute(chosen, place.path, resume=resume, from_step=from_step, progress=progress)


def run(
    config: RunConfig, folder: Path, *, resume: bool, from_step: int | None = None, progress: bool
) -> dict[str, Any]:
    """Execute a checked and resolved configuration in a folder this process holds. Blocks until the run has ended.

    Where an event loop runs already, as in a notebook, the run gets a thread of its own.
    """

    execution = _Run(config, RunFolder(folder), resume, from_step, progress)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with handlers_restored():
            return asyncio.run(execution.execute())
    return execute_beside(execution)


execute = run
"""Where `run` is a folder."""


class _Run:
    def __init__(self, config: RunConfig, place: RunFolder, resume: bool, from_step: int | None, progress: bool):
        self._config = config
        self._place = place
        self._resume = resume
        self._from_step = from_step
        """What the first attempt resumes from; those after it go on from the newest checkpoint."""
        self._progress = progress
        self._logs = place.path / "logs"
        self._model = str(Path(config.model.path).absolute())
        self._restarts: Counter[str] = Counter()
        self._first_step: int | None = None
        """Done when this session began."""
        self._pipeline: Pipeline | None = None
        """Of the present attempt, once all its parts have started."""
        self._threads = compute_threads(take_turns=config.takes_turns)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._told_to_stop = False
        self._plan: Plan | None = None
        self._peaks: Peaks = {}
        """Memory that processes held at most, over all attempts."""
        self._told: Callable[[str, Notice], None] = lambda who, notice: None
        """What becomes of a component's notices."""

    async def execute(self) -> dict[str, Any]:
        begun = time.monotonic()
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        if self._told_to_stop:
            raise asyncio.CancelledError
        for sentence in advice(self._config):
            self._say(f"note: {sentence}")
        self._plan = plan_of(self._config, self._place.path, this_machine(self._place.path, own_files=True))
        for line in [] if self._plan is None else plan_lines(self._plan):
            self._say(line)
        while True:
            try:
                pipeline = await self._attempt()
                break
            except ComponentDied as error:
                # Others are replaced within the run, as often as they may be. What the trainer had is gone with it.
                self._restarts["run"] += 1
                again = error.who == "trainer" and self._restarts["run"] <= self._config.limits.restarts
                if self._pipeline is None or not again:
                    raise
                self._say(f"{error}. The run goes on from its last checkpoint")
                self._resume = True
            except GaveUp:
                assert self._pipeline is not None
                await self._conclude(self._pipeline, time.monotonic() - begun)
                raise
        return await self._conclude(pipeline, time.monotonic() - begun)

    async def _conclude(self, pipeline: Pipeline, seconds: float) -> dict[str, Any]:
        summary = self._summarise(pipeline, seconds)
        problem = await asyncio.to_thread(write_report_apart, self._place.path)
        if problem:
            print(f"headrace: report.png could not be drawn: {problem}", file=sys.stderr)
        return summary

    async def _attempt(self) -> Pipeline:
        """From the configuration or the last checkpoint to the end, with processes of its own."""
        self._pipeline = None
        self._dead_engines: asyncio.Queue[Engine] = asyncio.Queue()
        self._channel = self._open_channel()
        async with AsyncExitStack() as closing:
            if "descriptor" in self._channel:
                closing.callback(os.close, self._channel["descriptor"])
            self._pipeline = pipeline = await self._assemble(closing)
            self._stop_on_signals()
            try:
                await pipeline.run()
            except Exception:
                # Whatever ended the run, what happened until then is on record.
                await pipeline.parts.journal.flush()
                raise
            finally:
                self._peaks = highest(self._peaks, await peaks_of(self._components, self._worker_pids()))
        return pipeline

    def _open_channel(self) -> dict[str, Any]:
        sync = self._config.sync
        if sync.transport == "files":
            if sync.folder is None:
                # Of an attempt before: nobody reads them any more.
                shutil.rmtree(self._place.weights, ignore_errors=True)
            return open_channel("files", folder=sync.folder or str(self._place.weights))
        if sync.transport == "http":
            return open_channel("http", host=sync.address)
        if sync.transport == "collective":
            # On one machine trainer and engines share a GPU, which NCCL does not allow.
            return open_channel("collective", host=sync.address, backend="sockets", timeout_s=sync.deadline_s)
        return open_channel(sync.transport)

    # ── Putting the parts together ───────────────────────────────────────────────────────────────────────

    async def _assemble(self, closing: AsyncExitStack) -> Pipeline:
        config = self._config
        sets = config.evaluation.by_name
        names = [f"engine-{i}" for i in range(config.engine.count)]
        engine_names = [*names, *(["engine-eval"] if sets else [])]
        environments = await self._pool("environment", closing)
        rollouts = WorkerRollouts(environments, config.environment)
        tasks, eval_tasks = await self._tasks(rollouts)
        scorers, trainer, *engines = await _all_or_none(
            self._pool("scorer", closing),
            self._trainer(closing),
            *(self._engine(name, closing) for name in engine_names),
        )
        self._components = {"trainer": trainer, **{engine.name: engine for engine in engines}}
        self._worker_pids = lambda: [*environments.pids, *scorers.pids]
        vault = FolderVault(self._place.path, keep=config.training.keep_checkpoints)
        ledger = Ledger(self._place.ledger)
        closing.callback(ledger.close)
        start = await self._start(ledger, vault, trainer)
        telemetry = self._telemetry(start)
        closing.push_async_callback(telemetry.close)
        parts = Parts(
            engines=EnginePool(engines[: len(names)], adapter=config.adapter, revive_s=config.revive_s),
            rollouts=rollouts,
            scorers=WorkerScorers(scorers),
            buffer=MemoryBuffer(
                config.buffer,
                batch_groups=config.training.groups_per_batch,
                version=start.progress.version,
                steps=config.training.steps - start.progress.step,
                first_sequence=start.first_sequence,
                generating=config.generating_episodes,
                group_size=config.training.group_size,
            ),
            trainer=trainer,
            publisher=Publisher(config.sync),
            journal=Journal(ThreadStore(ledger), session=start.session, deadline_s=config.limits.commit_s),
            telemetry=telemetry,
            vault=vault,
            tasks=TaskOrder(tasks, config.seed, start.task_position, start.returned_tasks),
            vocabulary=trainer.vocabulary,
            evaluator=engines[-1] if sets else None,
            eval_tasks=eval_tasks,
            deaths=[trainer.peer.died, environments.failed, scorers.failed],
            replace=self._replace_engine,
            engine_deaths=self._dead_engines.get,
        )
        return Pipeline(config, parts, start.progress)

    async def _tasks(self, rollouts: WorkerRollouts) -> tuple[Sequence[Task], dict[str, Sequence[Task]]]:
        """Those of training, and of each set of evaluation. What is wrong with them is known before a model is
        loaded."""
        config = self._config
        tasks = await rollouts.tasks(config.tasks)
        room = config.engine.max_context
        await rollouts.check_prompts(tasks, "tasks", room)
        held_out: dict[str, Sequence[Task]] = {}
        for name, one in config.evaluation.by_name.items():
            held_out[name] = await rollouts.tasks(one.tasks, one.limit)
            where = "evaluation.tasks" if one.tasks is config.evaluation.tasks else f"evaluation.sets.{name}.tasks"
            await rollouts.check_prompts(held_out[name], where, room)
        return tasks, held_out

    async def _start(self, ledger: Ledger, vault: FolderVault, trainer: RemoteTrainer) -> Start:
        standing, state = Standing(), None
        if self._resume:
            group_size = self._config.training.group_size
            standing = await asyncio.to_thread(
                inspect_run, self._place, group_size=group_size, from_step=self._from_step
            )
            self._from_step = None
        if standing.checkpoint is not None:
            state = await trainer.load(str(standing.checkpoint))
        start = await asyncio.to_thread(
            open_session, ledger, state, config=dump_config(self._config), lost=standing.lost
        )
        await asyncio.to_thread(settle, self._place, self._config)
        if state is not None:
            await asyncio.to_thread(ledger.restored_from, int(state["version"]), standing.digest)
        vault.set_aside(start.progress.step)
        if self._first_step is None:
            self._first_step = start.progress.step
        vault.forget_versions(start.progress.version + (1 if start.progress.recorded else 0))
        await trainer.rename(start.progress.version)
        if self._resume:
            self._place.rewind(start.progress.step)
        return start

    def _telemetry(self, start: Start) -> FolderTelemetry:
        config = self._config
        watcher = RunProgress(self._place.path.name, config.training.steps) if self._progress else None
        tokenizer = Tokenizer(self._model)
        telemetry = FolderTelemetry(
            self._place,
            config.recording,
            decode=tokenizer.decode,
            watcher=watcher,
            settings=msgspec.to_builtins(config),
        )
        progress = start.progress
        telemetry.event("started", session=start.session, step=progress.step, version=progress.version)
        self._told = lambda who, notice: telemetry.event(notice.kind, who=who, **notice.fields)
        return telemetry

    async def _trainer(self, closing: AsyncExitStack) -> RemoteTrainer:
        config = self._config
        options = {
            "model": self._model,
            "training": msgspec.to_builtins(config.training),
            "seed": config.seed,
            "max_staleness": config.buffer.staleness_bound,
            "threads": config.training.threads or self._threads,
            "gives_back": config.placement == "turns",
            "channel": self._channel,
            "sender": {
                "payload": config.payload,
                "dtype": config.engine.dtype,
                "anchor_every": config.sync.anchor_every,
            },
        }
        peer = await self._spawn(
            "trainer", "headrace.training.remote:start", options, options["threads"], self._fds
        )
        limits = config.limits
        trainer = RemoteTrainer(peer, step_s=limits.step_s, stage_s=config.sync.deadline_s, close_s=limits.close_s)
        closing.push_async_callback(trainer.close)
        said = await ready(peer, TrainerReady, config.limits.start_s, self._say)
        self._listen(peer)
        trainer.vocabulary = said.vocabulary
        return trainer

    async def _engine(self, name: str, closing: AsyncExitStack) -> RemoteEngine:
        config = self._config
        engine = RemoteEngine(
            await self._engine_process(name),
            deadline_s=config.sync.deadline_s,
            close_s=config.limits.close_s,
            on_death=self._dead_engines.put_nowait,
        )
        closing.push_async_callback(engine.close)
        await ready(engine.peer, EngineReady, config.limits.start_s, self._say)
        self._listen(engine.peer)
        return engine

    async def _engine_process(self, name: str) -> Peer:
        config = self._config
        options = {
            "name": name,
            "model": self._model,
            "engine": msgspec.to_builtins(config.served_engine),
            "threads": config.engine.threads or max(1, self._threads // config.engine.count),
            "channel": self._channel,
            "deadline_s": config.sync.deadline_s,
        }
        return await self._spawn(name, "headrace.engine.serve:start", options, options["threads"], self._fds)

    async def _replace_engine(self, engine: Engine) -> None:
        """A new process for an engine that is dead or stuck."""
        assert isinstance(engine, RemoteEngine)
        self._restarts[engine.name] += 1
        if self._restarts[engine.name] > self._config.limits.engine_restarts:
            died = engine.peer.died
            raise (
                died.result()
                if died.done() and not died.cancelled()
                else ComponentDied(
                    engine.name, f"it was replaced {self._config.limits.engine_restarts} times and failed again"
                )
            )
        await engine.peer.kill()
        self._say(f"{engine.name} is started again")
        engine.adopt(await self._engine_process(engine.name))
        await ready(engine.peer, EngineReady, self._config.limits.start_s, self._say)
        self._listen(engine.peer)

    def _listen(self, peer: Peer) -> None:
        """What it tells of itself are events of the run."""

        def hear(record: Any) -> None:
            if isinstance(record, Notice):
                self._say(f"{peer.name}: {record.fields.get('why', record.kind)}")
                self._told(peer.name, record)

        peer.on_message = hear

    def _say(self, words: str) -> None:
        if self._progress:
            print(f"[{self._place.path.name}] {words}", file=sys.stderr, flush=True)

    async def _pool(self, kind: str, closing: AsyncExitStack) -> Pool:
        config = self._config
        settings: Any = config.environment if kind == "environment" else config.scorer
        entry = "headrace.rollout.worker:start" if kind == "environment" else "headrace.scoring.worker:start"
        options = {"model": self._model, kind: msgspec.to_builtins(settings)}
        pool = Pool(
            kind,
            lambda name: spawn(
                name,
                entry,
                options,
                logs=self._logs,
                environment=passed(os.environ, settings.pass_env),
                niceness=WORKER_NICENESS,
                max_message=MAX_MESSAGE_BYTES,
            ),
            workers=settings.workers,
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
            start_s=config.limits.start_s,
            max_asks=config.environment.max_samples if kind == "environment" else 1,
            say=self._say,
        )
        closing.push_async_callback(pool.close, config.limits.close_s)
        await pool.start()
        return pool

    @property
    def _fds(self) -> list[int]:
        """What the two ends of weight sync inherit."""
        return [self._channel["descriptor"]] if "descriptor" in self._channel else []

    async def _spawn(
        self, name: str, entry: str, options: dict[str, Any], threads: int, fds: Sequence[int] = ()
    ) -> Any:
        return await spawn(name, entry, options, logs=self._logs, fds=fds, threads=threads)

    # ── Ending ───────────────────────────────────────────────────────────────────────────────────────────

    def _stop_on_signals(self) -> None:
        """The first Ctrl-C ends the run in order, the second at once. Beside another loop, `execute_beside` hears
        them."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self._stop()
            for number in SIGNALS:
                loop.remove_signal_handler(number)

        for number in SIGNALS:
            loop.add_signal_handler(number, stop)

    def stop_from_outside(self, *, at_once: bool = False) -> None:
        """See `Stoppable`."""
        if self._loop is None:
            self._told_to_stop = True
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop, at_once)

    def _stop(self, at_once: bool = False) -> None:
        """In order where something runs that can be, and was not told to before."""
        if self._pipeline is None or self._told_to_stop or at_once:
            assert self._task is not None
            self._task.cancel()
            return
        self._told_to_stop = True
        print("headrace: stopping after this step, with a checkpoint (again to stop at once)", file=sys.stderr)
        self._pipeline.stop()

    def _summarise(self, pipeline: Pipeline, seconds: float) -> dict[str, Any]:
        """Also written to summary.json. The ledger's sums are of the whole run; this session began after
        `first_step`, and the seconds are its own."""
        ledger = Ledger(self._place.ledger, read_only=True)
        sums = ledger.sums()
        lag = ledger.query(
            "SELECT COALESCE(MAX(trained_at - version_min), 0) FROM episodes WHERE state = 'trained'"
        )
        session = ledger.query("SELECT MAX(number) FROM sessions")[0][0]
        lengths = ledger.query("SELECT state, AVG(tokens) FROM episodes WHERE tokens > 0 GROUP BY state")
        ledger.close()
        evaluations = pipeline.progress.evaluations
        failing = training_warning(sums)
        summary = {
            "session": session,
            "steps": pipeline.progress.step,
            "first_step": self._first_step,
            "seconds": seconds,
            **summary_of(evaluations),
            "warnings": [*warnings_of(evaluations), *([failing] if failing else [])],
            "staleness_max": lag[0][0],
            "finished": not pipeline.stopped_early,
            "ledger": sums,
            "time": None if pipeline.time_spent is None else pipeline.time_spent.summary(),
            "mean_tokens": {state: round(mean, 2) for state, mean in lengths},
            "evaluations": evaluations,
            "user": users_summary(self._place.read_metrics()),
            "memory": beside(self._plan, self._peaks),
            "digests": self._place.digests(),
        }
        write_whole(self._place.summary, json.dumps(summary, indent=1) + "\n")
        return summary


async def _all_or_none(*jobs: Coroutine[Any, Any, Any]) -> list[Any]:
    """What all of them give. Where one fails, the others are cancelled and have ended when its error is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class ThreadStore:
    """Commits the ledger on a thread of its own, one commit after another."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    async def apply(self, changes: Sequence[Change]) -> None:
        await asyncio.to_thread(self._ledger.apply, changes)

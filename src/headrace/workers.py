"""Processes that run users' code: environments and scorers. Nothing a user writes can stall or kill the run.

A `Pool` gives jobs to workers, many at once. A job may ask the controller things while it runs (an environment
asks for samples). When a worker dies or stops answering, which of its jobs did it is not known. They are run again
among fellow suspects, a few at a time, and those whose worker dies again, alone: the innocent succeed, the guilty
one fails and costs its own episode only.

    Pool.run ──Job──▶ worker ──Done | JobFailed──▶            both ends of the wire are in this file
                      worker ──Ask──▶ Pool ──Answer──▶ worker
             ─Cancel─▶ worker ──Cancelled──▶                  no answer within the grace: the worker is killed
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace import records
from headrace.bounds import (
    MAX_MESSAGE_BYTES,
    MAX_OWN_REASONS,
    SYSTEM_REASONS,
    SystemFailure,
    clip,
    described,
    text_of,
    users_reason,
)
from headrace.clocks import Clocks
from headrace.errors import ComponentDied, DeadlineExceeded, EpisodeFailure
from headrace.ipc import ORPHANED, Channel, Peer, Stop, telling
from headrace.records import Nested, Record, message
from headrace.references import spot_of

_CANCEL_GRACE_S = 1.0
_SUSPECTS_TOGETHER = 32
KEPT_LOGS = 32
"""Logs of workers that have ended, the newest, that stay. Each has a bounded size (orchestration/keeper.py)."""


@message
class Ready(Record):
    """The worker has loaded the user's code."""


@message
class Job(Record):
    id: int
    body: Nested


@message
class Done(Record):
    id: int
    body: Nested


@message
class JobFailed(Record):
    id: int
    reason: str
    detail: str
    by_user: bool
    """Whether the reason is a word of users' code, and not one of the system's."""


@message
class Ask(Record):
    id: int
    number: int
    body: Nested


@message
class Answer(Record):
    number: int
    body: Nested | None = None
    reason: str = ""
    """Why there is no body."""
    detail: str = ""


@message
class Withdraw(Record):
    """Nobody waits any more for the answer to an Ask."""

    id: int
    number: int


@message
class Cancel(Record):
    id: int


@message
class Cancelled(Record):
    id: int
    stuck: bool
    """It runs in a thread that cannot be interrupted."""


Spawn = Callable[[str], Awaitable[Peer]]
"""Start one worker of the given name and connect to it."""
Respond = Callable[[Any], Awaitable[Any]]
"""Answers a job's questions."""


class _Gone(Exception):
    """The worker ended with this job among its own. `how` is crash or timeout, `why` what is known of its end."""

    def __init__(self, how: str, why: str):
        super().__init__(how, why)
        self.how = how
        self.why = why


@dataclass
class _Running:
    """A job in a worker: its result, and the questions being answered for it."""

    result: asyncio.Future[Any]
    respond: Respond | None
    answers: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class _Worker:
    def __init__(
        self, peer: Peer, on_gone: Callable[[_Worker], None], kind: str, max_asks: int, reasons: _OwnReasons
    ):
        self.peer = peer
        self._kind = kind
        self._max_asks = max_asks
        self._reasons = reasons
        self.jobs: dict[int, _Running] = {}
        self.gone: str | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cancelled: dict[int, asyncio.Future[bool]] = {}
        self._on_gone = on_gone
        peer.on_message = self._received
        peer.died.add_done_callback(self._died)

    async def run(self, job_id: int, body: Nested, respond: Respond | None, clocks: Clocks, kind: str) -> Any:
        if self.gone:
            raise self._gone()
        job = self.jobs[job_id] = _Running(asyncio.get_running_loop().create_future(), respond)
        try:
            self.peer.tell(Job(id=job_id, body=body))
            async with clocks.deadline():
                return await job.result
        except TimeoutError:
            await self._cancel(job_id)
            raise EpisodeFailure(f"{kind}_timeout", f"no result within {clocks.seconds:g} s") from None
        except ComponentDied:
            raise self._gone() from None
        except asyncio.CancelledError:
            if not self.gone and not self.peer.died.done():
                self.peer.tell(Cancel(id=job_id))
            raise
        finally:
            self.jobs.pop(job_id, None)
            for answer in job.answers.values():
                answer.cancel()

    async def end(self, how: str) -> None:
        self.gone = self.gone or how
        self._release()
        await self.peer.kill()

    async def _cancel(self, job_id: int) -> None:
        """Take a late job back. A worker that does not let go of it is killed."""
        acknowledged: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._cancelled[job_id] = acknowledged
        stuck = False
        try:
            if self.gone or self.peer.died.done():
                raise self._gone()
            self.peer.tell(Cancel(id=job_id))
            async with asyncio.timeout(_CANCEL_GRACE_S):
                stuck = await acknowledged
        except TimeoutError:
            await self.end("timeout")
            raise self._gone() from None
        finally:
            self._cancelled.pop(job_id, None)
        if stuck:
            self.jobs.pop(job_id, None)
            await self.end("timeout")

    def _received(self, record: Any) -> None:
        if isinstance(record, Ready):
            if not self.ready.done():
                self.ready.set_result(None)
        elif isinstance(record, Cancelled):
            future = self._cancelled.get(record.id)
            if future is not None and not future.done():
                future.set_result(record.stuck)
        elif (job := self.jobs.get(record.id)) is None:
            return
        elif isinstance(record, Ask) and len(job.answers) >= self._max_asks:
            # A worker's own code keeps to the bound, so this one is in other hands.
            self.peer.tell(Cancel(id=record.id))
            if not job.result.done():
                why = f"an episode asks for at most {self._max_asks} things at once (environment.max_samples)"
                job.result.set_exception(EpisodeFailure("too_many_samples", why))
        elif isinstance(record, Ask):
            job.answers[record.number] = asyncio.get_running_loop().create_task(self._respond(record, job))
        elif isinstance(record, Withdraw):
            if (answer := job.answers.pop(record.number, None)) is not None:
                answer.cancel()
        elif job.result.done():
            return
        elif isinstance(record, Done):
            job.result.set_result(record.body.record)
        elif isinstance(record, JobFailed):
            reason, detail = record.reason, clip(record.detail)
            if record.by_user or reason not in SYSTEM_REASONS | {f"{self._kind}_error"}:
                reason, detail = self._reasons.admit(*users_reason(reason, detail))
            job.result.set_exception(EpisodeFailure(reason, detail))

    def _gone(self) -> _Gone:
        died = self.peer.died
        known = str(died.result()) if died.done() and not died.cancelled() else f"{self.peer.name} was killed"
        return _Gone(self.gone or "crash", known)

    async def _respond(self, ask: Ask, job: _Running) -> None:
        try:
            assert job.respond is not None
            answer = Answer(number=ask.number, body=Nested(await job.respond(ask.body.record)))
        except EpisodeFailure as failure:
            answer = Answer(number=ask.number, reason=failure.reason, detail=clip(failure.detail))
        except ComponentDied as died:
            answer = Answer(number=ask.number, reason="engine_died", detail=clip(str(died)))
        except Exception as error:
            answer = Answer(number=ask.number, reason="bad_request", detail=described(error))
        finally:
            job.answers.pop(ask.number, None)
        if not self.gone and not self.peer.died.done():
            self.peer.tell(answer)

    def _died(self, future: asyncio.Future[Any]) -> None:
        self.gone = self.gone or "crash"
        if not self.ready.done() and not future.cancelled():
            self.ready.set_exception(future.result())
        self._release()

    def _release(self) -> None:
        for job in self.jobs.values():
            if not job.result.done():
                job.result.set_exception(self._gone())
        self._on_gone(self)


class Pool:
    """Workers of one kind. `kind` begins the reason of a failure: scorer_crash, environment_timeout, …"""

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        *,
        workers: int,
        concurrency: int,
        timeout_s: float,
        start_s: float,
        max_asks: int = 256,
        say: Callable[[str], None] | None = None,
    ):
        """`max_asks` is how many questions of one job may wait for an answer at once."""
        self._kind = kind
        self._max_asks = max_asks
        self._reasons = _OwnReasons()
        self._spawn = spawn
        self._count = workers
        self._slots = asyncio.Semaphore(workers * concurrency)
        self._clocks = Clocks(timeout_s)
        self._start_s, self._say = start_s, say
        self._workers: list[_Worker] = []
        self._again = [_Apart(_SUSPECTS_TOGETHER), _Apart(1)]
        self._numbers = itertools.count(1)
        self._names = itertools.count(1)
        self._repairs: set[asyncio.Task[None]] = set()
        self._ended: deque[Peer] = deque()
        """Whose logs are kept."""
        self._closing = False
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Set when a worker cannot be replaced: the run cannot go on."""

    async def start(self) -> None:
        await asyncio.gather(*(self._replace() for _ in range(self._count)))
        if self.failed.done():
            raise self.failed.result()

    async def run(self, body: Any, respond: Respond | None = None, again: Callable[[], None] | None = None) -> Any:
        """The job's result. Raises EpisodeFailure when the user's code fails, hangs or kills its process.

        `again` is called before another attempt: what the one before it asked for is void.
        """
        data = Nested(body)
        async with self._slots:
            worker = await self._least_loaded()
            try:
                return await worker.run(next(self._numbers), data, respond, self._clocks, self._kind)
            except _Gone as gone:
                last = gone
        for apart in self._again:
            if again is not None:
                again()
            async with apart.slots:
                worker = await apart.worker(self._new)
                try:
                    return await worker.run(next(self._numbers), data, respond, self._clocks, self._kind)
                except _Gone as gone:
                    last = gone
        raise EpisodeFailure(f"{self._kind}_{last.how}", clip(f"the {self._kind}'s process ended: {last.why}"))

    def hold_clocks(self, held: bool) -> None:
        """While they are held, the time of jobs does not count."""
        self._clocks.hold(held)

    @property
    def pids(self) -> list[int]:
        """Of the workers that there are."""
        return [worker.peer.process.pid for worker in self._workers if not worker.gone]

    async def close(self, seconds: float) -> None:
        self._closing = True
        for task in self._repairs:
            task.cancel()
        apart = [a.current for a in self._again if a.current is not None]
        await asyncio.gather(*(w.peer.close(seconds) for w in [*self._workers, *apart] if not w.gone))

    async def _new(self) -> _Worker:
        peer = await self._spawn(f"{self._kind}-{next(self._names)}")
        worker = _Worker(peer, self._repair, self._kind, self._max_asks, self._reasons)
        try:
            what = f"{worker.peer.name} has been loading the user's code"
            async with asyncio.timeout(self._start_s), telling(self._say, what, worker.peer.last_line):
                await worker.ready
        except TimeoutError:
            await worker.end("timeout")
            whom = f"{worker.peer.name} to load the user's code"
            raise DeadlineExceeded("the controller", whom, self._start_s, "limits.start_s, or that code") from None
        except asyncio.CancelledError:
            await worker.end("crash")
            raise
        return worker

    async def _least_loaded(self) -> _Worker:
        while not self._workers:
            if self.failed.done():
                raise self.failed.result()
            await asyncio.sleep(0.01)
        return min(self._workers, key=lambda worker: len(worker.jobs))

    def _repair(self, worker: _Worker) -> None:
        """Replace a worker that has gone, beside whatever else happens."""
        if worker.peer not in self._ended:
            self._ended.append(worker.peer)
            if len(self._ended) > KEPT_LOGS:
                self._ended.popleft().remove_log()
        if worker in self._workers and not self._closing:
            self._workers.remove(worker)
            task = asyncio.get_running_loop().create_task(self._replace())
            self._repairs.add(task)
            task.add_done_callback(self._repairs.discard)

    async def _replace(self) -> None:
        try:
            self._workers.append(await self._new())
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)


class _OwnReasons:
    """The reasons that users' code has given so far. The ledger counts by reason: there are not endlessly many."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def admit(self, reason: str, detail: str) -> tuple[str, str]:
        if len(self._known) < MAX_OWN_REASONS:
            self._known.add(reason)
        if reason in self._known:
            return reason, detail
        rule = f"a run's users' code has at most {MAX_OWN_REASONS} reasons of its own"
        return "bad_reason", clip(f"{rule} (got {reason!r} as well): {detail}")


class _Apart:
    """A worker for jobs that were in one that died: so many at a time."""

    def __init__(self, together: int):
        self.slots = asyncio.Semaphore(together)
        self.current: _Worker | None = None
        self._making = asyncio.Lock()

    async def worker(self, make: Callable[[], Awaitable[_Worker]]) -> _Worker:
        async with self._making:
            if self.current is None or self.current.gone:
                self.current = await make()
            return self.current


# ── The worker's side ────────────────────────────────────────────────────────────────────────────────────

AskController = Callable[[Any], Awaitable[Any]]
Handler = Callable[[Any, AskController], Awaitable[Any]]
"""Does one job: gets its record and a way to ask, returns the result's record."""


current_job: contextvars.ContextVar[int] = contextvars.ContextVar("current_job", default=0)
"""0: none, as when a scorer is tried outside of a worker."""
_in_threads: set[int] = set()


async def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function: a coroutine function here, any other in a thread, so that it may block."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    job = current_job.get()

    def call() -> tuple[Any, BaseException | None]:
        """The result and None, or None and what was raised: no future carries a StopIteration."""
        _in_threads.add(job)
        try:
            return function(*args), None
        except BaseException as error:
            return None, error
        finally:
            _in_threads.discard(job)

    result, error = await asyncio.to_thread(call)
    if error is not None:
        raise error
    return result


def serve(sock: socket.socket, handler: Handler, *, kind: str, threads: int) -> None:
    """A worker's main loop. Ends its process when told to stop or when the controller has gone.

    `threads` is how many plain functions may run at once: as many as the pool gives it jobs.
    """

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        await _Server(handler, kind).serve(sock)

    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    with asyncio.Runner() as runner:
        try:
            runner.run(main())
        except BaseException:
            # Users' code beside the jobs has broken the loop. Closing it would cancel all jobs, and the innocent
            # would be reported as failed instead of being run again.
            traceback.print_exc()
            os._exit(1)


def _exit_with_parent(parent: int) -> None:
    """A user's function that holds the event loop must not outlive the controller."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(ORPHANED)


class _Server:
    def __init__(self, handler: Handler, kind: str):
        self._handler = handler
        self._kind = kind
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By their jobs; those that are to go on."""
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._done = asyncio.Event()
        self._channel: Channel | None = None

    async def serve(self, sock: socket.socket) -> None:
        channel = await Channel.open(sock, self._received, lambda exc: os._exit(ORPHANED))
        self._channel = channel
        channel.send(Ready())
        await self._done.wait()

    def _send(self, record: Any) -> None:
        assert self._channel is not None
        data = records.encode(record)
        if len(data) > MAX_MESSAGE_BYTES:
            rule = f"what users' code hands over at once has at most {MAX_MESSAGE_BYTES} bytes"
            raise SystemFailure("message_too_large", f"{rule} (got {len(data)})")
        self._channel.send_encoded(data)

    def _received(self, record: Any) -> None:
        if isinstance(record, Job):
            self._tasks[record.id] = asyncio.get_running_loop().create_task(self._run(record))
        elif isinstance(record, Answer):
            future = self._asked.pop(record.number, None)
            if future is not None and not future.done():
                if record.body is None:
                    future.set_exception(SystemFailure(record.reason, record.detail))
                else:
                    future.set_result(record.body.record)
        elif isinstance(record, Cancel):
            task = self._tasks.pop(record.id, None)
            if task is not None:
                task.cancel()
            self._send(Cancelled(id=record.id, stuck=record.id in _in_threads))
        elif isinstance(record, Stop):
            os._exit(0)

    async def _run(self, job: Job) -> None:
        current_job.set(job.id)
        waiting: set[asyncio.Future[Any]] = set()

        async def ask(body: Any) -> Any:
            if job.id not in self._tasks:
                raise SystemFailure("abandoned", "the episode has ended")
            number = next(self._numbers)
            self._send(Ask(id=job.id, number=number, body=Nested(body)))
            future = self._asked[number] = asyncio.get_running_loop().create_future()
            waiting.add(future)
            try:
                return await future
            except asyncio.CancelledError:
                if job.id in self._tasks:
                    self._send(Withdraw(id=job.id, number=number))
                raise
            finally:
                self._asked.pop(number, None)
                waiting.discard(future)

        try:
            result = await self._handler(job.body.record, ask)
            self._send(Done(id=job.id, body=Nested(result)))
        except BaseException as error:
            # Also a cancellation or an exit, which may be the user's code's own; for a job that was taken back
            # nobody listens.
            self._send(_failed(job, error, self._kind))
        finally:
            self._tasks.pop(job.id, None)
            for future in list(waiting):
                # What the user's code has left waiting would wait for ever.
                future.cancel()


def _failed(job: Job, error: BaseException, kind: str) -> JobFailed:
    cause = first_failure(error) or error
    if isinstance(cause, SystemFailure) and cause.reason in SYSTEM_REASONS:
        return JobFailed(id=job.id, reason=cause.reason, detail=text_of(cause.detail), by_user=False)
    if isinstance(cause, EpisodeFailure):
        return JobFailed(id=job.id, reason=text_of(cause.reason), detail=text_of(cause.detail), by_user=True)
    return JobFailed(id=job.id, reason=f"{kind}_error", detail=described(error) + spot_of(error), by_user=False)


def first_failure(error: BaseException) -> EpisodeFailure | None:
    """An asyncio.TaskGroup raises what its tasks have raised in a group."""
    if isinstance(error, EpisodeFailure):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for each in inner if (found := first_failure(each))), None)

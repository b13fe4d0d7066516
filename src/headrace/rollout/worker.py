"""Environments in worker processes: what the worker does, what the controller does, and what passes between.

    controller                                             worker
    WorkerRollouts.run ──RunEpisode──▶ _Episodes.handle ──▶ the user's environment
            ◀──SampleCall──  policy.sample
    engine.sample
            ──SampleReply──▶
            ◀──EpisodeEnd──

The controller keeps the turns with all their columns; the worker gets tokens only.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.bounds import SystemFailure, checked_metrics, described, text_of
from headrace.engine.base import SampleRequest
from headrace.errors import ConfigError, EpisodeFailure, InputError, ModelFolderError
from headrace.ipc import Failed, error_from_record, error_to_record
from headrace.records import Episode, Record, Sampling, Task, Turn, message, text_before
from headrace.references import made, resolve, spot_of
from headrace.rollout.asked import Asked, checked
from headrace.rollout.base import Completion, EpisodeRequest, turn_seed
from headrace.rollout.config import EnvironmentConfig, TaskConfig
from headrace.rollout.prompts import CHECKED_TASKS, check_lengths, check_prompt, prompt_tokens
from headrace.rollout.tasks import TaskList, load_tasks
from headrace.tokenizer import Tokenizer
from headrace.workers import AskController, Pool, call_user, serve


@message
class RunEpisode(Record):
    task: Task


@message
class SampleCall(Record):
    context: np.ndarray
    parent: int | None
    at: int | None
    """How many of the parent's tokens are continued. None: all."""
    hold: bool
    max_tokens: int
    stop_strings: tuple[str, ...]
    asked: Asked = Asked()


@message
class SampleReply(Record):
    turn: int
    tokens: np.ndarray
    stop: str
    stop_string: str | None = None


@message
class EpisodeEnd(Record):
    metrics: dict[str, float]


@message
class LoadTasks(Record):
    """Ask a worker for the tasks of a source (its configuration as MessagePack).

    It hands them over in portions, each a TaskList that an empty one answers.
    """

    config: bytes
    limit: int | None


@message
class CheckPrompt(Record):
    """Ask a worker whether a task's prompt can be rendered. `where` is the key that the task comes from."""

    task: Task
    where: str


@message
class PromptChecked(Record):
    problem: Failed | None = None
    length: int | None = None
    """Tokens of the prompt, where it is known."""


# ── The worker's side ────────────────────────────────────────────────────────────────────────────────────


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """A worker's entry."""
    config = msgspec.convert(options["environment"], EnvironmentConfig)
    episodes = _Episodes(config, Tokenizer(Path(options["model"])))
    serve(sock, episodes.handle, kind="environment", threads=config.concurrency)


class _Episodes:
    def __init__(self, config: EnvironmentConfig, tokenizer: Tokenizer):
        self._config = config
        self._tokenizer = tokenizer
        found = resolve(config.source)
        self._rollout: Callable[..., Any]
        if isinstance(found, type):
            self._environment: Any = made(found, config.options, config.source, "environment")
            self._rollout = self._environment.rollout
        else:
            self._environment = None
            self._rollout = partial(found, **config.options) if config.options else found

    async def handle(self, body: Any, ask: AskController) -> Any:
        if isinstance(body, LoadTasks):
            try:
                await _hand_over(load_tasks(msgspec.msgpack.decode(body.config, type=TaskConfig), body.limit), ask)
            except InputError as error:
                return TaskList(problem=error_to_record(0, error))
            return TaskList()
        if isinstance(body, CheckPrompt):
            try:
                length = check_prompt(
                    body.task, self._environment, self._tokenizer, self._config.template, body.where
                )
            except InputError as error:
                return PromptChecked(problem=error_to_record(0, error))
            return PromptChecked(length=length)
        assert isinstance(body, RunEpisode)
        policy = _WorkerPolicy(self._config, self._tokenizer, ask)
        try:
            if inspect.iscoroutinefunction(self._rollout):
                metrics = await self._rollout(body.task, policy)
            else:
                blocking = _BlockingPolicy(policy, asyncio.get_running_loop())
                metrics = await call_user(self._rollout, body.task, blocking)
        except Exception as error:
            # Whatever the user's code made of it.
            policy.check()
            if policy.forgotten and not isinstance(error, EpisodeFailure):
                raise SystemFailure("environment_error", f"{described(error)}{spot_of(error)}; {_AWAIT}") from error
            raise
        policy.check()
        if policy.never_sampled:
            what = f"an environment samples at least one turn; {_AWAIT if policy.forgotten else _SAMPLE}"
            raise SystemFailure("no_tokens", what)
        return EpisodeEnd(metrics=checked_metrics({} if metrics is None else metrics))


_AWAIT = "a turn was asked for and not awaited: write `await policy.sample(…)`"
_SAMPLE = "this one ended without calling `await policy.sample(task.prompt)`"


_PORTION_BYTES = 512 << 10
"""As a message. Small tasks take a hundred times as much as objects."""


async def _hand_over(tasks: Sequence[Task], ask: AskController) -> None:
    """In messages well below what a reader takes, also as objects, unless one task alone is larger."""
    portion: list[Task] = []
    size = 0
    for task in tasks:
        more = len(msgspec.msgpack.encode(task))
        if portion and size + more > _PORTION_BYTES:
            await ask(TaskList(tasks=tuple(portion)))
            portion, size = [], 0
        portion.append(task)
        size += more
    await ask(TaskList(tasks=tuple(portion)))


class _WorkerPolicy:
    def __init__(self, config: EnvironmentConfig, tokenizer: Tokenizer, ask: AskController):
        self._config = config
        self._tokenizer = tokenizer
        self._template = config.template
        self._ask = ask
        self._waiting = 0
        self._exceeded = False
        self._asked = self._begun = 0
        """Turns whose coroutine was made, and those that were awaited."""

    @property
    def forgotten(self) -> bool:
        """Whether a turn was asked for that nobody has waited for."""
        return self._asked > self._begun

    @property
    def never_sampled(self) -> bool:
        return self._begun == 0

    def check(self) -> None:
        """Raises when the episode has ever asked for too many turns at once: it fails, also if it caught that."""
        if self._exceeded:
            rule = f"an episode samples at most {self._config.max_samples} turns at once (environment.max_samples)"
            raise SystemFailure("too_many_samples", f"{rule}, and this one asked for more")

    def sample(self, prompt: Any, **options: Any) -> Coroutine[Any, Any, Completion]:
        """The turn's coroutine. That it was made is noted, so that one without `await` can be told of."""
        self._asked += 1
        return self._sample(prompt, **options)

    async def _sample(
        self,
        prompt: str | Sequence[dict[str, Any]] | Sequence[int],
        *,
        after: Completion | None = None,
        at: int | None = None,
        hold: bool = False,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        **unknown: Any,
    ) -> Completion:
        self._begun += 1
        if unknown:
            what = "a turn's options are after, at, hold, max_tokens, stop, temperature, top_p, top_k and min_p"
            raise SystemFailure("bad_request", f"{what} (got {', '.join(unknown)})")
        _check_options(prompt, after, max_tokens)
        self._exceeded = self._exceeded or self._waiting >= self._config.max_samples
        self.check()
        if at is not None and (after is None or not 0 <= at <= len(after.tokens)):
            raise SystemFailure("bad_request", f"`at` counts the tokens of the completion in `after` (got {at})")
        if after is not None and not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            what = "messages cannot continue a completion: give the text, or tokens, that come between"
            raise SystemFailure("bad_request", what)
        call = SampleCall(
            context=np.asarray(self._tokens(prompt, first=after is None), np.int32),
            parent=None if after is None else after.turn,
            at=None if at is None else int(at),
            hold=bool(hold),
            max_tokens=self._config.max_tokens if max_tokens is None else int(max_tokens),
            stop_strings=(*self._config.stop_strings, *map(str, stop)),
            asked=checked(temperature, top_p, top_k, min_p),
        )
        self._waiting += 1
        try:
            reply: SampleReply = await self._ask(call)
        finally:
            self._waiting -= 1
        tokens = reply.tokens.tolist()
        return Completion(
            turn=reply.turn,
            tokens=tokens,
            text=text_before(self._tokenizer.decode(tokens), reply.stop_string),
            stop=reply.stop,
            stop_string=reply.stop_string,
        )

    def _tokens(self, prompt: str | Sequence[dict[str, Any]] | Sequence[int], *, first: bool) -> list[int]:
        try:
            return prompt_tokens(prompt, self._tokenizer, self._template, first=first)
        except ModelFolderError as error:
            if isinstance(prompt, str):
                raise
            # The template has rendered a plain conversation: these messages are what it cannot do.
            raise SystemFailure("chat_template", str(error)) from error


def _check_options(prompt: Any, after: Any, max_tokens: Any) -> None:
    """What a user's code may have mixed up, in words of its own."""
    kind = type(prompt).__name__
    if isinstance(prompt, Task) or not isinstance(prompt, str | Sequence | np.ndarray):
        remedy = "give task.prompt" if isinstance(prompt, Task) else "give one of these"
        raise SystemFailure("bad_request", f"a turn's prompt is text, messages or tokens (got a {kind}); {remedy}")
    if after is not None and not isinstance(after, Completion):
        what = "`after` is a Completion that this episode's policy.sample returned"
        raise SystemFailure("bad_request", f"{what} (got a {type(after).__name__}: {text_of(repr(after), 100)})")
    if max_tokens is not None and (not isinstance(max_tokens, int | np.integer) or max_tokens < 1):
        raise SystemFailure("bad_request", f"max_tokens is an integer of at least 1 (got {max_tokens!r})")


class _BlockingPolicy:
    """The policy for an environment that is a plain function, in a thread of its own."""

    def __init__(self, policy: _WorkerPolicy, loop: asyncio.AbstractEventLoop):
        self._policy = policy
        self._loop = loop

    def sample(self, prompt: Any, **options: Any) -> Completion:
        return asyncio.run_coroutine_threadsafe(self._policy.sample(prompt, **options), self._loop).result()


# ── The controller's side ────────────────────────────────────────────────────────────────────────────────


class WorkerRollouts:
    """Runs episodes in a pool of workers."""

    def __init__(self, pool: Pool, config: EnvironmentConfig):
        self._pool = pool
        self._sampling = config.sampling.sampling()
        self._running: dict[str, _Recorder] = {}

    async def tasks(self, config: TaskConfig, limit: int | None = None) -> tuple[Task, ...]:
        found: list[Task] = []

        async def note(portion: TaskList) -> TaskList:
            found.extend(portion.tasks)
            return TaskList()

        load = LoadTasks(config=msgspec.msgpack.encode(config), limit=limit)
        try:
            reply = await self._pool.run(load, note, found.clear)
        except EpisodeFailure as failure:
            raise ConfigError(
                "tasks are read within environment.timeout_s, by a process that lives on",
                str(failure),
                "correct their source, or raise environment.timeout_s",
            ) from failure
        if reply.problem is not None:
            raise error_from_record(reply.problem)
        return tuple(found)

    async def check_prompts(self, tasks: Sequence[Task], where: str, max_context: int) -> None:
        """Raises ConfigError where the prompt of one of the first tasks cannot be rendered, or all are too long."""
        lengths: list[int | None] = []
        for task in tasks[:CHECKED_TASKS]:
            reply = await self._pool.run(CheckPrompt(task=task, where=where))
            if reply.problem is not None:
                raise error_from_record(reply.problem)
            lengths.append(reply.length)
        check_lengths(lengths, where, max_context)

    async def run(self, request: EpisodeRequest) -> Episode:
        started, begun = time.time(), time.monotonic()
        recorder = _Recorder(request, request.sampling or self._sampling)
        self._running[request.id] = recorder
        failure, detail, metrics = None, "", {}
        try:
            end = await self._pool.run(RunEpisode(task=request.task), recorder.sample, recorder.begin_again)
            metrics = checked_metrics(end.metrics)
            if recorder.cut_short:
                failure = "late"
        except EpisodeFailure as error:
            failure, detail = ("late" if recorder.cut_short else error.reason), error.detail
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not recorder.cut_short or task is None or task.uncancel() > 0:
                raise
            failure = "late"
        finally:
            del self._running[request.id]
            recorder.release()
        return Episode(
            id=request.id,
            task=request.task,
            turns=tuple(recorder.turns),
            failure=failure,
            detail=detail,
            metrics=metrics,
            started=started,
            # The wall clock may be set back meanwhile.
            finished=started + time.monotonic() - begun,
        )

    def cut(self, episode_id: str) -> None:
        recorder = self._running.get(episode_id)
        if recorder is not None:
            recorder.cut()

    def hold_clocks(self, held: bool) -> None:
        self._pool.hold_clocks(held)


_request_ids = itertools.count(1)


class _Recorder:
    """Answers one episode's calls from its engine, and keeps the turns."""

    def __init__(self, request: EpisodeRequest, sampling: Sampling):
        self.turns: list[Turn] = []
        self.cut_short = False
        self._request = request
        self._sampling = sampling
        self._open: set[int] = set()
        self._held: dict[int, int] = {}
        """Requests by the turns that came of them."""
        self._attempt = 1
        self._calls = itertools.count()
        self._task = asyncio.current_task()

    async def sample(self, call: SampleCall) -> SampleReply:
        if self.cut_short:
            raise EpisodeFailure("late")
        if call.parent is not None and not 0 <= call.parent < len(self.turns):
            raise EpisodeFailure("bad_request", f"a turn continues one of the {len(self.turns)} before it")
        context, fork_of, fork_at = call.context, None, 0
        if call.parent is not None:
            before = Episode(id="", task=self._request.task, turns=tuple(self.turns)).full_context(call.parent)
            shared = np.concatenate([before, self.turns[call.parent].tokens[: call.at]])
            fork_of, fork_at = self._held.get(call.parent), len(shared)
            if fork_of is None:
                context = np.concatenate([shared, context])
        request = SampleRequest(
            id=next(_request_ids),
            context=context,
            fork_of=fork_of,
            fork_at=fork_at,
            hold=call.hold,
            max_tokens=call.max_tokens,
            sampling=call.asked.over(self._sampling),
            stop_strings=call.stop_strings,
            seed=turn_seed(self._request.seed, next(self._calls)),
        )
        attempt = self._attempt
        self._open.add(request.id)
        try:
            turn = await self._request.engine.sample(request)
        finally:
            self._open.discard(request.id)
        self._request.on_tokens(len(turn.tokens))
        if attempt != self._attempt:
            if call.hold:
                self._request.engine.release(request.id)
            self._request.on_wasted(len(turn.tokens))
            raise EpisodeFailure("abandoned")
        if call.hold:
            self._held[len(self.turns)] = request.id
        turn = msgspec.structs.replace(turn, asked=tuple(call.asked.given))
        self.turns.append(self._as_continued(turn, call))
        turns = len(self.turns)
        return SampleReply(turn=turns - 1, tokens=turn.tokens, stop=turn.stop, stop_string=turn.stop_string)

    def _as_continued(self, turn: Turn, call: SampleCall) -> Turn:
        """The turn with its context by reference: to the turn it continues or, where it continues only a part of
        that, to the one that continued."""
        source = None if call.parent is None else self.turns[call.parent]
        if source is None or call.at is None or call.at == len(source.tokens):
            return msgspec.structs.replace(turn, context=call.context, parent=call.parent)
        context = np.concatenate([source.context, source.tokens[: call.at], call.context])
        assert call.parent is not None
        return msgspec.structs.replace(turn, context=context, parent=source.parent, joins=(call.parent,))

    def release(self) -> None:
        """Nothing more is continued."""
        for request_id in self._held.values():
            self._request.engine.release(request_id)
        self._held.clear()

    def cut(self) -> None:
        self.cut_short = True
        if self._open:
            self._end_open()
        elif self._task is not None:
            # It is not sampling but busy with something of its own.
            self._task.cancel()

    def begin_again(self) -> None:
        """The environment's process died: what it had sampled is void, and its tokens are wasted."""
        self._attempt += 1
        self._calls = itertools.count()
        self._request.on_wasted(sum(len(turn.tokens) for turn in self.turns))
        self.turns.clear()
        self.release()
        self._end_open()

    def _end_open(self) -> None:
        for request_id in list(self._open):
            self._request.engine.cut(request_id)

"""A pool of real worker processes running users' code that misbehaves."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import workers
from headrace.bounds import MAX_MESSAGE_BYTES
from headrace.engine.base import SampleRequest
from headrace.errors import EpisodeFailure
from headrace.orchestration.processes import spawn
from headrace.records import Record, Task, Turn, message
from headrace.rollout.base import EpisodeRequest
from headrace.rollout.config import EnvironmentConfig
from headrace.rollout.worker import WorkerRollouts
from headrace.workers import Pool, call_user, serve


@message
class Errand(Record):
    """What a job of these tests is to do."""

    what: str
    seconds: float = 0.0


class Beyond(BaseException):
    """What no `except Exception` catches, and no text can be had of."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


RAISED: dict[str, BaseException] = {
    "exit": SystemExit("enough"),
    "interrupt": KeyboardInterrupt("pressed"),
    "generator": GeneratorExit("closed"),
    "beyond": Beyond(),
    "end of an iterator": StopIteration("no more"),
}


def throw(error: BaseException) -> None:
    raise error


async def obey(order: Errand, ask: Any) -> Errand:
    if order.what == "crash":
        await asyncio.sleep(order.seconds)
        os._exit(9)
    if order.what == "thread":
        await call_user(time.sleep, order.seconds)
    elif order.what == "cancel itself":
        raise asyncio.CancelledError
    elif order.what in RAISED:
        raise RAISED[order.what]
    elif order.what.startswith("thread raises "):
        await call_user(throw, RAISED[order.what.removeprefix("thread raises ")])
    elif order.what == "break the loop":
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(60)
    elif order.what == "ask":
        return await ask(order)
    else:
        await asyncio.sleep(order.seconds)
    return order


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    serve(sock, obey, kind="job", threads=options["threads"])


def with_pool(tmp_path: Path, work: Any, *, workers: int = 1, concurrency: int = 64, timeout_s: float = 5) -> Any:
    async def main() -> Any:
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        entry = f"{Path(__file__).stem}:start"
        pool = Pool(
            "job",
            lambda name: spawn(name, entry, {"threads": concurrency}, logs=tmp_path),
            workers=workers,
            concurrency=concurrency,
            timeout_s=timeout_s,
            start_s=60,
        )
        await pool.start()
        try:
            return await work(pool)
        finally:
            await pool.close(5)

    return asyncio.run(main())


def test_the_innocent_of_a_dead_worker_are_run_again_together(tmp_path):
    async def work(pool):
        begun = time.monotonic()
        jobs = [pool.run(Errand(what="sleep", seconds=0.5)) for _ in range(40)]
        results = await asyncio.gather(*jobs, pool.run(Errand(what="crash", seconds=0.1)), return_exceptions=True)
        return results, time.monotonic() - begun

    (*innocent, guilty), seconds = with_pool(tmp_path, work)
    assert [order.what for order in innocent] == ["sleep"] * 40
    assert isinstance(guilty, EpisodeFailure)
    assert guilty.reason == "job_crash"
    assert seconds < 20, "one after another they would take 20 s"


def test_the_logs_of_workers_that_died_long_ago_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "KEPT_LOGS", 2)

    async def work(pool):
        for _ in range(2):
            with pytest.raises(EpisodeFailure):
                await pool.run(Errand(what="crash"))
        await pool.run(Errand(what="sleep"))

    with_pool(tmp_path, work)
    # Each of the first two jobs has cost three workers. A seventh did the third.
    assert 2 <= len(list(tmp_path.glob("job-*.log"))) <= 2 + 1
    assert not (tmp_path / "job-1.log").exists()


def test_as_many_blocking_functions_run_at_once_as_the_pool_gives(tmp_path):
    async def work(pool):
        begun = time.monotonic()
        await asyncio.gather(*(pool.run(Errand(what="thread", seconds=0.5)) for _ in range(64)))
        return time.monotonic() - begun

    assert with_pool(tmp_path, work, concurrency=64) < 4


def test_a_worker_that_dies_while_idle_is_replaced(tmp_path):
    async def work(pool):
        before = list(pool._workers)
        for worker in before:
            worker.peer.process.kill()
        async with asyncio.timeout(30):
            while len(set(pool._workers) - set(before)) < 2:
                await asyncio.sleep(0.01)
        return (await pool.run(Errand(what="sleep"))).what, len(pool._workers)

    assert with_pool(tmp_path, work, workers=2) == ("sleep", 2)


def test_a_cancellation_of_the_users_own_fails_the_job_at_once(tmp_path):
    async def work(pool):
        with pytest.raises(EpisodeFailure) as caught:
            await pool.run(Errand(what="cancel itself"))
        return caught.value.reason

    assert with_pool(tmp_path, work) == "job_error"


@pytest.mark.parametrize("thread", ["", "thread raises "], ids=["coroutine", "thread"])
def test_whatever_users_code_raises_fails_its_job_at_once_and_no_other(tmp_path, thread):
    details = {}

    async def work(pool):
        innocent = asyncio.ensure_future(pool.run(Errand(what="sleep", seconds=1)))
        for name in RAISED:
            begun = time.monotonic()
            with pytest.raises(EpisodeFailure) as caught:
                await pool.run(Errand(what=thread + name))
            assert caught.value.reason == "job_error"
            assert time.monotonic() - begun < 3
            details[name] = re.sub(r" \(test_workers.py, line \d+\)$", "", caught.value.detail)
        return (await innocent).what

    assert with_pool(tmp_path, work) == "sleep"
    assert details == {
        "exit": "SystemExit: enough",
        "interrupt": "KeyboardInterrupt: pressed",
        "generator": "GeneratorExit: closed",
        "beyond": "Beyond: (its text cannot be had: KeyboardInterrupt)",
        "end of an iterator": "RuntimeError: coroutine raised StopIteration",
    }
    assert [file.name for file in tmp_path.glob("job-*.log")] == ["job-1.log"]


def test_jobs_beside_one_that_ends_the_loop_are_run_again_and_do_not_fail(tmp_path):
    async def work(pool):
        innocent = [asyncio.ensure_future(pool.run(Errand(what="sleep", seconds=0.2))) for _ in range(4)]
        with pytest.raises(EpisodeFailure) as caught:
            await pool.run(Errand(what="break the loop"))
        return caught.value, [(await each).what for each in innocent]

    failure, others = with_pool(tmp_path, work, timeout_s=30)
    assert failure.reason == "job_crash"
    assert "exit status 1" in failure.detail
    assert others == ["sleep"] * 4


def test_a_question_that_cannot_be_answered_fails_and_does_not_hang(tmp_path):
    async def respond(order):
        raise IndexError("no such thing")

    async def work(pool):
        with pytest.raises(EpisodeFailure) as caught:
            await pool.run(Errand(what="ask"), respond)
        return caught.value

    failure = with_pool(tmp_path, work)
    assert (failure.reason, failure.detail) == ("bad_request", "IndexError: no such thing")


def test_what_is_being_answered_when_a_job_ends_is_cancelled(tmp_path):
    cancelled = []

    async def respond(order):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(order.what)
            raise

    async def work(pool):
        with pytest.raises(EpisodeFailure, match="job_timeout"):
            await pool.run(Errand(what="ask"), respond)
        await asyncio.sleep(0.1)

    with_pool(tmp_path, work, timeout_s=0.5)
    assert cancelled == ["ask"]


# ── Environments ─────────────────────────────────────────────────────────────────────────────────────────

ENVIRONMENTS = """
import asyncio

async def together(task, policy):
    await asyncio.gather(*(policy.sample([1, 2]) for _ in range(4)))

async def first_of_two(task, policy):
    tasks = [asyncio.ensure_future(policy.sample([1], max_tokens=n)) for n in (1, 9)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

async def busy(task, policy):
    await policy.sample([1])
    await asyncio.sleep(60)
"""


class Recording:
    """An engine that keeps the requests it got; a request of many tokens takes for ever."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.abandoned: list[int] = []

    async def sample(self, request: SampleRequest) -> Turn:
        self.requests.append(request)
        try:
            if request.max_tokens == 9:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.abandoned.append(request.max_tokens)
            raise
        return Turn(
            tokens=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            context=request.context,
            stop="length",
        )

    def cut(self, request_id: int) -> None: ...


def run_environment(tmp_path: Path, model: Path, name: str, meanwhile: Any = None) -> tuple[Any, Recording]:
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    config = EnvironmentConfig(source=f"{tmp_path}/environments.py:{name}", max_tokens=5)
    engine = Recording()

    async def main() -> Any:
        options = {"model": str(model), "environment": {"source": config.source, "max_tokens": 5}}
        entry = "headrace.rollout.worker:start"
        pool = Pool(
            "environment",
            lambda worker: spawn(worker, entry, options, logs=tmp_path),
            workers=1,
            concurrency=8,
            timeout_s=20,
            start_s=60,
        )
        await pool.start()
        rollouts = WorkerRollouts(pool, config)
        request = EpisodeRequest(id="e", task=Task(id="t", prompt=""), seed=5, engine=engine)  # type: ignore[arg-type]
        running = asyncio.ensure_future(rollouts.run(request))
        if meanwhile is not None:
            await meanwhile(rollouts)
        try:
            return await running
        finally:
            await asyncio.sleep(0.1)
            await pool.close(5)

    return asyncio.run(main()), engine


def test_samples_taken_together_have_streams_of_their_own(tmp_path, small_model):
    episode, engine = run_environment(tmp_path, small_model, "together")
    assert episode.failure is None
    assert len({request.seed for request in engine.requests}) == 4


def test_a_sample_nobody_waited_for_is_abandoned_and_not_recorded(tmp_path, small_model):
    episode, engine = run_environment(tmp_path, small_model, "first_of_two")
    assert len(episode.turns) == 1
    assert engine.abandoned == [9]


def test_an_episode_ends_after_it_began_though_the_clock_is_set_back(tmp_path, small_model, monkeypatch):
    clock = itertools.count(1_800_000_000, -3600)
    monkeypatch.setattr("headrace.rollout.worker.time.time", lambda: float(next(clock)))
    episode, _ = run_environment(tmp_path, small_model, "together")
    assert 0 < episode.finished - episode.started < 30


def test_an_episode_that_is_not_sampling_is_cut_at_once(tmp_path, small_model):
    async def cut(rollouts):
        await asyncio.sleep(0.7)
        rollouts.cut("e")

    begun = time.monotonic()
    episode, _ = run_environment(tmp_path, small_model, "busy", cut)
    assert episode.failure == "late"
    assert len(episode.turns) == 1
    assert time.monotonic() - begun < 15


# ── Bounds ───────────────────────────────────────────────────────────────────────────────────────────────

BOUNDED = """
import asyncio
from headrace.errors import EpisodeFailure

async def many(task, policy):
    await asyncio.gather(*(policy.sample([1, 2]) for _ in range(20000)))

async def many_and_deaf(task, policy):
    await asyncio.gather(*(policy.sample([1, 2]) for _ in range(20000)), return_exceptions=True)

async def many_in_a_group(task, policy):
    async with asyncio.TaskGroup() as group:
        for _ in range(20000):
            group.create_task(policy.sample([1, 2]))

async def many_after_another(task, policy):
    for _ in range(5):
        await asyncio.gather(*(policy.sample([1, 2]) for _ in range(256)))

async def unguarded(task, policy):
    policy._config = type("Config", (), {"max_samples": 10**9, "max_tokens": 5, "stop_strings": ()})
    await many(task, policy)

async def nameless(task, policy):
    raise EpisodeFailure("", "")

async def official(task, policy):
    raise EpisodeFailure("late", "x" * 5_000_000)

async def inventive(task, policy):
    raise EpisodeFailure(f"reason_{task.id}", "")

async def wordless(task, policy):
    raise EpisodeFailure(5, None)

async def measured(task, policy):
    await policy.sample([1, 2])
    return {"good": 1, "none": float("nan")}

async def overmeasured(task, policy):
    await policy.sample([1, 2])
    return {str(i): i for i in range(1000)}

async def bulky(task, policy):
    await policy.sample(list(range(1, 6_000_000)))

async def lawless(task, policy):
    channel = policy._ask.__closure__
    server = next(cell.cell_contents for cell in channel if hasattr(cell.cell_contents, "_channel"))
    server._channel._transport.write(b"HDRC" + b"\\x01\\0\\0\\0" + (1 << 40).to_bytes(8, "little") + bytes(16))
    await asyncio.sleep(60)
"""


def run_bounded(
    tmp_path: Path, model: Path, name: str, ids: tuple[str, ...] = ("t",)
) -> tuple[list[Any], Recording]:
    """An episode of each task, with an engine that takes its time."""
    (tmp_path / "bounded.py").write_text(BOUNDED)
    engine = Recording()

    async def main() -> list[Any]:
        settings = {"source": f"{tmp_path}/bounded.py:{name}", "max_tokens": 5}
        pool = Pool(
            "environment",
            lambda worker: spawn(
                worker,
                "headrace.rollout.worker:start",
                {"model": str(model), "environment": settings},
                logs=tmp_path,
                max_message=MAX_MESSAGE_BYTES,
            ),
            workers=1,
            concurrency=8,
            timeout_s=30,
            start_s=60,
            max_asks=256,
        )
        await pool.start()
        rollouts = WorkerRollouts(pool, EnvironmentConfig(**settings))
        requests = [
            EpisodeRequest(id=one, task=Task(id=one, prompt=""), seed=5, engine=engine)  # type: ignore[arg-type]
            for one in ids
        ]
        try:
            return await asyncio.gather(*(rollouts.run(request) for request in requests))
        finally:
            await pool.close(5)

    return asyncio.run(main()), engine


@pytest.mark.parametrize("name", ["many", "many_and_deaf", "many_in_a_group", "unguarded"])
def test_an_episode_that_samples_too_much_at_once_fails_by_that_rule(tmp_path, small_model, name):
    (episode,), engine = run_bounded(tmp_path, small_model, name)
    assert episode.failure == "too_many_samples"
    assert "at most 256 " in episode.detail
    assert "environment.max_samples" in episode.detail
    assert len(engine.requests) <= 256


def test_an_episode_may_sample_the_most_again_and_again(tmp_path, small_model):
    (episode,), engine = run_bounded(tmp_path, small_model, "many_after_another")
    assert (episode.failure, len(episode.turns), len(engine.requests)) == (None, 1280, 1280)


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("nameless", "bad_reason", "(got ''): "),
        ("official", "user_late", "xxx… (5000000 characters)"),
        ("wordless", "5", "None"),
        ("overmeasured", "bad_metrics", "an episode has at most 64 metrics (got 1000)"),
        ("bulky", "message_too_large", "has at most 16777216 bytes (got 24"),
        ("lawless", "environment_crash", "a message has at most 16777216 bytes here"),
    ],
)
def test_what_users_code_hands_over_is_bounded(tmp_path, small_model, name, reason, detail):
    (episode,), _ = run_bounded(tmp_path, small_model, name)
    assert episode.failure == reason
    assert detail in episode.detail
    assert len(episode.detail) <= 2000


def test_users_code_has_so_many_reasons_of_its_own(tmp_path, small_model):
    episodes, _ = run_bounded(tmp_path, small_model, "inventive", tuple(f"{i}" for i in range(80)))
    reasons = [episode.failure for episode in episodes]
    assert len(set(reasons)) == 65
    assert reasons.count("bad_reason") == 16


def test_a_metric_that_is_not_finite_is_left_out(tmp_path, small_model):
    (episode,), _ = run_bounded(tmp_path, small_model, "measured")
    assert episode.metrics == {"good": 1.0}

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError
from headrace.ipc import ORPHANED, Failed, FrameReader, Peer, error_from_record, error_to_record
from headrace.orchestration.processes import spawn
from headrace.records import Episode, Task, Turn, decode, encode
from headrace.testing.fakes import Order

# ── Frames ───────────────────────────────────────────────────────────────────────────────────────────────


@given(
    texts=st.lists(st.text(max_size=300), max_size=8),
    cuts=st.lists(st.integers(0, 4000), max_size=20),
)
def test_messages_come_out_whole_and_in_order_however_the_stream_is_cut(texts, cuts):
    stream = b"".join(encode(Task(id=str(i), prompt=text)) for i, text in enumerate(texts))
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    reader, found = FrameReader(), []
    for start, end in zip([0, *ends], ends, strict=False):
        found += reader.feed(stream[start:end])
    assert [(task.id, task.prompt) for task in found] == [(str(i), text) for i, text in enumerate(texts)]


def test_a_message_is_given_out_with_its_last_byte_and_not_before():
    data = bytes(encode(Task(id="0", prompt="x" * 50)))
    reader = FrameReader()
    assert [len(reader.feed(data[i : i + 1])) for i in range(len(data))] == [0] * (len(data) - 1) + [1]


def test_columns_outlive_the_readers_buffer():

    turn = Turn(
        tokens=np.arange(5, dtype=np.int32),
        logprobs=np.linspace(-1, 0, 5, dtype=np.float32),
        versions=np.full(5, 3, np.int32),
        context=np.array([9], np.int32),
        stop="end",
    )
    reader = FrameReader()
    (episode,) = reader.feed(bytes(encode(Episode(id="e", task=Task(id="t", prompt=""), turns=(turn,)))))
    for _ in range(3):
        reader.feed(bytes(encode(Task(id="0", prompt="y" * 1000))))
    assert episode.turns[0].tokens.tolist() == [0, 1, 2, 3, 4]
    assert episode.turns[0].logprobs.tolist() == turn.logprobs.tolist()


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, HeadraceError) and cls.__module__ == errors.__name__
]
ARGUMENTS = {"seconds": 2.5, "value": 7}


def example(cls: type[HeadraceError]) -> HeadraceError:
    names = list(inspect.signature(cls).parameters)
    return cls(*(ARGUMENTS.get(name, f"the {name}") for name in names))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_travels_as_data_and_arrives_the_same(cls):
    error = example(cls)
    found = error_from_record(decode(encode(error_to_record(5, error))))
    assert type(found) is cls
    assert str(found) == str(error)
    assert vars(found) == vars(error)
    assert found.args == error.args
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))


def test_the_tree_has_the_classes_that_its_drawing_shows():
    assert errors.__doc__ is not None
    drawn = {word for line in errors.__doc__.splitlines() for word in line.split() if word in vars(errors)}
    assert drawn == {cls.__name__ for cls in CLASSES}


def test_a_value_that_no_message_carries_arrives_as_its_text():
    error = error_from_record(decode(encode(error_to_record(1, errors.ConfigError("rule", {"a", 1} - {1}, "do")))))
    assert (type(error), error.value) == (errors.ConfigError, "{'a'}")


def test_any_other_exception_arrives_with_its_type_and_text():
    error = error_from_record(decode(encode(error_to_record(3, ZeroDivisionError("by zero")))))
    assert (type(error), str(error)) == (HeadraceError, "ZeroDivisionError: by zero")


# ── Peers ────────────────────────────────────────────────────────────────────────────────────────────────


def with_child(tmp_path: Path, scenario: Callable[[Peer], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def child() -> AsyncIterator[Peer]:
        entry = "headrace.testing.fakes:obedient_child"
        peer = await spawn("worker-7", entry, {"prefix": "you said "}, logs=tmp_path)
        try:
            yield peer
        finally:
            if peer.process.poll() is None:
                await peer.kill()

    async def main() -> None:
        async with asyncio.timeout(30), child() as peer:
            await scenario(peer)

    asyncio.run(main())


def order(peer: Peer, what: str, text: str = "") -> Order:
    return Order(call=peer.next_call(), what=what, text=text)


def test_calls_are_answered_each_with_its_own_reply(tmp_path):
    async def scenario(peer: Peer) -> None:
        replies = await asyncio.gather(*(peer.call(order(peer, "echo", str(i))) for i in range(50)))
        assert [reply.text for reply in replies] == [f"you said {i}" for i in range(50)]
        assert {reply.pid for reply in replies} == {peer.process.pid} != {os.getpid()}
        await peer.close(10.0)
        assert peer.process.poll() == 0

    with_child(tmp_path, scenario)


def test_an_error_in_the_child_is_raised_by_the_call_that_met_it(tmp_path):
    async def scenario(peer: Peer) -> None:
        fine = asyncio.create_task(peer.call(order(peer, "echo", "a")))
        with pytest.raises(HeadraceError, match="ValueError: too odd"):
            await peer.call(order(peer, "fail", "too odd"))
        assert (await fine).text == "you said a"

    with_child(tmp_path, scenario)


def test_a_call_past_its_deadline_names_who_waited_for_whom_and_the_child_goes_on(tmp_path):
    async def scenario(peer: Peer) -> None:
        await peer.call(order(peer, "echo"))
        with pytest.raises(DeadlineExceeded) as caught:
            await peer.call(order(peer, "silent"), deadline_s=0.1)
        assert str(caught.value) == (
            "the controller waited 0.1 s for worker-7 to answer Order, past its deadline; "
            f"process {peer.process.pid}"
        )
        with pytest.raises(DeadlineExceeded, match=r"; its log$"):
            await peer.call(order(peer, "silent"), deadline_s=0.1, look_at="its log")
        assert (await peer.call(order(peer, "echo", "b"))).text == "you said b"

    with_child(tmp_path, scenario)


@pytest.mark.parametrize("status", [0, 7])
def test_a_child_that_ends_unasked_fails_pending_and_later_calls(tmp_path, status):
    async def scenario(peer: Peer) -> None:
        pending = [asyncio.create_task(peer.call(order(peer, "silent"))) for _ in range(3)]
        with pytest.raises(ComponentDied, match=f"worker-7 ended unexpectedly: exit status {status}"):
            await peer.call(order(peer, "exit", str(status)))
        for task in pending:
            with pytest.raises(ComponentDied, match=r"worker-7\.log"):
                await task
        assert peer.died.result().who == "worker-7"
        with pytest.raises(ComponentDied):
            await peer.call(order(peer, "echo"))
        with pytest.raises(ComponentDied):
            peer.tell(order(peer, "echo"))

    with_child(tmp_path, scenario)


def test_a_killed_child_is_reported_with_its_signal(tmp_path):
    async def scenario(peer: Peer) -> None:
        await peer.call(order(peer, "echo"))
        pending = asyncio.create_task(peer.call(order(peer, "hang")))
        await asyncio.sleep(0.05)
        os.kill(peer.process.pid, signal.SIGKILL)
        with pytest.raises(ComponentDied, match="killed by signal 9"):
            await pending

    with_child(tmp_path, scenario)


def test_a_child_that_does_not_end_in_time_is_killed(tmp_path):
    async def scenario(peer: Peer) -> None:
        await peer.call(order(peer, "echo"))
        peer.tell(order(peer, "hang"))
        await peer.close(0.2)
        assert peer.process.poll() == -signal.SIGKILL

    with_child(tmp_path, scenario)


def test_a_closed_child_answers_no_more_calls(tmp_path):
    async def scenario(peer: Peer) -> None:
        await peer.call(order(peer, "echo"))
        await peer.close(10.0)
        await asyncio.sleep(0.05)
        with pytest.raises(ComponentDied, match="worker-7 ended unexpectedly: it was closed"):
            await peer.call(order(peer, "echo"), deadline_s=1.0)

    with_child(tmp_path, scenario)


def test_a_child_ends_itself_when_its_controller_goes_even_in_mid_computation(tmp_path):
    async def scenario(peer: Peer) -> None:
        await peer.call(order(peer, "echo"))
        peer.tell(order(peer, "hang"))
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        channel: Any = peer._channel
        channel._transport.abort()
        assert await peer.process.wait(10.0) == ORPHANED

    with_child(tmp_path, scenario)


def test_a_reply_that_nobody_awaits_any_more_is_not_mistaken_for_another(tmp_path):
    async def scenario(peer: Peer) -> None:
        heard: list[Any] = []
        peer.on_message = heard.append
        given_up = asyncio.create_task(peer.call(order(peer, "echo", "old")))
        await asyncio.sleep(0)
        given_up.cancel()
        assert (await peer.call(order(peer, "echo", "new"))).text == "you said new"
        assert [reply.text for reply in heard] == ["you said old"]
        assert not any(isinstance(record, Failed) for record in heard)

    with_child(tmp_path, scenario)

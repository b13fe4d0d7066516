"""A listening socket's limits, at the door itself: whoever says "open" is admitted."""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sync_builders import until

from headrace.sync.transport import door as module
from headrace.sync.transport.door import Door, RefusedError


class Visit:
    greeting = b"who?"

    def __init__(self) -> None:
        self.said = b""

    def receive(self, data: bytes) -> bytes | None:
        self.said += data
        if len(self.said) > 8:
            raise RefusedError("it talks too much", b"no")
        return self.said if self.said.endswith(b"open") else None


@pytest.fixture
def admitted() -> Iterator[list[socket.socket]]:
    found: list[socket.socket] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture
def door(admitted: list[socket.socket]) -> Iterator[Door]:
    def admit(connection: socket.socket, visit: Visit, proved: bytes) -> None:
        if proved == b"no open":
            raise RefusedError("not for it", b"sorry")
        admitted.append(connection)
        connection.sendall(b"welcome")

    made = Door("127.0.0.1", 0, name="headrace-test-door", meet=Visit, admit=admit)
    yield made
    made.close()


def knock(door: Door, words: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", door.port), timeout=20)
    connection.sendall(words)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed, or for a little while."""
    connection.settimeout(5.0)
    data = b""
    with suppress(OSError):
        while (part := connection.recv(100)) and not (data + part).endswith(b"welcome"):
            data += part
        data += part
    return data


def test_who_proves_itself_is_admitted_and_its_connection_waits_again(door: Door, admitted: Any) -> None:
    connection = knock(door, b"op")
    connection.sendall(b"en")
    assert answer(connection) == b"who?welcome"
    assert admitted[0].gettimeout() is None
    connection.close()


@pytest.mark.parametrize(("words", "told"), [(b"let me in now", b"no"), (b"no open", b"sorry")])
def test_who_is_refused_is_told_and_sent_away(door: Door, admitted: Any, words: bytes, told: bytes) -> None:
    connection = knock(door, words)
    assert answer(connection) == b"who?" + told
    assert admitted == []
    connection.close()


def test_strangers_are_limited_and_the_longest_waiting_gives_way(
    door: Door, admitted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGERS", 8)
    waiting = [knock(door) for _ in range(8)]
    until(lambda: len(door._strangers) == 8)
    assert answer(knock(door, b"open")) == b"who?welcome"
    assert answer(waiting[0]) == b"who?"
    waiting[1].sendall(b"open")
    assert answer(waiting[1]) == b"who?welcome"
    assert len(door._strangers) <= 8
    for one in waiting:
        one.close()


def test_a_stranger_has_a_few_seconds_in_all(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROOF_S", 0.3)
    connection, began = knock(door), time.monotonic()
    with suppress(OSError):
        for _ in range(8):
            connection.sendall(b"x")
            time.sleep(0.1)
    assert answer(connection) in (b"who?", b"")
    assert time.monotonic() - began < 4.0
    until(lambda: not door._strangers)
    connection.close()


def test_accept_slows_down_in_a_crowd(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CROWD", 2)
    monkeypatch.setattr(module, "CROWD_PAUSE_S", 0.2)
    began = time.monotonic()
    waiting = [knock(door) for _ in range(6)]
    assert [one.recv(4) for one in waiting] == [b"who?"] * 6
    assert time.monotonic() - began >= 0.5
    for one in waiting:
        one.close()


def test_without_descriptors_accept_pauses_and_goes_on_when_there_are_some(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SHORT_OF_DESCRIPTORS_S", 0.05)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held: list[int] = []
    with caplog.at_level(logging.WARNING):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            client.connect(("127.0.0.1", door.port))
            until(lambda: "accept pauses" in caplog.text)
        finally:
            for one in held:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    client.sendall(b"open")
    assert answer(client) == b"who?welcome"
    client.close()


def test_many_refusals_are_a_line_in_the_log(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            assert answer(knock(door, b"let me in now")) == b"who?no"
        assert caplog.text.count("connections refused at 127.0.0.1") == 1
        door.close()
    assert ": 29; the last: it talks too much" in caplog.text


def test_a_closed_door_leaves_nothing_open(admitted: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = Door("127.0.0.1", 0, name="headrace-test-door", meet=Visit, admit=lambda *_: None)
    waiting = [knock(made) for _ in range(5)]
    assert [one.recv(4) for one in waiting] == [b"who?"] * 5
    made.close()
    assert [one.recv(4) for one in waiting] == [b""] * 5
    for one in waiting:
        one.close()
    assert len(os.listdir("/proc/self/fd")) == before

"""Strangers at the sockets of a run: they reach the port, and do not have the run's secret.

Whatever they send: they get no weights, the trainer's process lives on, an engine gets the next version within its
deadline, and the process takes at most MEMORY_BYTES more and STRANGERS + 8 descriptors more while it lasts. The
process that is attacked may open 1,024 files.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import attacked_trainer
import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
from attacked_trainer import NBYTES, content
from integration_project import Project, wait_until

from headrace.errors import DeadlineExceeded, SyncError
from headrace.sync.base import Stream
from headrace.sync.deadline import Deadline
from headrace.sync.transport import open_channel, open_inlet

MEMORY_BYTES = 32 << 20
STRANGERS = 64
PORT_S = 20.0


class Trainer:
    """The process that is attacked."""

    def __init__(self, channel: dict[str, Any]):
        self.channel = channel
        self._process = subprocess.Popen(
            [sys.executable, attacked_trainer.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(channel) + "\n")
        with closing(open_inlet(channel, "engine-0")) as inlet:  # what the first transfer takes is no attack's
            assert torch.equal(taken(inlet, self.publish(1)), content(1))
        self.before = self.look()
        self.publish(2)

    def publish(self, number: int) -> Stream:
        self.stream = msgspec.convert(self._ask(f"publish {number}"), Stream)
        return self.stream

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("look")
        return found

    def ports(self) -> list[int]:
        connections = psutil.Process(self._process.pid).net_connections("inet")
        return sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN})

    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        assert said, f"the trainer's process ended with {self._process.wait()}"
        return json.loads(said)


@pytest.fixture(params=["collective", "http"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    channel = open_channel(request.param)
    if "descriptor" in channel:
        os.close(channel.pop("descriptor"))
        channel["descriptor"] = None
    made = Trainer(channel)
    yield made
    made.end()


def assert_unharmed(trainer: Trainer, while_attacked: dict[str, Any] | None = None) -> None:
    """What this module's first lines promise."""
    for found in filter(None, (while_attacked, trainer.look())):
        assert found["opens"]
        assert found["descriptors"] <= trainer.before["descriptors"] + STRANGERS + 8
        assert found["bytes"] <= trainer.before["bytes"] + MEMORY_BYTES
    number = trainer.stream.number + 1
    with closing(open_inlet(trainer.channel, "engine-0")) as inlet:
        assert torch.equal(taken(inlet, trainer.publish(number)), content(number))
    assert trainer.lives()


def taken(inlet: Any, stream: Stream, seconds: float = PORT_S) -> torch.Tensor:
    into = torch.zeros(NBYTES, dtype=torch.uint8)
    for offset, chunk in inlet.chunks(stream, Deadline(seconds, "engine-0", "a version"), None):
        into[offset : offset + len(chunk)] = chunk
    return into


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PORT_S)


def heard(connection: socket.socket, seconds: float = 10.0, most: int = NBYTES) -> bytes:
    """What the other end says until it closes the connection, or says nothing for so long."""
    connection.settimeout(seconds)
    data = b""
    with suppress(OSError):
        while len(data) < most and (part := connection.recv(1 << 16)):
            data += part
    return data


def holds_weights(data: bytes) -> bool:
    """Any 16 bytes of the version on offer, from anywhere in what was heard."""
    image = content(2).numpy().tobytes()[: 251 * 16]  # it repeats itself
    return any(image.find(data[at : at + 16]) >= 0 for at in range(max(0, len(data) - 16)))


# ── What strangers of every kind get ─────────────────────────────────────────────────────────────────────


def test_only_one_port_listens_and_at_one_address(trainer):
    inlet = open_inlet(trainer.channel, "engine-0")
    assert torch.equal(taken(inlet, trainer.stream), content(2))
    assert len(trainer.ports()) == 1
    inlet.close()


@pytest.mark.parametrize(
    "line", [b"", b"GET / HTTP/1.1\r\n", b"\xff" * 79], ids=["silent", "a request's first line", "almost a call"]
)
def test_1100_connections_leave_descriptors_free_and_an_engine_is_served_meanwhile(trainer, line):
    """As many as the process may open files, each with a part of what it would have to send."""
    held = []
    for at in range(1100):
        if at % 256 == 0 and resource_left() < 300:
            break
        try:
            held.append(
                call(trainer.ports()[0]) if at == 0 else socket.create_connection(held[0].getpeername(), 20)
            )
            held[-1].sendall(line)
        except OSError:  # it was sent away already
            continue
    assert_unharmed(trainer, trainer.look())
    for one in held:
        one.close()
    assert_unharmed(trainer)


def test_a_stranger_is_sent_away_after_seconds_however_slowly_it_goes_on(trainer):
    """One byte at a time, never silent for long."""
    connection = call(trainer.ports()[0])
    began = time.monotonic()
    with suppress(OSError):
        for byte in b"GET /streams/x HTTP/1.1\r\n" + b"A: b\r\n" * 20:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
    assert time.monotonic() - began < 10.0
    connection.close()
    assert_unharmed(trainer)


def test_garbage_gets_no_weights_and_costs_its_connection_alone(trainer):
    draw = random.Random(0)
    [port] = trainer.ports()
    for _ in range(60):
        connection = call(port)
        with suppress(OSError):
            connection.sendall(draw.randbytes(draw.choice((1, 8, 80, 81, 300, 5000))))
            connection.shutdown(socket.SHUT_WR)
        assert not holds_weights(heard(connection, most=1 << 16))
        connection.close()
    assert_unharmed(trainer)


def test_large_messages_are_not_kept(trainer):
    """200 MB without an end of a line, and headers without an end: the connection is closed long before."""
    [port] = trainer.ports()
    peak = [0]
    for begins in (b"GET /", b"GET / HTTP/1.1\r\nA: ", b"\0\0\0\0\0\0\0\1"):
        connection = call(port)
        sent = 0
        with suppress(OSError):
            connection.sendall(begins)
            while sent < 200_000_000:
                sent += connection.send(b"x" * (1 << 20))
        connection.close()
        assert sent < 20_000_000
        peak.append(trainer.look()["bytes"])
    assert max(peak) <= trainer.before["bytes"] + MEMORY_BYTES
    assert_unharmed(trainer)


def test_a_stranger_with_another_runs_secret_gets_nothing(trainer):
    other = {**trainer.channel, "secret": open_channel("http")["secret"]}
    inlet = open_inlet(other, "engine-0")
    with pytest.raises((SyncError, DeadlineExceeded)):
        taken(inlet, trainer.stream, seconds=2.0)
    inlet.close()
    assert_unharmed(trainer)


@pytest.mark.parametrize("transport", ["collective", "http"])
def test_an_engine_takes_nothing_from_an_impostor_and_does_not_tell_it_the_secret(transport):
    """It listens where the trainer did, has seen all that was said there, and answers each question somehow."""
    channel = open_channel(transport)
    descriptor = channel.pop("descriptor", None)
    if descriptor is not None:
        os.close(descriptor)
        channel["descriptor"] = None
    trainer = Trainer(channel)
    stream = trainer.stream
    trainer.end()
    place = json.dumps(stream.location)
    found = re.search(r'"port": (\d+)|127.0.0.1:(\d+)', place)
    assert found is not None
    port = int(found[1] or found[2])
    told: list[bytes] = []
    with socket.create_server(("127.0.0.1", port)) as listening:
        impostor = threading.Thread(target=_impostor, args=(listening, transport, told), daemon=True)
        impostor.start()
        inlet = open_inlet(channel, "engine-0")
        with pytest.raises(SyncError, match=r"does not have this (run|channel)'s secret"):
            taken(inlet, stream)
        inlet.close()
    assert told
    secret = channel["secret"]
    assert not any(secret.encode() in data or bytes.fromhex(secret) in data for data in told)


def _impostor(listening: socket.socket, transport: str, told: list[bytes]) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection:
                if transport == "collective":
                    connection.sendall(b"headrace/1 " + bytes(32))
                    told.append(connection.recv(4096))
                    connection.sendall(b"w" + bytes(32) + bytes(4096))
                else:
                    told.append(connection.recv(4096))
                    wanted = told[-1].split(b"bytes=")[1].split(b"\r\n")[0].decode()
                    head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {wanted}/{NBYTES}\r\n"
                    head += f"Headrace-Proof: {'0' * 64}\r\nContent-Length: {NBYTES}\r\n\r\n"
                    connection.sendall(head.encode() + bytes(4096))


def test_what_was_seen_on_the_way_is_of_no_use_a_second_time(trainer):
    """A proxy keeps both directions of an engine's connection; then each of its messages is sent again."""
    seen: list[bytes] = []
    [port] = trainer.ports()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = listening.getsockname()[1]
        threading.Thread(target=_spy, args=(listening, port, seen), daemon=True).start()
        place = json.loads(json.dumps(trainer.stream.location).replace(str(port), str(ours)))
        inlet = open_inlet(trainer.channel, "engine-0")
        passed = msgspec.structs.replace(trainer.stream, location=place)
        assert torch.equal(taken(inlet, passed), content(2))
    assert seen
    for data in list(seen):
        connection = call(port)
        with suppress(OSError):
            connection.sendall(data)
        answer = heard(connection, seconds=8.0)
        assert len(answer) < 1000
        assert not holds_weights(answer)
        connection.close()
    inlet.close()
    assert_unharmed(trainer)


def _spy(listening: socket.socket, port: int, seen: list[bytes]) -> None:
    with suppress(OSError):
        while True:
            engine, _ = listening.accept()
            sender = call(port)
            for source, target, keep in ((engine, sender, seen), (sender, engine, None)):
                threading.Thread(target=_pass_on, args=(source, target, keep), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, keep: list[bytes] | None) -> None:
    source.settimeout(None)
    target.settimeout(None)
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if keep is not None:
                keep.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


# ── The collective transport's own ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def collective() -> Iterator[Trainer]:
    channel = open_channel("collective")
    os.close(channel["descriptor"])
    made = Trainer({**channel, "descriptor": None})
    yield made
    made.end()


def _store(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_torchs_store_finds_nobody_to_list_and_nothing_to_fill(collective):
    """Before, whoever reached the port could list keys, take a rank, and store 7 MB under each key."""

    def attack() -> None:
        store = _store(collective.ports()[0])
        for at in range(40):
            store.set(f"k{at}", b"x" * 7_000_000)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError):
        attack()
    assert_unharmed(collective)


@pytest.mark.parametrize("ahead", [0, 2, 4])
def test_guessing_the_number_of_a_group_takes_no_rank(collective, ahead):
    """The stranger knows the protocol, the group's number and those of the next ones. Then the engine comes."""
    [port] = collective.ports()
    group = collective.stream.location["group"] + ahead
    for lane in (0, 1):
        connection = call(port)
        greeting = connection.recv(43)
        assert len(greeting) == 43
        connection.sendall(bytes(32) + struct.pack("<QII", group, 1, lane) + bytes(32))
        assert heard(connection) == b""
        connection.close()
    inlet = open_inlet(collective.channel, "engine-0")
    assert torch.equal(taken(inlet, collective.stream), content(2))
    inlet.close()
    assert_unharmed(collective)


# ── A whole run ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("transport", ["collective", "http"])
def test_a_run_whose_ports_are_attacked_finishes_and_tells_its_secret_to_nobody(project: Project, transport):
    """Connections without number from the trainer's start to its end: it trains all of its steps."""
    run = project.start("train", "config.toml", "--set", f"sync.transport={transport}")
    over = threading.Event()
    attacks = threading.Thread(target=_attack_every_port, args=(project.children, over))
    attacks.start()
    try:
        wait_until(lambda: project.steps_done() >= 2 or run.poll() is not None, 90, "two steps")
        environments = [_told_to(process) for process in project.children().values()]
        output, _ = run.communicate(timeout=150)
    finally:
        over.set()
        attacks.join()
        run.kill()
    assert run.returncode == 0, output
    summary = json.loads((project.run / "summary.json").read_text())
    assert (summary["steps"], summary["finished"]) == (12, True)
    events = [json.loads(line) for line in (project.run / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["kind"] in ("sync_failed", "engine_replaced")]
    written = [file.read_bytes() for file in project.run.rglob("*") if file.is_file()]
    for said in (*environments, output.encode(), *written):
        assert not re.search(rb"[\"']secret[\"'] *[:=]", said)


def _told_to(process: psutil.Process) -> bytes:
    with suppress(psutil.NoSuchProcess):
        return json.dumps([process.cmdline(), process.environ()]).encode()
    return b""


def _attack_every_port(children: Callable[[], dict[str, psutil.Process]], over: threading.Event) -> None:
    draw, held = random.Random(0), []
    while not over.is_set():
        found = children()
        ports = []
        if "trainer" in found:
            with suppress(psutil.Error):
                connections = found["trainer"].net_connections("inet")
                ports = [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
        for port in ports:
            for _ in range(40):
                with suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    held[-1].sendall(draw.choice((b"", b"GET / HTTP/1.1\r\n", draw.randbytes(100))))
        while len(held) > 400:
            held.pop(0).close()
        over.wait(0.2)
    for one in held:
        one.close()


def resource_left() -> int:
    """Descriptors that this process can still open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))

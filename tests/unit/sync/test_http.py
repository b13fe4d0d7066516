from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
from faulty_proxy import FaultyProxy
from sync_builders import deadline, draft, empty_like, noise, opened, run_python, until, version

from headrace.errors import ConfigError, DeadlineExceeded, SyncError
from headrace.records import decode
from headrace.sync import open_channel, open_receiver, open_sender
from headrace.sync.base import Destination, Stream
from headrace.sync.transport import http as transport
from headrace.sync.transport.handshake import make_secret
from headrace.sync.transport.http import HttpInlet, HttpOutlet
from headrace.sync.transport.proofs import Credentials
from headrace.testing.transport import weights

SECRET = make_secret()
PROPER = "with the proof that belongs to it"


@pytest.fixture
def outlet() -> Iterator[HttpOutlet]:
    made = HttpOutlet("127.0.0.1", 0, SECRET)
    yield made
    made.close()


def get(
    stream: Stream, method: str = "GET", authorization: str | None = PROPER, wanted: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) as any client sees them."""
    url = urlsplit(stream.location["url"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=20)
    if authorization == PROPER:
        authorization = Credentials(SECRET).of_request(method, url.path, wanted)[1]
    given = (("Authorization", authorization), ("Range", wanted))
    headers = {name: value for name, value in given if value is not None}
    connection.request(method, url.path, headers=headers)
    answer = connection.getresponse()
    found = (answer.status, dict(answer.headers), answer.read())
    connection.close()
    return found


def received(stream: Stream, inlet: HttpInlet | None = None, seconds: float = 20.0) -> torch.Tensor:
    into = torch.zeros(stream.nbytes, dtype=torch.uint8)
    for _ in (inlet or HttpInlet(SECRET)).chunks(stream, deadline(seconds), into):
        pass
    return into


def request_for(path: str, wanted: str, secret: str = SECRET) -> str:
    authorization = Credentials(secret).of_request("GET", path, wanted)[1]
    return f"GET {path} HTTP/1.1\r\nAuthorization: {authorization}\r\nRange: {wanted}\r\n\r\n"


def at(stream: Stream, path: str) -> Stream:
    """The same server, another path."""
    url = urlsplit(stream.location["url"])
    return Stream(number=stream.number, nbytes=stream.nbytes, location={"url": f"http://{url.netloc}{path}"})


# ── The server ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wanted", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        ("bytes=999-999", 999, 999),
        ("bytes=990-5000", 990, 999),
        ("bytes=7-", 7, 999),
    ],
)
def test_a_range_is_answered_by_its_bytes(outlet: HttpOutlet, wanted: str, first: int, last: int) -> None:
    content = noise(1000)
    stream = opened(outlet, 1, content)
    status, headers, body = get(stream, wanted=wanted)
    assert status == 206
    assert headers["Content-Range"] == f"bytes {first}-{last}/1000"
    assert headers["ETag"] == f'"{stream.location["url"].rsplit("/", 1)[1]}"'
    assert body == content[first : last + 1].numpy().tobytes()


def test_without_a_range_the_answer_is_the_stream(outlet: HttpOutlet) -> None:
    content = noise(3 << 20)
    status, headers, body = get(opened(outlet, 1, content))
    assert (status, "Content-Range" in headers) == (200, False)
    assert body == content.numpy().tobytes()


@pytest.mark.parametrize(
    "wanted",
    ["bytes=1000-1001", "bytes=5-4", "bytes=-5", "bytes=a-b", "lines=1-2", "bytes=0-1,5-6", f"bytes={'9' * 40}-"],
)
def test_a_range_that_is_none_is_refused(outlet: HttpOutlet, wanted: str) -> None:
    status, headers, body = get(opened(outlet, 1, noise(1000)), wanted=wanted)
    assert (status, headers["Content-Range"], body) == (416, "bytes */1000", b"")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Headrace ",
        f"Headrace {SECRET}",
        f"Bearer {SECRET}",
        SECRET,
        "Headrace s\xe9cret",
        Credentials(make_secret()).of_request("GET", "/", None)[1],
        f"Headrace {'0' * 32}:{'0' * 64}",
    ],
    ids=["none", "empty", "no proof", "secret", "bearer", "bare", "no ASCII", "other secret", "zeros"],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_has_no_secret_learns_nothing(outlet: HttpOutlet, authorization: str | None, method: str) -> None:
    stream = opened(outlet, 1, noise(1000))
    for asked in (stream, at(stream, "/streams/none"), at(stream, "/")):
        status, headers, body = get(asked, method, authorization)
        assert (status, headers["WWW-Authenticate"], body) == (401, "Headrace", b"")
        assert "Headrace-Proof" not in headers
        assert "Content-Range" not in headers
        assert "ETag" not in headers


def connected(stream: Stream) -> socket.socket:
    url = urlsplit(stream.location["url"])
    return socket.create_connection((url.hostname or "", url.port or 0), timeout=10)


def exchange(stream: Stream, *said: bytes) -> bytes:
    """All that is answered on one connection until it is closed."""
    with connected(stream) as client:
        for part in said:
            client.sendall(part)
            time.sleep(0.05)
        data = b""
        with suppress(ConnectionResetError):  # more was sent than was read
            while part := client.recv(1 << 16):
                data += part
        return data


def test_a_request_that_somebody_saw_is_no_use_to_him(outlet: HttpOutlet) -> None:
    stream = opened(outlet, 1, noise(1000))
    path = urlsplit(stream.location["url"]).path
    seen = request_for(path, "bytes=0-99").replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").encode()
    assert exchange(stream, seen).startswith(b"HTTP/1.1 206 ")
    for again in (
        seen,
        seen.replace(b"0-99", b"0-98"),
        seen.replace(b"GET", b"HEAD"),
        seen.replace(b"-1 ", b"-2 "),
    ):
        assert exchange(stream, again).startswith(b"HTTP/1.1 401 Unauthorized\r\n")


def test_an_answer_proves_that_it_is_of_somebody_with_the_secret(outlet: HttpOutlet) -> None:
    stream = opened(outlet, 1, noise(1000))
    path = urlsplit(stream.location["url"]).path
    credentials = Credentials(SECRET)
    for wanted, status, came in (
        ("bytes=10-19", 206, "bytes 10-19/1000"),
        (None, 200, ""),
        ("bytes=5000-", 416, "bytes */1000"),
    ):
        nonce, authorization = credentials.of_request("GET", path, wanted)
        found, headers, _ = get(stream, authorization=authorization, wanted=wanted)
        given = headers["Headrace-Proof"]
        assert (found, headers.get("Content-Range", "")) == (status, came)
        assert credentials.answers(nonce, path, status, given, came)
        assert not Credentials(make_secret()).answers(nonce, path, status, given, came)
        assert not credentials.answers(bytes(16), path, status, given, came)
        assert not credentials.answers(nonce, path, status, given, f"{came}0")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 4096, 431),
        (b"x" * 5000, 431),
        (b"POST / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://a/ HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"y" * 256 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\na: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 401),
    ],
)
def test_what_is_no_request_of_ours_is_refused_and_told_nothing(
    outlet: HttpOutlet, head: bytes, status: int
) -> None:
    answer = exchange(opened(outlet, 1, noise(1000)), head)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) or (status == 431 and answer == b"")
    assert not any(word in answer.lower() for word in (b"streams", b"range", b"proof", b"etag", b"1000"))


def test_connections_are_limited_by_the_engines_and_who_comes_too_many_is_told_to_wait(
    outlet: HttpOutlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CONNECTIONS", 2)
    monkeypatch.setattr(transport, "CONNECTIONS_OF_ENGINE", 2)
    content = noise(1000)
    stream = opened(outlet, 1, content)
    path = urlsplit(stream.location["url"]).path
    held = [connected(stream) for _ in range(2)]
    for client in held:
        client.sendall(request_for(path, "bytes=0-9").encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 206")
    answer = exchange(stream, request_for(path, "bytes=0-9").encode())
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in answer
    leaving = threading.Timer(0.5, held[0].close)
    leaving.start()
    assert torch.equal(received(stream), content)
    leaving.join()
    held[1].close()
    engines = [Destination(name=f"engine-{i}", version=0) for i in range(3)]
    outlet.open(draft(2, 10, "http"), engines, torch.device("cpu"))
    assert outlet._server.most == 6


def test_a_head_that_comes_too_slowly_ends_also_a_connection_that_has_proved_itself(
    outlet: HttpOutlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HEAD_S", 0.3)
    stream = opened(outlet, 1, noise(1000))
    with connected(stream) as client:
        client.sendall(request_for(urlsplit(stream.location["url"]).path, "bytes=0-9").encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 206")
        for _ in range(20):
            with suppress(OSError):
                client.sendall(b"G")
            time.sleep(0.1)
        assert not outlet._server._connections


def test_other_streams_and_other_paths_are_not_found_and_earlier_ones_are_gone(outlet: HttpOutlet) -> None:
    first = opened(outlet, 1, noise(1000))
    assert get(first, "HEAD")[0] == 200
    other = HttpOutlet("127.0.0.1", 0, SECRET)
    foreign = urlsplit(opened(other, 1, noise(1000)).location["url"]).path
    other.close()
    for path in (foreign, "/", "/streams/", "/streams/1", "/other"):
        assert (path, get(at(first, path))[0]) == (path, 404)
    second = opened(outlet, 2, noise(1000))
    assert [get(stream, method)[0] for stream in (first, second) for method in ("GET", "HEAD")] == [
        410,
        410,
        200,
        200,
    ]


def test_bytes_that_are_not_filled_yet_are_asked_for_again_later(
    outlet: HttpOutlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "HOLD_S", 0.1)
    stream = opened(outlet, 1, noise(1000), filled=500)
    assert get(stream, wanted="bytes=0-499")[0] == 206
    status, headers, _ = get(stream, wanted="bytes=0-500")
    assert (status, headers["Retry-After"]) == (503, "0")


def test_a_request_is_held_until_its_bytes_are_filled(outlet: HttpOutlet) -> None:
    content = noise(1000)
    stream = opened(outlet, 1, content, filled=0)
    filling = threading.Timer(0.2, lambda: outlet.advance(1000))
    started = time.monotonic()
    filling.start()
    assert get(stream, wanted="bytes=100-199")[2] == content[100:200].numpy().tobytes()
    assert 0.2 <= time.monotonic() - started < 4.0
    filling.join()


def test_a_request_that_is_held_when_the_stream_is_replaced_is_answered_at_once(outlet: HttpOutlet) -> None:
    stream = opened(outlet, 1, noise(1000), filled=0)
    replacing = threading.Timer(0.1, lambda: opened(outlet, 2, noise(1000)))
    started = time.monotonic()
    replacing.start()
    assert get(stream, wanted="bytes=0-999")[0] == 410
    assert time.monotonic() - started < 4.0
    replacing.join()


def test_no_two_streams_have_one_name(outlet: HttpOutlet) -> None:
    other = HttpOutlet("127.0.0.1", 0, SECRET)
    streams = [opened(one, number, noise(10)) for one in (outlet, other) for number in (1, 1, 2)]
    other.close()
    assert len({stream.location["url"].rsplit("/", 1)[1] for stream in streams}) == 6


def test_an_address_that_is_taken_is_an_error(outlet: HttpOutlet) -> None:
    port = urlsplit(outlet.location()["url"]).port
    assert port is not None
    with pytest.raises(SyncError, match=f"nothing can be served at 127.0.0.1, port {port}: .*in use") as caught:
        HttpOutlet("127.0.0.1", port, SECRET)
    assert caught.value.stage == "announce"


def test_a_channel_has_a_secret_of_its_own_and_one_address() -> None:
    channel = open_channel("http", host="::1", port=1234)
    assert json.loads(json.dumps(channel)) == channel
    assert (channel["host"], channel["port"]) == ("::1", 1234)
    assert len(bytes.fromhex(channel["secret"])) == 32
    assert channel["secret"] != open_channel("http")["secret"]
    with pytest.raises(ConfigError, match="one address"):
        open_channel("http", host="0.0.0.0")


def test_addresses_of_the_sixth_version_work_or_are_refused_where_the_machine_has_none(record_property) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        record_property("sixth version", "refused")
        with pytest.raises(SyncError, match="nothing can be served at ::1, port 0"):
            HttpOutlet("::1", 0, SECRET)
        return
    record_property("sixth version", "served")
    six = HttpOutlet("::1", 0, SECRET)
    content = noise(1000)
    stream = opened(six, 1, content)
    assert stream.location["url"].startswith("http://[::1]:")
    assert torch.equal(received(stream), content)
    six.close()


def test_closing_ends_every_thread_whatever_it_waits_for() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-http")]

    outlet = HttpOutlet("127.0.0.1", 0, SECRET)
    stream = opened(outlet, 1, noise(64 << 20), filled=(64 << 20) - 1)
    url = urlsplit(stream.location["url"])
    clients = []
    for request in (
        request_for(url.path, "bytes=0-"),
        request_for(url.path, f"bytes={(64 << 20) - 10}-"),
        "GET /st",
        "",
    ):
        clients.append(socket.create_connection((url.hostname or "", url.port or 0)))
        clients[-1].sendall(request.encode())
    until(lambda: len(threads()) == 3)
    time.sleep(0.1)
    started = time.monotonic()
    outlet.close()
    assert threads() == []
    assert time.monotonic() - started < 4.0
    with pytest.raises(OSError):
        socket.create_connection((url.hostname or "", url.port or 0))
    for client in clients:
        client.close()


# ── The receiver ─────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_go_straight_into_memory_that_lies_as_the_stream_does(outlet: HttpOutlet) -> None:
    content = noise((8 << 20) + 5)
    stream, into = opened(outlet, 1, content), torch.zeros(len(content), dtype=torch.uint8)
    lengths = []
    for offset, chunk in HttpInlet(SECRET).chunks(stream, deadline(), into):
        assert chunk.data_ptr() == into.data_ptr() + offset
        lengths.append((offset, len(chunk)))
    assert lengths == [(0, 4 << 20), (4 << 20, 4 << 20), (8 << 20, 5)]
    assert torch.equal(into, content)
    found = [(chunk.data_ptr(), chunk.clone()) for _, chunk in HttpInlet(SECRET).chunks(stream, deadline(), None)]
    assert len({place for place, _ in found}) == 1
    assert torch.equal(torch.cat([chunk for _, chunk in found]), content)


def test_a_stream_of_no_bytes_arrives(outlet: HttpOutlet) -> None:
    assert len(received(opened(outlet, 1, noise(0)))) == 0


def test_one_connection_serves_streams_of_several_ranges(
    outlet: HttpOutlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "RANGE_BYTES", 100_000)
    inlet = HttpInlet(SECRET)
    for number in (1, 2):
        content = noise(1_234_567, seed=number)
        stream = opened(outlet, number, content)
        if number == 1:
            proxy = FaultyProxy(stream)
        proxy._path = urlsplit(stream.location["url"]).path
        assert torch.equal(received(proxy.stream(stream), inlet), content)
    assert proxy.connections == 1
    inlet.close()
    proxy.close()


def test_a_connection_that_was_idle_too_long_is_made_again(
    outlet: HttpOutlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "IDLE_S", 0.05)
    inlet, content = HttpInlet(SECRET), noise(1000)
    stream = opened(outlet, 1, content)
    for _ in range(2):
        assert torch.equal(received(stream, inlet), content)
        until(lambda: not outlet._server._connections)
    inlet.close()


def test_several_receivers_follow_the_filling(outlet: HttpOutlet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HOLD_S", 0.05)
    content, found = noise(20 << 20), {}
    stream = opened(outlet, 1, content, filled=0)

    def receive(name: int) -> None:
        found[name] = received(stream)

    threads = [threading.Thread(target=receive, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for filled in range(0, len(content), 3 << 20):
        outlet.advance(filled)
        time.sleep(0.08)
    outlet.advance(len(content))
    for thread in threads:
        thread.join()
    assert [torch.equal(found[name], content) for name in range(4)] == [True] * 4


def test_the_first_bytes_arrive_before_the_last_are_filled(outlet: HttpOutlet) -> None:
    content = noise(10 << 20)
    chunks = HttpInlet(SECRET).chunks(opened(outlet, 1, content, filled=5 << 20), deadline(), None)
    assert torch.equal(next(chunks)[1], content[: 4 << 20])
    outlet.advance(len(content))
    assert torch.equal(next(chunks)[1], content[4 << 20 : 8 << 20])
    chunks.close()  # type: ignore[attr-defined]


def test_a_wrong_secret_ends_it_at_once(outlet: HttpOutlet) -> None:
    started = time.monotonic()
    with pytest.raises(SyncError, match="does not know this channel's secret") as caught:
        received(opened(outlet, 1, noise(10)), HttpInlet(make_secret()))
    assert caught.value.stage == "transfer"
    assert time.monotonic() - started < 4.0


def test_a_stream_that_is_not_there_ends_it_at_once(outlet: HttpOutlet) -> None:
    stream = opened(outlet, 1, noise(10))
    with pytest.raises(SyncError, match=r"version 1: http://.*/streams/none answers 404 Not Found"):
        received(at(stream, "/streams/none"))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_connection_that_is_cut_anywhere_is_made_again_and_goes_on_where_it_was(
    outlet: HttpOutlet, seed: int, reset: bool
) -> None:
    draw, content = random.Random(seed), noise(12_345_678, seed)
    stream = opened(outlet, 1, content)
    # Within the head, at its end, within the body.
    places = [0, 1, 50, 150, 200, 230, *(draw.randrange(200, 3_000_000) for _ in range(12))]
    draw.shuffle(places)
    proxy = FaultyProxy(stream, lambda n: places[n] if n < len(places) else None, reset=reset)
    assert torch.equal(received(proxy.stream(stream)), content)
    assert proxy.connections > 6
    if not reset:  # what was given arrived, and nothing of it was asked for again
        assert proxy.given < len(content) + 300 * (proxy.connections + 1)
    proxy.close()


def test_a_server_that_goes_away_for_a_while_is_waited_for(outlet: HttpOutlet) -> None:
    content = noise(9 << 20)
    stream = opened(outlet, 1, content)
    proxy = FaultyProxy(stream, lambda n: 5 << 20 if n == 0 else None)
    into = torch.zeros(len(content), dtype=torch.uint8)
    chunks = HttpInlet(SECRET).chunks(proxy.stream(stream), deadline(), into)
    next(chunks)
    proxy.close()
    returning = threading.Timer(0.3, proxy.listen)
    returning.start()
    for _ in chunks:
        pass
    assert torch.equal(into, content)
    assert proxy.connections == 2
    returning.join()
    proxy.close()


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad Gateway", "503 Later\r\nRetry-After: 1", "503 Later"])
def test_a_server_that_cannot_answer_now_is_asked_again(outlet: HttpOutlet, status: str) -> None:
    content = noise(1000)
    stream = opened(outlet, 1, content)
    refusals = [f"HTTP/1.1 {status}\r\nContent-Length: 3\r\n\r\nno\n".encode()]
    proxy = FaultyProxy(stream, change=lambda data: refusals.pop() if refusals else data)
    started = time.monotonic()
    assert torch.equal(received(proxy.stream(stream)), content)
    assert (time.monotonic() - started >= 1.0) == ("Retry-After" in status)
    proxy.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", "answers 200 OK"),
        ("HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "answers 302 Found"),
    ],
)
def test_an_answer_to_another_question_ends_it_at_once(outlet: HttpOutlet, answer: str, why: str) -> None:
    stream = opened(outlet, 1, noise(1000))
    proxy = FaultyProxy(stream, change=lambda data: answer.encode() + bytes(1000))
    with pytest.raises(SyncError, match=why):
        received(proxy.stream(stream))
    assert proxy.connections == 1
    proxy.close()


def test_other_bytes_than_those_asked_for_are_not_taken(outlet: HttpOutlet) -> None:
    stream = opened(outlet, 1, noise(1000))
    wrong = b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n0123456789"
    proxy = FaultyProxy(stream, change=lambda data: wrong)
    with pytest.raises(DeadlineExceeded) as caught:
        received(proxy.stream(stream), seconds=0.5)
    assert str(caught.value.__cause__) == "the answer to bytes 0-999/1000 has bytes 0-9/10"
    assert proxy.connections > 2
    proxy.close()


def test_an_answer_that_is_to_be_the_connections_last_is_read_to_its_end(outlet: HttpOutlet) -> None:
    content = noise(100_000)
    stream = opened(outlet, 1, content)
    proxy = FaultyProxy(stream, change=lambda data: data.replace(b"Server: headrace", b"Connection: close"))
    assert torch.equal(received(proxy.stream(stream)), content)
    proxy.close()


def test_a_stream_that_is_replaced_while_it_is_read_is_refused(outlet: HttpOutlet) -> None:
    content = noise(200 << 20)  # more than fits into the buffers between the two
    chunks = HttpInlet(SECRET).chunks(opened(outlet, 1, content), deadline(), None)
    next(chunks)
    later = noise(1000, seed=1)
    stream = opened(outlet, 2, later)
    with pytest.raises(
        SyncError, match=rf"version 1 was replaced by a later one after \d+ of {200 << 20} bytes"
    ) as it:
        list(chunks)
    assert it.value.stage == "transfer"
    assert torch.equal(received(stream), later)


def test_a_stream_that_is_replaced_after_its_last_chunk_is_refused(outlet: HttpOutlet) -> None:
    chunks = HttpInlet(SECRET).chunks(opened(outlet, 1, noise(1000)), deadline(), None)
    next(chunks)
    opened(outlet, 2, noise(1000))
    with pytest.raises(SyncError, match="version 1 was replaced by a later one after 1000 of 1000 bytes"):
        next(chunks)


def test_a_stream_that_is_given_up_half_way_does_not_disturb_the_next(outlet: HttpOutlet) -> None:
    inlet, content = HttpInlet(SECRET), noise(50 << 20)
    stream = opened(outlet, 1, content)
    chunks = inlet.chunks(stream, deadline(), None)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert torch.equal(received(stream, inlet), content)


def test_bits_that_flip_on_the_way_are_found_by_verify_and_named() -> None:
    channel = open_channel("http")
    sender, receiver, standby = open_sender(channel), open_receiver(channel), empty_like(weights(1))
    manifest, seal = sender.send(version(1), weights(1))
    [stream] = manifest.streams
    before = weights(1)["counts"].numpy().tobytes()
    after = before[:30] + bytes([before[30] ^ 4]) + before[31:]
    proxy = FaultyProxy(stream, change=lambda data: data.replace(before, after))
    manifest = msgspec.structs.replace(manifest, streams=(proxy.stream(stream),))
    receiver.receive(manifest, standby)
    with pytest.raises(SyncError, match=r"checksums differ for counts($|;)"):
        receiver.verify(manifest, seal, standby)
    proxy.close()
    receiver.close()
    sender.close()


SENDER = """
import json, sys, time, torch
from headrace.records import encode
from headrace.sync import open_sender
from sync_builders import version

sender = open_sender(json.loads(sys.argv[1]))
manifest = sender.stage(version(1), {"w": torch.full((5_000_000,), 2.0)})
sender._outlet.advance(10_000_000)
sys.stdout.write(encode(manifest).hex() + "\\n")
sys.stdout.flush()
time.sleep(600)
"""


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_hangs_while_it_fills_is_given_up_at_the_deadline(fate: signal.Signals) -> None:
    channel = open_channel("http")
    child = run_python(SENDER, json.dumps(channel))
    assert child.stdout is not None
    manifest = decode(bytes.fromhex(child.stdout.readline()))
    ending = threading.Timer(0.5, lambda: child.send_signal(fate))
    started = time.monotonic()
    ending.start()
    with pytest.raises(DeadlineExceeded, match="version 1") as caught:
        open_receiver(channel, deadline_s=2.0).receive(manifest, {"w": torch.zeros(5_000_000)})
    # The sender would hang for 600 s; a busy machine may notice a deadline late.
    assert 2.0 <= time.monotonic() - started < 7.0
    assert isinstance(caught.value.__cause__, ConnectionError if fate == signal.SIGKILL else TimeoutError)
    ending.join()
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_connection_that_never_stops_but_is_too_slow_is_given_up_at_the_deadline_too(outlet: HttpOutlet) -> None:
    stream = opened(outlet, 1, noise(1 << 20))

    def drip(data: bytes) -> bytes:
        time.sleep(0.9)
        return data

    proxy = FaultyProxy(stream, change=drip)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        received(proxy.stream(stream), seconds=1.0)
    # All of it would take 14 s.
    assert 1.0 <= time.monotonic() - started < 6.0
    proxy.close()


def test_a_draft_has_its_place_before_it_is_filled(outlet: HttpOutlet) -> None:
    memory = outlet.open(draft(1, 10, "http"), (), torch.device("cpu"))
    before = outlet.location()
    memory.zero_()
    outlet.advance(10)
    assert outlet.location() == outlet.reopen(()) == before

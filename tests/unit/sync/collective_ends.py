"""The two ends of the transport `collective` in processes of their own.

engine    takes the streams it is told of on standard input; says every chunk, and how each stream ended
trainer   offers one stream, fills half of it and waits
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from headrace.errors import HeadraceError
from headrace.records import WeightVersion
from headrace.sync.base import Destination, Manifest, Outlet, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.transport import open_inlet, open_outlet

BUCKET = 64 << 10
NBYTES = 16 * BUCKET


def content(number: int, nbytes: int = NBYTES) -> torch.Tensor:
    return ((torch.arange(nbytes) * (2 * number + 1)) % 251).to(torch.uint8)


def checksum(number: int, nbytes: int = NBYTES) -> int:
    return zlib.crc32(content(number, nbytes).numpy().tobytes())


def begin(
    outlet: Outlet,
    number: int,
    to: Sequence[str],
    share: float = 1.0,
    nbytes: int = NBYTES,
    has: int | None = None,
) -> tuple[Stream, Callable[[], None]]:
    """Offer a stream to these engines, filled as far as `share` says. What is returned with it fills the rest. The
    engines have version `has`, or the one before this."""
    draft = Manifest(
        version=WeightVersion(number=number, parent=number - 1, step=number),
        payload="full",
        transport=outlet.name,
        tensors=(),
        nbytes=nbytes,
        streams=(Stream(number=number, nbytes=nbytes),),
    )
    has = number - 1 if has is None else has
    memory = outlet.open(draft, [Destination(name=name, version=has) for name in to], torch.device("cpu"))
    filled = int(share * nbytes)
    memory[:filled] = content(number, nbytes)[:filled]
    outlet.advance(filled)

    def fill() -> None:
        memory[filled:] = content(number, nbytes)[filled:]
        outlet.advance(nbytes)

    return Stream(number=number, nbytes=nbytes, location=outlet.location()), fill


class EngineProcess:
    def __init__(self, channel: dict[str, Any], name: str, deadline_s: float = 20.0):
        self.name = name
        self._process = _start("engine", channel, name=name, deadline_s=deadline_s)
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self, stream: Stream, straight: bool = True) -> None:
        assert self._process.stdin is not None
        line = {"stream": msgspec.to_builtins(stream), "straight": straight}
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def expect(self, what: str, seconds: float = 60.0) -> dict[str, Any]:
        """The next thing it says of this kind."""
        end = time.monotonic() + seconds
        while True:
            said = self._said.get(timeout=max(0.01, end - time.monotonic()))
            if what in said:
                return said

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Also of one that was stopped."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))


def start_trainer(channel: dict[str, Any], to: Sequence[str]) -> tuple[subprocess.Popen[bytes], Stream]:
    process = _start("trainer", channel, to=list(to))
    assert process.stdout is not None
    return process, msgspec.convert(json.loads(process.stdout.readline())["offered"], Stream)


def _start(role: str, channel: dict[str, Any], **told: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, role, json.dumps({"channel": channel, **told})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=() if channel["descriptor"] is None else (channel["descriptor"],),
    )


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _engine(channel: dict[str, Any], name: str, deadline_s: float) -> None:
    inlet = open_inlet(channel, name)
    for line in sys.stdin:
        told = json.loads(line)
        stream = msgspec.convert(told["stream"], Stream)
        found = torch.zeros(stream.nbytes, dtype=torch.uint8)
        began = time.monotonic()
        try:
            deadline = Deadline(deadline_s, name, f"version {stream.number}")
            for offset, chunk in inlet.chunks(stream, deadline, found if told["straight"] else None):
                found[offset : offset + len(chunk)] = chunk
                _say(has=offset + len(chunk))
            _say(took=zlib.crc32(found.numpy().tobytes()))
        except HeadraceError as error:
            _say(failed=type(error).__name__, why=str(error), seconds=time.monotonic() - began)


def _trainer(channel: dict[str, Any], to: list[str]) -> None:
    outlet = open_outlet(channel)
    stream, _ = begin(outlet, 1, to, share=0.5)
    _say(offered=msgspec.to_builtins(stream))
    time.sleep(600)


if __name__ == "__main__":
    {"engine": _engine, "trainer": _trainer}[sys.argv[1]](**json.loads(sys.argv[2]))

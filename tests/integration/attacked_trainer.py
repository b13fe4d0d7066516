"""A trainer's end of a transport in a process of its own, told what to do by lines on standard input.

    publish N    offer version N, whole; answers with the stream
    look         answers with what the process holds: descriptors, memory, whether it can open a file

Its channel comes on standard input too: secrets are no arguments.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import msgspec
import psutil
import torch

from headrace.records import WeightVersion
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.transport import open_outlet

NBYTES = 3 << 20
DESCRIPTORS = 1024


def content(number: int) -> torch.Tensor:
    period = ((torch.arange(251) * (2 * number + 1)) % 251).to(torch.uint8)
    return period.repeat(NBYTES // 251 + 1)[:NBYTES]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    outlet = open_outlet(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        word, *rest = line.split()
        answer = {"publish": _publish, "look": _look}[word](outlet, *rest)
        print(json.dumps(answer), flush=True)
    outlet.close()


def _publish(outlet: Any, number: str) -> Any:
    version = int(number)
    draft = Manifest(
        version=WeightVersion(number=version, parent=version - 1, step=version),
        payload="full",
        transport=outlet.name,
        tensors=(),
        nbytes=NBYTES,
        streams=(Stream(number=version, nbytes=NBYTES),),
    )
    to = [Destination(name="engine-0", version=-1)]  # met anew for each version
    outlet.open(draft, to, torch.device("cpu")).copy_(content(version))
    outlet.advance(NBYTES)
    return msgspec.to_builtins(Stream(number=version, nbytes=NBYTES, location=outlet.location()))


def _look(outlet: Any) -> Any:
    try:
        with open("/dev/null", "rb"):
            opens = True
    except OSError:
        opens = False
    process = psutil.Process()
    return {"opens": opens, "descriptors": process.num_fds(), "bytes": process.memory_info().rss}


if __name__ == "__main__":
    main()

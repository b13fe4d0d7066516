"""What passes between an engine's process and the controller. A call is answered by a record with its number."""

from __future__ import annotations

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.records import Record, Turn, message
from headrace.sync.base import Manifest, Seal
from headrace.usage import Usage


@message
class EngineReady(Record):
    call: int


@message
class Sample(Record):
    call: int
    request: SampleRequest


@message
class Score(Record):
    call: int
    request: ScoreRequest


@message
class Sampled(Record):
    """Answers both."""

    call: int
    turn: Turn


@message
class Abandon(Record):
    """Forget a request: nobody waits for it any more."""

    request_id: int


@message
class Cut(Record):
    request_id: int


@message
class Release(Record):
    request_id: int


@message
class Announce(Record):
    call: int
    manifest: Manifest


@message
class Transfer(Record):
    call: int
    number: int


@message
class Verify(Record):
    call: int
    seal: Seal


@message
class Swap(Record):
    call: int
    number: int
    interrupt: Interrupt


@message
class AbandonSwap(Record):
    """Nobody waits any more for the answer to a Swap: if it has not happened yet, it shall not."""

    swap_call: int


@message
class Swapped(Record):
    call: int
    report: SwapReport


@message
class AskFingerprint(Record):
    call: int
    adapter: str | None = None


@message
class TellFingerprint(Record):
    call: int
    seal: Seal


@message
class SetPaused(Record):
    call: int
    paused: bool


@message
class Sleep(Record):
    call: int
    keep_weights: bool


@message
class Wake(Record):
    call: int


@message
class AskUsage(Record):
    call: int


@message
class TellUsage(Record):
    call: int
    usage: Usage


@message
class Ok(Record):
    call: int

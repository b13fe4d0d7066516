"""What a swap of the weights does to a sequence that has begun."""

from __future__ import annotations

from headrace.engine.base import Interrupt, SampleRequest
from headrace.engine.native.requests import Sequence, note
from headrace.engine.native.scheduler import Scheduler
from headrace.records import KvEvent


def interrupt_of(sequence: Sequence, default: Interrupt) -> Interrupt:
    """As its request says; a request to score says nothing."""
    request = sequence.request
    return (request.interrupt if isinstance(request, SampleRequest) else None) or default


def carry_over(sequence: Sequence, interrupt: Interrupt, version: int, scheduler: Scheduler) -> bool:
    """Let a sequence go on under the version that is served now; False where it is to end instead.

    Of a sequence that runs, or has run and waits to return. Unless it is kept, nothing of it may be under way.
    """
    slot, slots = sequence.slot, scheduler.slots
    if slot is None:
        if interrupt == "retry":
            sequence.forget()
        return interrupt != "resume"
    cached = int(slots.cached[slot])
    slots.pure[slot] = False
    rebuilding = cached < sequence.lineage[-1].position
    if interrupt == "keep" and cached and not rebuilding:
        note(sequence.lineage, KvEvent(position=cached, version=version, before="kept", cause="swap"))
    elif interrupt == "resume" and sequence.targets is None:
        return False
    else:
        scheduler.lose_cache(slot, "swap")
        if interrupt == "retry" and sequence.targets is None:
            sequence.forget()
    return True

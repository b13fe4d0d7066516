"""From a request to the sequence it becomes, and from that to the turn it ends as.

What a turn's columns and lineage mean, here and wherever a log-prob is recomputed:

- Under an adapter, versions are the adapter's, and an event names that of the base weights too (`KvEvent.base`).
- Token j's logits come from the pass over the token before it; that pass ran under `versions[j]`.
- Keys and values of positions in [event.position, next event's position) were computed under `event.version`,
  unless a later "recomputed" event rebuilt everything before its position under its own version.
- The first event is a "start" at position 0. A swap's position is the number of the sequence's positions whose
  keys and values were in the cache at that moment; a preemption's or a sleep's is their number when they were
  given up, and its version the one they were rebuilt under. A sequence that waits without a cache while weights
  are swapped has only the event of its return.
- A fork begins with its source's lineage up to the fork; under other weights than those of the last shared
  position it has an event of its own there.
- Events without a pass between them have one position: of those only what still matters is kept
  (`requests.note`). A swap that ends a sequence's record, with no token sampled after it, may be listed too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.engine.base import SampleRequest, ScoreRequest
from headrace.engine.native.forks import Fork
from headrace.engine.native.requests import Sequence
from headrace.records import KvEvent, Sampling, Stop, Support, Turn

# A stop string may begin in the middle of a token, and special tokens decode to nothing.
EXTRA_TAIL_TOKENS = 8


def sequence_to_sample(
    request: SampleRequest,
    fork: Fork | None,
    order: int,
    max_context: int,
    eos_tokens: tuple[int, ...],
    adapter: int = 0,
) -> Sequence:
    """Of a request that was checked, and whose adapter has that number."""
    context = np.ascontiguousarray(request.context, np.int32)
    if fork is not None:
        context = np.concatenate([fork.tokens, context])
    sequence = Sequence(
        request=request,
        context=context,
        order=order,
        limit=min(request.max_tokens, max_context - len(context)),
        stop_ids=tuple(sorted({*eos_tokens, *request.stop_tokens})),
        adapter=adapter,
        shared=fork.shared if fork is not None else None,
        lineage=fork.lineage if fork is not None else [],
    )
    if request.begun is not None:
        _take_up(sequence, request.begun)
    return sequence


def sequence_to_score(request: ScoreRequest, order: int, adapter: int = 0) -> Sequence:
    """Of a request that was checked. The last token's log-prob needs no pass over it."""
    targets = np.ascontiguousarray(request.tokens, np.int32)
    return Sequence(
        request=request,
        context=np.concatenate([np.asarray(request.context, np.int32), targets[:-1]]),
        order=order,
        limit=0,
        adapter=adapter,
        targets=targets,
        logprobs=np.zeros(len(targets), np.float32),
        versions=np.zeros(len(targets), np.int32),
    )


def _take_up(sequence: Sequence, begun: Turn) -> None:
    """Let a sequence go on from a turn that was begun, its cache to be computed again."""
    sequence.tokens = np.ascontiguousarray(begun.tokens, np.int32)
    sequence.logprobs = np.ascontiguousarray(begun.logprobs, np.float32)
    sequence.versions = np.ascontiguousarray(begun.versions, np.int32)
    if begun.support is not None:
        sequence.supports = [begun.support.row(t) for t in range(len(begun.tokens))]
    if len(begun.tokens):
        position = sequence.length - 1
        # What happened after its last pass does not matter any more.
        sequence.lineage = [event for event in begun.lineage if event.position < position]
        sequence.lost = KvEvent(position=position, version=-1, before="recomputed", cause="resume")


def stop_string_met(request: SampleRequest, tokens: np.ndarray, decode: Callable[[list[int]], str]) -> str | None:
    """Which of the request's stop strings is in the end of the text of what was sampled; of several the first."""
    tail = max(len(string.encode()) for string in request.stop_strings) + EXTRA_TAIL_TOKENS
    text = decode(tokens[-tail:].tolist())
    found = [(text.index(string), string) for string in request.stop_strings if string in text]
    return min(found, key=lambda one: one[0])[1] if found else None


def turn_of(sequence: Sequence, stop: Stop, engine: str) -> Turn:
    """The turn of a sequence that left its slot, or waited. Of a request to score, all or nothing."""
    request = sequence.request
    if isinstance(request, ScoreRequest):
        assert sequence.targets is not None
        sampling, seed, support = Sampling(temperature=request.temperature), 0, None
        tokens, context = sequence.targets, np.asarray(request.context, np.int32)
        if stop == "cancelled":
            sequence.forget()
            tokens = tokens[:0]
    else:
        sampling, seed, tokens, context = request.sampling, request.seed, sequence.tokens, sequence.context
        support = Support.from_rows(sequence.supports) if sampling.truncates else None
    return Turn(
        tokens=tokens,
        logprobs=sequence.logprobs,
        versions=sequence.versions,
        context=context,
        stop=stop,
        sampling=sampling,
        lineage=tuple(sequence.lineage),
        support=support,
        policy=request.policy,
        adapter=request.adapter,
        engine=engine,
        seed=seed,
        stop_string=sequence.stop_string if stop == "stop_string" else None,
    )

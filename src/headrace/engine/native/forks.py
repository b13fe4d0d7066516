"""What a fork takes over from its source: tokens, pages of the cache, and their lineage."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.engine.base import SampleRequest
from headrace.engine.native.pages import pages_for
from headrace.engine.native.requests import Sequence, Served, Shared, check_length, lineage_until
from headrace.engine.native.scheduler import Scheduler
from headrace.errors import EpisodeFailure
from headrace.records import KvEvent


class Fork(NamedTuple):
    tokens: np.ndarray
    """int32: of the source, up to the fork."""
    shared: Shared | None
    """None where nothing of that is in the cache."""
    lineage: list[KvEvent]
    """Of what is shared."""


def fork(request: SampleRequest, source: Sequence | None, scheduler: Scheduler, max_context: int) -> Fork:
    """What this request has of its source, with a reference to each page that it shares.

    Nothing of the source may be under way. A fork that cannot be served raises EpisodeFailure and changes nothing.
    """
    at = request.fork_at
    if source is None or source.targets is not None:
        raise EpisodeFailure("bad_request", f"a fork's source runs or is held (got request {request.fork_of})")
    if source.request.adapter != request.adapter:
        # A turn names one adapter: the lineage of another's keys and values could not be told from it.
        why = f"a fork has its source's adapter, {source.request.adapter!r} (got {request.adapter!r})"
        raise EpisodeFailure("bad_request", why)
    tokens = _tokens(source, scheduler)
    if not 0 < at <= len(tokens):
        raise EpisodeFailure("bad_request", f"a fork begins at 1 … {len(tokens)} of its source (got {at})")
    check_length(at + len(request.context), max_context)
    pages, cached = _cached(source, at, scheduler)
    if not cached:
        return Fork(tokens[:at], None, [])
    scheduler.pool.share(pages)
    lineage = lineage_until(source.lineage, cached)
    return Fork(tokens[:at], Shared(pages, cached, Served.of(lineage[-1])), lineage)


def _tokens(source: Sequence, scheduler: Scheduler) -> np.ndarray:
    if source.slot is None:
        return source.whole()
    return np.concatenate([source.context, scheduler.slots.columns(source.slot)[0]])


def _cached(source: Sequence, at: int, scheduler: Scheduler) -> tuple[np.ndarray, int]:
    """(pages, positions they hold) of the source's first `at` tokens."""
    slots = scheduler.slots
    if source.slot is not None:
        pages, cached = slots.page_table[source.slot], min(at, int(slots.cached[source.slot]))
    elif source.shared is not None:
        pages, cached = source.shared.pages, min(at, source.shared.cached)
    else:
        pages, cached = np.empty(0, np.int64), 0
    return pages[: pages_for(cached, scheduler.page_size)].copy(), cached

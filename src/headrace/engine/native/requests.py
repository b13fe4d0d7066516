"""Checks of a request, and the sequence it becomes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.base import SampleRequest
from headrace.errors import EpisodeFailure
from headrace.records import KvEvent


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way. While it runs, its sampled columns are in its slot; while it waits, here."""

    request: SampleRequest
    context: np.ndarray
    """int32."""
    order: int
    """Rises with arrival: the youngest is preempted first."""
    limit: int
    """Most tokens to sample."""
    stop_ids: tuple[int, ...]
    prompt: bytes = field(init=False)
    slot: int | None = None
    lineage: list[KvEvent] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    lost: KvEvent | None = None
    """Position and cause of the loss of its cache; the version that recomputes it is known at its return."""

    def __post_init__(self) -> None:
        self.prompt = self.context.tobytes()

    @property
    def length(self) -> int:
        """Tokens to have in the cache before it can run on. Of a waiting sequence."""
        return len(self.context) + len(self.tokens)


def check_request(request: SampleRequest, *, vocab_size: int, max_context: int, can_decode: bool) -> None:
    """Raise EpisodeFailure for a request that cannot be served."""

    def demand(holds: bool, rule: str, value: object) -> None:
        if not holds:
            raise EpisodeFailure("bad_request", f"{rule} (got {value!r})")

    context, sampling = np.asarray(request.context), request.sampling
    demand(context.ndim == 1 and context.size > 0, "a context is a non-empty row of tokens", context.shape)
    demand(context.dtype.kind in "iu", "a context holds integers", str(context.dtype))
    low, high = int(context.min()), int(context.max())
    demand(low >= 0 and high < vocab_size, f"tokens lie in [0, {vocab_size})", (low, high))
    demand(request.max_tokens >= 1, "max_tokens is at least 1", request.max_tokens)
    demand(
        math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "temperature is finite and not negative",
        sampling.temperature,
    )
    demand(sampling.top_k >= 0, "top_k is not negative", sampling.top_k)
    demand(0 < sampling.top_p <= 1, "top_p lies in (0, 1]", sampling.top_p)
    demand(0 <= sampling.min_p <= 1, "min_p lies in [0, 1]", sampling.min_p)
    demand(all(request.stop_strings), "a stop string is not empty", request.stop_strings)
    demand(
        can_decode or not request.stop_strings,
        "stop strings need an engine that was given a tokenizer",
        request.stop_strings,
    )
    if len(context) + 1 > max_context:
        raise EpisodeFailure(
            "prompt_too_long", f"{len(context)} tokens leave no room within engine.max_context = {max_context}"
        )


def note(lineage: list[KvEvent], event: KvEvent) -> None:
    """Append an event, dropping one it makes void.

    With no pass between two events they have the same position. The earlier one's weights then computed
    nothing from there on, and it matters only if it recomputed what lies before and the later one kept that.
    """
    rebuilt_then_kept = bool(lineage) and (lineage[-1].before, event.before) == ("recomputed", "kept")
    if lineage and lineage[-1].position == event.position and not rebuilt_then_kept:
        lineage.pop()
    lineage.append(event)

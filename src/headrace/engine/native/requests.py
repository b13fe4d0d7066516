"""Checks of a request, and the sequence it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from headrace.engine.base import SampleRequest, ScoreRequest
from headrace.errors import EpisodeFailure
from headrace.records import LARGEST_INT32, KvEvent, Sampling

Before = Literal["kept", "recomputed"]
Cause = Literal["start", "swap", "preempt", "fork", "resume", "sleep"]


class Served(NamedTuple):
    """The weights that compute something, by their version; under an adapter that is its own."""

    version: int
    base: int | None = None
    """Version of the weights beneath the adapter, where there is one."""

    @staticmethod
    def of(event: KvEvent) -> Served:
        return Served(event.version, event.base)

    @staticmethod
    def now(versions: np.ndarray, adapter: int) -> Served:
        """By the versions served, of the base weights and then of each adapter."""
        base = int(versions[0])
        return Served(int(versions[adapter]), base) if adapter else Served(base)

    def event(self, position: int, before: Before, cause: Cause) -> KvEvent:
        return KvEvent(position=position, version=self.version, before=before, cause=cause, base=self.base)


@dataclass(eq=False, slots=True)
class Shared:
    """Pages that a fork takes over from its source, one reference to each held."""

    pages: np.ndarray
    cached: int
    """Positions whose keys and values they hold; of the last page perhaps only the first ones count."""
    served: Served
    """The weights that computed the last of those positions."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way. While it runs, its sampled columns are in its slot; while it waits, here."""

    request: SampleRequest | ScoreRequest
    context: np.ndarray
    """int32: the tokens before the first sampled one; of a request to score, all it passes through the model."""
    order: int
    """Rises with arrival: the youngest is preempted first."""
    limit: int
    """Most tokens to sample; 0 of a request to score."""
    stop_ids: tuple[int, ...] = ()
    adapter: int = 0
    """Number of its adapter, 0 for none."""
    prompt: tuple[int, bytes] = field(init=False)
    """Equal for those that can share all of it."""
    slot: int | None = None
    lineage: list[KvEvent] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    lost: KvEvent | None = None
    """Position and cause of the loss of its cache; the version that recomputes it is known at its return."""
    shared: Shared | None = None
    """Of a fork that waits to be admitted."""
    targets: np.ndarray | None = None
    """Of a request to score: the tokens whose log-probs are asked for, the last ones it sees."""
    stop_string: str | None = None
    """The one that its text has got to."""

    def __post_init__(self) -> None:
        self.prompt = self.adapter, self.context.tobytes()

    @property
    def length(self) -> int:
        """Tokens to have in the cache before it can run on. Of a waiting sequence."""
        return len(self.context) + len(self.tokens)

    @property
    def preempted(self) -> bool:
        """Whether it has sampled here, lost its cache and waits to return."""
        return self.lost is not None and self.lost.cause != "resume"

    @property
    def reusable(self) -> int:
        """Positions that may be taken from elsewhere: what is to be scored must pass through the model."""
        return self.length if self.targets is None else self.length - len(self.targets)

    def whole(self) -> np.ndarray:
        """Context and sampled tokens. Of a waiting sequence."""
        return np.concatenate([self.context, self.tokens]) if len(self.tokens) else self.context

    def forget(self) -> None:
        """Begin again: drop what was sampled."""
        self.tokens, self.logprobs, self.versions = self.tokens[:0], self.logprobs[:0], self.versions[:0]
        self.lineage, self.supports, self.lost = [], [], None


def check_request(request: SampleRequest, *, vocab_size: int, max_context: int, can_decode: bool) -> None:
    """Raise EpisodeFailure for a request to sample that cannot be served."""
    check_tokens(request.context, vocab_size, "a context", may_be_empty=request.fork_of is not None)
    _demand(request.max_tokens >= 1, "max_tokens is at least 1", request.max_tokens)
    check_sampling(request.sampling)
    numbers = all(0 <= token <= LARGEST_INT32 for token in request.stop_tokens)
    _demand(numbers, f"stop tokens lie in [0, {LARGEST_INT32}]", request.stop_tokens)
    _demand(all(map(_is_text, request.stop_strings)), "a stop string is text, not empty", request.stop_strings)
    _demand(
        can_decode or not request.stop_strings,
        "stop strings need an engine that was given a tokenizer",
        request.stop_strings,
    )
    if request.begun is not None:
        _demand(request.fork_of is None, "a turn that was begun is resumed, not forked", request.fork_of)
        check_tokens(request.begun.tokens, vocab_size, "a turn that was begun", may_be_empty=True)
        more = len(request.begun.tokens) < request.max_tokens
        _demand(more, "max_tokens is above what was sampled already", request.max_tokens)
        own = request.begun.adapter == request.adapter
        _demand(
            own, f"a turn that was begun is resumed with its adapter, {request.begun.adapter!r}", request.adapter
        )
        whole = not request.sampling.truncates or request.begun.support is not None
        _demand(whole, "a turn resumed with truncated sampling brings its supports", request.begun.support)
    check_length(len(request.context) + (len(request.begun.tokens) if request.begun else 0), max_context)
    if request.begun is not None:
        same = np.array_equal(request.begun.context, request.context)
        _demand(same, "a turn that was begun is resumed on its own context", len(request.begun.context))


def check_score(request: ScoreRequest, *, vocab_size: int, max_context: int) -> None:
    """Raise EpisodeFailure for a request to score that cannot be served."""
    check_tokens(request.context, vocab_size, "a context")
    check_tokens(request.tokens, vocab_size, "what is scored")
    _demand(request.temperature != 0, "scores are of a temperature above 0", request.temperature)
    check_sampling(Sampling(temperature=request.temperature))
    check_length(len(request.context) + len(request.tokens) - 1, max_context)


def check_tokens(tokens: object, vocab_size: int, what: str, *, may_be_empty: bool = False) -> None:
    row = np.asarray(tokens)
    _demand(row.ndim == 1 and (row.size > 0 or may_be_empty), f"{what} is a non-empty row of tokens", row.shape)
    if row.size:
        _demand(row.dtype.kind in "iu", f"{what} holds integers", str(row.dtype))
        low, high = int(row.min()), int(row.max())
        _demand(low >= 0 and high < vocab_size, f"tokens lie in [0, {vocab_size})", (low, high))


def check_sampling(sampling: Sampling) -> None:
    if (fault := sampling.fault()) is not None:
        _demand(False, *fault)


def _is_text(string: str) -> bool:
    try:
        return bool(string.encode())
    except UnicodeEncodeError:
        return False


def check_length(tokens: int, max_context: int) -> None:
    if tokens + 1 > max_context:
        raise EpisodeFailure(
            "prompt_too_long", f"{tokens} tokens leave no room within engine.max_context = {max_context}"
        )


def _demand(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise EpisodeFailure("bad_request", f"{rule} (got {value!r})")


def note(lineage: list[KvEvent], event: KvEvent) -> None:
    """Append an event, dropping one it makes void.

    With no pass between two events they have the same position. The earlier one's weights then computed
    nothing from there on, and it matters only if it recomputed what lies before and the later one kept that.
    """
    rebuilt_then_kept = bool(lineage) and (lineage[-1].before, event.before) == ("recomputed", "kept")
    if lineage and lineage[-1].position == event.position and not rebuilt_then_kept:
        lineage.pop()
    lineage.append(event)


def lineage_until(lineage: Iterable[KvEvent], position: int) -> list[KvEvent]:
    """The lineage of a sequence's first `position` positions as they are in the cache now."""
    kept: list[KvEvent] = []
    for event in lineage:
        if event.before == "recomputed":
            # Whatever lay before is this version's now.
            kept = [Served.of(event).event(0, "kept", "start")]
        elif event.position < position or not kept:
            kept.append(event)
    return kept

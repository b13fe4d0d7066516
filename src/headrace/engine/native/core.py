"""NativeEngine: continuous batching over a paged KV cache.

What a turn's columns and lineage mean, here and wherever a log-prob is recomputed:

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

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.kv import KvCache
from headrace.engine.native.pages import pages_for
from headrace.engine.native.plan import Plan, Runner, Running
from headrace.engine.native.quantized import QuantizedWeights, check_fp8
from headrace.engine.native.requests import (
    Sequence,
    Shared,
    check_length,
    check_request,
    check_score,
    lineage_until,
    note,
)
from headrace.engine.native.runners import open_runner
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.weights import Weights
from headrace.errors import ConfigError, EpisodeFailure, HeadraceError, LawBroken, SyncError
from headrace.models import CausalLM
from headrace.records import KvEvent, Sampling, Support, Turn

# A stop string may begin in the middle of a token, and special tokens decode to nothing.
EXTRA_TAIL_TOKENS = 8

Ended = list[tuple[int, Turn]]


class _Step(NamedTuple):
    plan: Plan
    sequences: list[Sequence]
    """Of the plan's samples."""
    scored: list[Sequence]
    version: int
    running: Running


class NativeEngine:
    """Not thread-safe, but for `standby`, which another thread may fill while `step` runs."""

    def __init__(
        self,
        model: CausalLM,
        config: NativeEngineConfig,
        *,
        version: int,
        eos_tokens: tuple[int, ...] = (),
        decode: Callable[[list[int]], str] | None = None,
        name: str = "engine",
    ):
        longest = model.config.max_sequence_length
        if longest is not None and config.max_context > longest:
            raise ConfigError(
                f"engine.max_context is at most {longest} for this model's rope_type {model.config.rope.kind!r}",
                config.max_context,
                "lower engine.max_context",
            )
        check_fp8(config, model.config, model.head_weight.dtype, model.head_weight.device)
        self.version = version
        self.name = name
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        """Tokens passed in chunks."""
        self.tokens_passed = 0
        """All tokens passed through the model."""
        self.pages_copied = 0
        self.steps = 0
        self._model = model.requires_grad_(False).eval()
        self._config = config
        self._eos = eos_tokens
        self._decode = decode
        self._weights = Weights(model)
        fused = config.kernels == "fused" and self._weights.device.type == "cuda"
        self._quantized = QuantizedWeights(model, fused=fused) if config.weight_dtype == "fp8" else None
        reserve = self._weights.set_bytes if config.standby else 0
        self._kv = KvCache.sized(model.config, config, self._weights.dtype, self._weights.device, reserve)
        self._scheduler = Scheduler(
            self._kv, config.max_running, config.max_context, config.prefill_tokens, self._settle
        )
        self._slots = self._scheduler.slots
        self._runner: Runner = open_runner(
            model, self._weights, self._kv, self._slots, config, quantized=self._quantized
        )
        self._under_way: deque[_Step] = deque()
        self._broken: HeadraceError | None = None
        self._ended: Ended = []
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._weights_in_use = threading.Lock()
        self.asleep = False

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: SampleRequest) -> None:
        """Queue a request. One that cannot be served raises EpisodeFailure and changes nothing."""
        check_request(
            request,
            vocab_size=self._model.config.vocab_size,
            max_context=self._config.max_context,
            can_decode=self._decode is not None,
        )
        self._check_new(request.id)
        context = np.ascontiguousarray(request.context, np.int32)
        shared: Shared | None = None
        lineage: list[KvEvent] = []
        if request.fork_of is not None:
            before, shared, lineage = self._fork(request.fork_of, request.fork_at, len(context))
            context = np.concatenate([before, context])
        sequence = Sequence(
            request=request,
            context=context,
            order=self._arrivals,
            limit=min(request.max_tokens, self._config.max_context - len(context)),
            stop_ids=tuple(sorted({*self._eos, *request.stop_tokens})),
            shared=shared,
            lineage=lineage,
        )
        if request.begun is not None:
            _take_up(sequence, request.begun)
        self._queue(sequence)

    def score(self, request: ScoreRequest) -> None:
        """Queue a request to score. One that cannot be served raises EpisodeFailure and changes nothing."""
        vocab_size = self._model.config.vocab_size
        check_score(request, vocab_size=vocab_size, max_context=self._config.max_context)
        self._check_new(request.id)
        targets = np.ascontiguousarray(request.tokens, np.int32)
        sequence = Sequence(
            request=request,
            context=np.concatenate([np.asarray(request.context, np.int32), targets[:-1]]),
            order=self._arrivals,
            limit=0,
            targets=targets,
            logprobs=np.zeros(len(targets), np.float32),
            versions=np.zeros(len(targets), np.int32),
        )
        self._queue(sequence)

    def cancel(self, request_id: int) -> None:
        """Forget a request and free what it holds. An unknown id is ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            self._ended = [ended for ended in self._ended if ended[0] != request_id]
            return
        if sequence.slot is None:
            self._scheduler.drop(sequence)
        else:
            self._scheduler.release(sequence.slot)

    def cut(self, request_id: int) -> Turn | None:
        """End a request now: what there is of its turn, with stop "cancelled". None for an unknown id.

        One that has ended already, but was not returned by `step` yet, is returned here as it ended.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            turn = dict(self._ended).get(request_id)
            self.cancel(request_id)
            return turn
        if sequence.slot is not None:
            return self._end(sequence.slot, "cancelled")[1]
        return self._end_waiting(sequence)[1]

    def release(self, request_id: int) -> None:
        """Free the pages that an ended request holds for forks. An unknown id is ignored."""
        self._scheduler.unhold(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return something."""
        return bool(self._ended or (self._sequences and not self.asleep))

    @property
    def running(self) -> int:
        return self._slots.running

    @property
    def waiting(self) -> int:
        return len(self._scheduler.queue)

    @property
    def pages_free(self) -> int:
        return self._scheduler.pool.free

    @property
    def pages_total(self) -> int:
        return self._scheduler.pool.total

    def drop_prefixes(self) -> None:
        """Free the pages of beginnings that are kept for requests to come."""
        self._scheduler.forget_beginnings()

    def _check_new(self, request_id: int) -> None:
        if request_id in self._sequences:
            raise EpisodeFailure("bad_request", f"a request's id is unique while it runs (got {request_id})")

    def _queue(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._sequences[sequence.request.id] = sequence
        self._scheduler.queue.append(sequence)

    def _fork(self, source_id: int, at: int, more: int) -> tuple[np.ndarray, Shared | None, list[KvEvent]]:
        """(the source's first `at` tokens, what is shared of its cache, the lineage of that)."""
        source = self._sequences.get(source_id)
        if source is not None and source.slot is not None:
            with self._runner.scope():
                self._settle()
            source = self._sequences.get(source_id)
        source = source or self._scheduler.held.get(source_id)
        if source is None or source.targets is not None:
            raise EpisodeFailure("bad_request", f"a fork's source runs or is held (got request {source_id})")
        slot, slots = source.slot, self._slots
        tokens = source.whole() if slot is None else np.concatenate([source.context, slots.columns(slot)[0]])
        if not 0 < at <= len(tokens):
            raise EpisodeFailure("bad_request", f"a fork begins at 1 … {len(tokens)} of its source (got {at})")
        check_length(at + more, self._config.max_context)
        if slot is not None:
            cached = min(at, int(slots.cached[slot]))
            pages = slots.page_table[slot, : pages_for(cached, self._kv.page_size)].copy()
        elif source.shared is not None:
            cached = min(at, source.shared.cached)
            pages = source.shared.pages[: pages_for(cached, self._kv.page_size)]
        else:
            cached = 0
        if not cached:
            return tokens[:at], None, []
        self._scheduler.pool.share(pages)
        lineage = lineage_until(source.lineage, cached)
        return tokens[:at], Shared(pages, cached, lineage[-1].version), lineage

    # ── Weights ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def standby(self) -> Mapping[str, Tensor]:
        """A buffer per parameter, by Hugging Face name: what the next swap will serve. Read it anew after each."""
        return self._weights.standby

    def must_drain(self, interrupt: Interrupt) -> bool:
        """Whether a swap with this interrupt has to wait: something runs, or has run, that it may not touch.

        What sleeps is not waited for.
        """
        begun = [] if self.asleep else self._begun()
        return any(self._interrupt(sequence, interrupt) == "drain" for sequence in begun)

    def swap(self, version: int, interrupt: Interrupt = "keep", only: Collection[str] | None = None) -> SwapReport:
        """Between two steps, serve the standby weights as `version`. All or nothing.

        Each running request is treated as its own `interrupt` says, or as this one. Where one must be drained
        the swap is refused: step on, with `admit=False`, until `must_drain` is false. With `only`, just these
        parameters change, by a copy on the device.
        """
        began = time.perf_counter()
        with self._exclusive("a swap began within a forward pass"), self._runner.scope():
            if version == self.version and self._weights.complete:
                raise SyncError("swap", self.name, f"version {version} is served already")
            if any(self._interrupt(sequence, interrupt) != "keep" for sequence in self._begun()):
                self._settle()
            if self.must_drain(interrupt):
                raise SyncError("swap", self.name, "requests run that must end first (drain)")
            self._weights.flip() if only is None else self._weights.take(only)
            if self._quantized is not None:
                self._quantized.refresh(only)
            self.version = version
            self._scheduler.forget_beginnings()
            begun, ended = self._begun(), len(self._ended)
            for sequence in begun:
                self._carry_over(sequence, self._interrupt(sequence, interrupt))
            self._scheduler.give_up_shared(lambda sequence: self._interrupt(sequence, interrupt) != "keep")
            went_on = len(begun) - (len(self._ended) - ended)
        return SwapReport(version=version, pause_s=time.perf_counter() - began, running=went_on)

    def _begun(self) -> list[Sequence]:
        """What runs, the youngest first, and then what has run and waits to return."""
        return [*map(self._slots.sequence, self._scheduler.by_age()), *self._scheduler.preempted]

    def _interrupt(self, sequence: Sequence, default: Interrupt) -> Interrupt:
        request = sequence.request
        return (request.interrupt if isinstance(request, SampleRequest) else None) or default

    def _carry_over(self, sequence: Sequence, what: Interrupt) -> None:
        slots, slot = self._slots, sequence.slot
        if slot is None:
            if what == "resume":
                self._ended.append(self._end_waiting(sequence))
            elif what == "retry":
                sequence.forget()
            return
        cached = int(slots.cached[slot])
        slots.pure[slot] = False
        rebuilding = cached < sequence.lineage[-1].position
        if what == "keep" and cached and not rebuilding:
            note(sequence.lineage, KvEvent(position=cached, version=self.version, before="kept", cause="swap"))
        elif what == "resume" and sequence.targets is None:
            self._ended.append(self._end(slot, "cancelled"))
        else:
            self._scheduler.lose_cache(slot, "swap")
            if what == "retry" and sequence.targets is None:
                sequence.forget()

    # ── Sleep ────────────────────────────────────────────────────────────────────────────────────────────

    def sleep(self, keep_weights: bool = True) -> None:
        """Give the memory of the cache and of both sets of weights back, for another to use until `wake`.

        What runs goes back to the queue and is rebuilt after waking; pages kept for requests to come or held for
        forks are given up. Requests are taken in, cut and cancelled as ever, and `step` only returns what had
        ended. Weights that are kept wait in host memory. Otherwise a whole version has to be swapped in before
        `wake`: while asleep `standby` brings the weights' memory back, and a swap works as ever. Nobody may be
        filling the standby when this is called.
        """
        with self._exclusive("an engine was put to sleep within a forward pass or a swap"), self._runner.scope():
            self._settle()
            self._scheduler.lose_everything()
            self.asleep = True
            self._kv.release()
            if self._quantized is not None:
                self._quantized.release()
            self._weights.release(keep_weights)
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory back, at the same addresses. Where there is too little it sleeps on; try again."""
        if not self._weights.complete:
            raise HeadraceError(
                "an engine that slept without its weights is given new ones before it wakes",
                f"{self.name} has none since version {self.version}",
                "fill the standby buffers and swap, then wake it",
            )
        with self._exclusive("an engine was woken within a swap"), self._runner.scope():
            self._weights.restore()
            if self._quantized is not None:
                self._quantized.restore()
            self._kv.restore()
            self.asleep = False

    # ── A step ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self, *, admit: bool = True) -> Ended:
        """Begin at most one step: a token for each running sequence that is up to date, and chunks of prompts.

        Returns the requests that ended, which a runner that works ahead shows one step later. With
        `admit=False` nothing new begins; what was preempted returns.
        """
        exclusive = self._exclusive("a forward pass began within a swap")
        with exclusive, torch.inference_mode(), self._runner.scope():
            if self._broken is not None:
                raise self._broken
            version, idle = self.version, not self._under_way
            plan = None if self.asleep else self._scheduler.plan(version, admit=admit)
            if plan is not None:
                self._begin(plan)
            elif idle and admit and not self.asleep and self._sequences and not self._ended:
                pages = f"{self.pages_free} of {self.pages_total} pages free"
                raise HeadraceError(
                    f"{self.name} makes progress while it has requests",
                    f"{self.running} running, {self.waiting} waiting, {pages}",
                    "report this with the requests: it is a fault of the scheduler",
                )
            while len(self._under_way) > (self._runner.ahead if plan is not None else 0):
                self._collect()
        if self.version != version:
            raise LawBroken("atomic swap", self.name, f"{version} became {self.version} within a forward pass")
        ended, self._ended = self._ended, []
        return ended

    @property
    def device_gaps(self) -> deque[float]:
        """Seconds the device stood still before each of the latest passes; empty where a pass is not measured."""
        return self._runner.gaps

    def synchronize(self) -> None:
        """Wait until the device has done all that was begun."""
        self._runner.synchronize()

    def _begin(self, plan: Plan) -> None:
        sequences = [self._slots.sequence(slot) for slot in plan.samples.tolist()]
        scored = [self._slots.sequence(chunk.slot) for chunk in plan.chunks if len(chunk.targets)]
        chunk_tokens = plan.chunk_tokens
        self.steps += 1
        self.tokens_prefilled += chunk_tokens
        self.tokens_passed += chunk_tokens + len(plan.rows)
        self.pages_copied += len(plan.copies[0]) + len(plan.later_copies[0])
        self._under_way.append(_Step(plan, sequences, scored, self.version, self._runner.begin(plan)))

    def _settle(self) -> bool:
        """Collect all that is under way; whether there was anything."""
        any_under_way = bool(self._under_way)
        while self._under_way:
            self._collect()
        return any_under_way

    def _collect(self) -> None:
        """Take in the outcome of the oldest step under way; end what it ended."""
        step = self._under_way.popleft()
        slots, rows = self._slots, step.plan.samples
        sampled, scores = step.running.outcome()
        # What was cancelled or ended meanwhile has left its slot, or another has it.
        still = np.array(
            [slots.sequences[r] is s for r, s in zip(rows.tolist(), step.sequences, strict=True)], bool
        )
        self._check_numbers(step, sampled.logprobs, still)
        for place, ids in zip(sampled.truncated.tolist(), sampled.supports, strict=True):
            if still[place]:
                step.sequences[place].supports.append(ids)
        rows, tokens = rows[still], sampled.tokens[still]
        slots.append(rows, tokens, sampled.logprobs[still], step.version)
        self.tokens_sampled += len(rows)
        stopped = (slots.stop_ids[rows] == tokens[:, None]).any(1)
        for i in np.flatnonzero(slots.has_stop_strings[rows] & ~stopped).tolist():
            stopped[i] = self._meets_stop_string(int(rows[i]))
        full = slots.sampled[rows] >= slots.limit[rows]
        for i in np.flatnonzero(stopped | full).tolist():
            self._ended.append(self._end(int(rows[i]), "stop" if stopped[i] else "length"))
        self._take_scores(step, scores)

    def _check_numbers(self, step: _Step, logprobs: np.ndarray, still: np.ndarray) -> None:
        broken = np.isnan(logprobs) & still
        if broken.any():
            # What this step sampled is lost for all of its sequences, so nothing goes on from here.
            self._broken = HeadraceError(
                f"logits are numbers ({self.name}, version {step.version})",
                f"NaN or infinity for requests {[step.sequences[i].request.id for i in np.flatnonzero(broken)]}",
                "the weights published as this version are broken: look at the trainer's loss and gradients",
            )
            raise self._broken

    def _take_scores(self, step: _Step, scores: list[np.ndarray]) -> None:
        chunks = [chunk for chunk in step.plan.chunks if len(chunk.targets)]
        for chunk, sequence, logprobs in zip(chunks, step.scored, scores, strict=True):
            if self._slots.sequences[chunk.slot] is not sequence:
                continue
            assert sequence.targets is not None
            last = chunk.last - (sequence.length - len(sequence.targets))
            sequence.logprobs[last - len(logprobs) : last] = logprobs
            sequence.versions[last - len(logprobs) : last] = step.version
            if last == len(sequence.targets):
                self._ended.append(self._end(chunk.slot, "length"))

    # ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────

    def _meets_stop_string(self, slot: int) -> bool:
        request = self._slots.sequence(slot).request
        assert isinstance(request, SampleRequest)
        strings = request.stop_strings
        count = int(self._slots.sampled[slot])
        tail = max(len(string.encode()) for string in strings) + EXTRA_TAIL_TOKENS
        assert self._decode is not None
        text = self._decode(self._slots.tokens[slot, max(0, count - tail) : count].tolist())
        return any(string in text for string in strings)

    def _end(self, slot: int, stop: Literal["stop", "length", "cancelled"]) -> tuple[int, Turn]:
        request = self._slots.sequence(slot).request
        sequence = self._scheduler.release(slot, hold=isinstance(request, SampleRequest) and request.hold)
        del self._sequences[request.id]
        return request.id, self._turn(sequence, stop)

    def _end_waiting(self, sequence: Sequence) -> tuple[int, Turn]:
        request = sequence.request
        del self._sequences[request.id]
        self._scheduler.drop(sequence, hold=isinstance(request, SampleRequest) and request.hold)
        return request.id, self._turn(sequence, "cancelled")

    def _turn(self, sequence: Sequence, stop: Literal["stop", "length", "cancelled"]) -> Turn:
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
            engine=self.name,
            seed=seed,
        )

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        """Law 4: the weights that a step reads do not change under it, whatever thread tries."""
        if not self._weights_in_use.acquire(blocking=False):
            raise LawBroken("atomic swap", self.name, what)
        try:
            yield
        finally:
            self._weights_in_use.release()


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

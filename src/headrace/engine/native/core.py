"""NativeEngine: continuous batching over a paged KV cache. Its public face, and the loop over steps.

    add, score ─▶ queue ─▶ step: plan ─▶ begin ─▶ under way ─▶ collect ─▶ turns that ended
                                                      │
                  settle: collect all of them ────────┘

A runner may work ahead, so what a step sampled is known when it is collected. What needs to know all of it first
(a fork of what runs, sleep, a swap that does not keep what runs) settles.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.forks import Fork, fork
from headrace.engine.native.interrupts import carry_over, interrupt_of
from headrace.engine.native.kv import KvCache
from headrace.engine.native.plan import Plan, Runner, Running
from headrace.engine.native.quantized import QuantizedWeights, check_fp8
from headrace.engine.native.requests import Sequence, check_request, check_score
from headrace.engine.native.runners import open_runner
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.turns import Stop, meets_stop_string, sequence_to_sample, sequence_to_score, turn_of
from headrace.engine.native.weights import Weights
from headrace.errors import ConfigError, EpisodeFailure, HeadraceError, LawBroken, SyncError
from headrace.models import CausalLM
from headrace.records import Turn

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
        # Without a standby set now, one comes with the first version.
        reserve = self._weights.set_bytes
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
        own = None if request.fork_of is None else self._fork(request, request.fork_of)
        self._queue(sequence_to_sample(request, own, self._arrivals, self._config.max_context, self._eos))

    def score(self, request: ScoreRequest) -> None:
        """Queue a request to score. One that cannot be served raises EpisodeFailure and changes nothing."""
        vocab_size = self._model.config.vocab_size
        check_score(request, vocab_size=vocab_size, max_context=self._config.max_context)
        self._check_new(request.id)
        self._queue(sequence_to_score(request, self._arrivals))

    def cancel(self, request_id: int) -> None:
        """Forget a request and free what it holds. An unknown id is ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            self._ended = [ended for ended in self._ended if ended[0] != request_id]
        else:
            self._leave(sequence)

    def cut(self, request_id: int) -> Turn | None:
        """End a request now: what there is of its turn, with stop "cancelled". None for an unknown id.

        One that has ended already, but was not returned by `step` yet, is returned here as it ended.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            turn = dict(self._ended).get(request_id)
            self.cancel(request_id)
            return turn
        return self._end(sequence, "cancelled")[1]

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
        if request_id in self._sequences or any(request_id == ended for ended, _ in self._ended):
            raise EpisodeFailure(
                "bad_request", f"a request's id is unique until its turn is out (got {request_id})"
            )

    def _queue(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._sequences[sequence.request.id] = sequence
        self._scheduler.queue.append(sequence)

    def _fork(self, request: SampleRequest, source_id: int) -> Fork:
        source = self._sequences.get(source_id)
        if source is not None and source.slot is not None:
            with self._runner.scope():
                self._settle()
        source = self._sequences.get(source_id) or self._scheduler.held.get(source_id)
        return fork(request, source, self._scheduler, self._config.max_context)

    # ── Weights ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def standby(self) -> Mapping[str, Tensor]:
        """A buffer per parameter, by Hugging Face name: what the next swap will serve.

        Ask anew after each swap and after a sleep. Whoever fills them on CUDA waits for its own stream before it
        calls for the swap.
        """
        return self._weights.standby

    def must_drain(self, interrupt: Interrupt) -> bool:
        """Whether a swap with this interrupt has to wait: something runs, or has run, that it may not touch.

        What sleeps is not waited for.
        """
        begun = [] if self.asleep else self._begun()
        return any(interrupt_of(sequence, interrupt) == "drain" for sequence in begun)

    def swap(self, version: int, interrupt: Interrupt = "keep", only: Collection[str] | None = None) -> SwapReport:
        """Between two steps, serve the standby weights as `version`. All or nothing.

        Each running request is treated as its own `interrupt` says, or as this one. Where one must be drained
        the swap is refused: step on, with `admit=False`, until `must_drain` is false. With `only`, just these
        parameters change, by a copy on the device. The pause that is reported is the host's.
        """
        began = time.perf_counter()
        with self._exclusive("a swap began within a forward pass"), self._runner.scope():
            if version == self.version and self._weights.complete:
                raise SyncError("swap", self.name, f"version {version} is served already")
            if any(interrupt_of(sequence, interrupt) != "keep" for sequence in self._begun()):
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
                if not carry_over(sequence, interrupt_of(sequence, interrupt), version, self._scheduler):
                    self._ended.append(self._end(sequence, "cancelled"))
            self._scheduler.give_up_shared(lambda sequence: interrupt_of(sequence, interrupt) != "keep")
            went_on = len(begun) - (len(self._ended) - ended)
        return SwapReport(version=version, pause_s=time.perf_counter() - began, running=went_on)

    def _begun(self) -> list[Sequence]:
        """What runs, the youngest first, and then what has run and waits to return."""
        return [*map(self._slots.sequence, self._scheduler.by_age()), *self._scheduler.preempted]

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
                with self._to_its_end():
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

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """What raises within leaves passes that were planned and not made: nothing may go on from such a cache."""
        try:
            yield
        except Exception as error:
            if self._broken is None:
                self._broken = HeadraceError(
                    f"a step of {self.name} runs to its end",
                    f"{type(error).__name__}: {error}",
                    "start the engine anew",
                )
            raise

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
        with self._to_its_end():
            self._take_in(self._under_way.popleft())

    def _take_in(self, step: _Step) -> None:
        slots, rows = self._slots, step.plan.samples
        sampled, scores = step.running.outcome()
        # What was cancelled or ended meanwhile has left its slot, or another has it.
        still = np.array(
            [slots.sequences[r] is s for r, s in zip(rows.tolist(), step.sequences, strict=True)], bool
        )
        broken = np.flatnonzero(np.isnan(sampled.logprobs) & still)
        self._check_numbers(step, [step.sequences[i] for i in broken])
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
            self._ended.append(self._end(slots.sequence(int(rows[i])), "stop" if stopped[i] else "length"))
        self._take_scores(step, scores)

    def _check_numbers(self, step: _Step, broken: list[Sequence]) -> None:
        if broken:
            # What this step sampled is lost for all of its sequences, so nothing goes on from here.
            self._broken = HeadraceError(
                f"logits are numbers ({self.name}, version {step.version})",
                f"NaN or infinity for requests {[sequence.request.id for sequence in broken]}",
                "the weights published as this version are broken: look at the trainer's loss and gradients",
            )
            raise self._broken

    def _take_scores(self, step: _Step, scores: list[np.ndarray]) -> None:
        chunks = [chunk for chunk in step.plan.chunks if len(chunk.targets)]
        for chunk, sequence, logprobs in zip(chunks, step.scored, scores, strict=True):
            if self._slots.sequences[chunk.slot] is not sequence:
                continue
            assert sequence.targets is not None
            self._check_numbers(step, [sequence] if np.isnan(logprobs).any() else [])
            last = chunk.last - (sequence.length - len(sequence.targets))
            sequence.logprobs[last - len(logprobs) : last] = logprobs
            sequence.versions[last - len(logprobs) : last] = step.version
            if last == len(sequence.targets):
                self._ended.append(self._end(sequence, "length"))

    # ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────

    def _meets_stop_string(self, slot: int) -> bool:
        request = self._slots.sequence(slot).request
        assert isinstance(request, SampleRequest)
        assert self._decode is not None
        return meets_stop_string(request, self._slots.tokens[slot, : self._slots.sampled[slot]], self._decode)

    def _end(self, sequence: Sequence, stop: Stop) -> tuple[int, Turn]:
        request = sequence.request
        self._leave(sequence, hold=isinstance(request, SampleRequest) and request.hold)
        del self._sequences[request.id]
        return request.id, turn_of(sequence, stop, self.name)

    def _leave(self, sequence: Sequence, *, hold: bool = False) -> None:
        if sequence.slot is None:
            self._scheduler.drop(sequence, hold=hold)
        else:
            self._scheduler.release(sequence.slot, hold=hold)

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        """Law 4: the weights that a step reads do not change under it, whatever thread tries."""
        if not self._weights_in_use.acquire(blocking=False):
            raise LawBroken("atomic swap", self.name, what)
        try:
            yield
        finally:
            self._weights_in_use.release()

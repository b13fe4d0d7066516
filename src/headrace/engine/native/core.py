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
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import memory, outcomes
from headrace.engine.native.forks import Fork, fork
from headrace.engine.native.interrupts import begun, carry_over, interrupt_of
from headrace.engine.native.kv import KvCache
from headrace.engine.native.pages import pages_for
from headrace.engine.native.plan import Plan, Runner
from headrace.engine.native.requests import Sequence, check_request, check_score
from headrace.engine.native.runners import open_runner
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.served import ServedWeights
from headrace.engine.native.slots import Computed
from headrace.engine.native.turns import sequence_to_sample, sequence_to_score, turn_of
from headrace.errors import QUOTED_CHARS, ConfigError, EpisodeFailure, HeadraceError, LawBroken, SyncError
from headrace.models import CausalLM
from headrace.out_of_memory import free_memory, is_out_of_memory, room
from headrace.records import Stop, Turn
from headrace.sync.base import AdapterSpec

Ended = list[tuple[int, Turn]]

CACHE_KEPT = 0.75
"""Part of the cache that is kept where memory was too small for a step."""
LEAST_PREFILL = 64
"""Tokens of prompts in a step: with fewer nothing is won."""


class NativeEngine:
    """Not thread-safe, but for `standby` and `adapter_standby`, which another thread may fill while `step` runs."""

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
        self.name = name
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        """Tokens passed in chunks."""
        self.tokens_passed = 0
        """All tokens passed through the model."""
        self.pages_copied = 0
        self.steps = 0
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None
        """Hears of what happened that no answer tells."""
        self._model = model.requires_grad_(False).eval()
        self._plain_ops = model.ops
        self._failed_at_least = False
        """Whether the step before did not fit beside the smallest cache."""
        self._config = config
        self._eos = eos_tokens
        self._decode = decode
        self._served = ServedWeights(model, config, version, name)
        weights = self._served.base
        self._kv = KvCache.sized(model.config, config, weights.dtype, weights.device, self._served.standby_bytes)
        self._under_way: deque[outcomes.Step] = deque()
        self._run_over(config)
        self._broken: HeadraceError | None = None
        self._ended: Ended = []
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._weights_in_use = threading.Lock()
        self.asleep = False

    def _run_over(self, config: NativeEngineConfig) -> None:
        """Slots, a scheduler and a runner for the cache that there is."""
        self._scheduler = Scheduler(
            self._kv, config.max_running, config.max_context, config.prefill_tokens, self._settle
        )
        self._slots = self._scheduler.slots
        model = self._model.use(self._plain_ops)
        self._runner: Runner = open_runner(model, self._served, self._kv, self._slots, config)

    @property
    def version(self) -> int:
        """Of the base weights."""
        return int(self._served.versions[0])

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
        adapter = self._served.number_of(request.adapter)
        own = None if request.fork_of is None else self._fork(request, request.fork_of)
        self._queue(sequence_to_sample(request, own, self._arrivals, self._config.max_context, self._eos, adapter))

    def score(self, request: ScoreRequest) -> None:
        """Queue a request to score. One that cannot be served raises EpisodeFailure and changes nothing."""
        vocab_size = self._model.config.vocab_size
        check_score(request, vocab_size=vocab_size, max_context=self._config.max_context)
        self._check_new(request.id)
        self._queue(sequence_to_score(request, self._arrivals, self._served.number_of(request.adapter)))

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
        return self._served.base.standby

    def refresh_standby(self) -> None:
        """Make the standby buffers a copy of the weights that are served, for a version that comes as changes."""
        self._served.base.refresh()

    @property
    def device(self) -> torch.device:
        return self._served.base.device

    @property
    def adapters(self) -> dict[str, int]:
        """The resident adapters' versions."""
        return {name: int(self._served.versions[number]) for name, number in self._served.numbers.items()}

    def adapter_standby(self, spec: AdapterSpec) -> Mapping[str, Tensor]:
        """Buffers by PEFT's names, all to be filled: what `swap_adapter` will serve as this adapter.

        It may be a new one, as far as `engine.max_adapters` goes, or a resident one, whose rank and targets may
        change. What the engine cannot serve raises SyncError and changes nothing. Ask anew for each version and
        after a sleep. Whoever fills them on CUDA waits for its own stream before it calls for the swap.
        """
        return self._served.bank("announce", spec.name).standby(spec)

    def live(self, adapter: str | None = None) -> Mapping[str, Tensor]:
        """What passes read, by the names it is published under: the model's parameters or a resident adapter's.

        To be read, by any thread as long as no swap and no sleep begins. What was asleep and has not been given
        weights has none: HeadraceError.
        """
        return (
            self._served.base.live if adapter is None else self._served.bank("fingerprint", adapter).live(adapter)
        )

    def must_drain(self, interrupt: Interrupt, adapter: str | None = None) -> bool:
        """Whether a swap with this interrupt has to wait: something runs, or has run, that it may not touch.

        Of an adapter's swap, only its requests count; of the base weights', all. What sleeps is not waited for.
        """
        return self._must_drain(interrupt, None if adapter is None else self._served.numbers.get(adapter, -1))

    def swap(self, version: int, interrupt: Interrupt = "keep", only: Collection[str] | None = None) -> SwapReport:
        """Between two steps, serve the standby weights as `version`. All or nothing.

        Each running request is treated as its own `interrupt` says, or as this one. Where one must be drained
        the swap is refused: step on, with `admit=False`, until `must_drain` is false. With `only`, just these
        parameters change, by a copy on the device. The pause that is reported is the host's.
        """
        served = self.version if self._served.base.complete else None
        return self._swap(None, served, version, interrupt, lambda: self._served.flip(only))

    def swap_adapter(self, name: str, version: int, interrupt: Interrupt = "keep") -> SwapReport:
        """Between two steps, serve what is in standby for this adapter as its `version`, by copies on the device.

        As `swap`, for this adapter's requests alone: others, and what is kept of them, are not touched. To drain,
        step on with `but=name`.
        """
        bank = self._served.bank("swap", name)
        served = None if name in bank.lost else self.adapters.get(name)
        return self._swap(bank.arriving(name), served, version, interrupt, lambda: bank.take(name))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Refused while a request of it is not answered."""
        bank = self._served.bank("swap", name)
        with self._exclusive("an adapter was dropped within a forward pass"), self._runner.scope():
            self._settle()
            waiting = [s.request.id for s in self._sequences.values() if s.request.adapter == name]
            if waiting:
                raise HeadraceError(
                    f"an adapter is dropped when its requests are answered ({self.name}, adapter {name!r})",
                    f"requests {waiting[:8]} of {len(waiting)}",
                    "let them end, or cancel them",
                )
            number = bank.drop(name)
            self._scheduler.forget_beginnings(number)
            self._scheduler.give_up_shared(lambda sequence: sequence.adapter == number)

    def _must_drain(self, interrupt: Interrupt, whose: int | None) -> bool:
        concerned = [] if self.asleep else begun(self._scheduler, whose)
        return any(interrupt_of(sequence, interrupt) == "drain" for sequence in concerned)

    def _swap(
        self,
        whose: int | None,
        served: int | None,
        version: int,
        interrupt: Interrupt,
        serve: Callable[[], None],
    ) -> SwapReport:
        """`whose`: an adapter's number, or None for the base weights, which all requests see."""
        began = time.perf_counter()
        with self._exclusive("a swap began within a forward pass"), self._runner.scope():
            if version == served:
                raise SyncError("swap", self.name, f"version {version} is served already")
            if any(interrupt_of(sequence, interrupt) != "keep" for sequence in begun(self._scheduler, whose)):
                self._settle()
            if self._must_drain(interrupt, whose):
                raise SyncError("swap", self.name, "requests run that must end first (drain)")
            serve()
            self._served.versions[whose or 0] = version
            self._scheduler.forget_beginnings(whose)
            concerned, ended = begun(self._scheduler, whose), len(self._ended)
            for sequence in concerned:
                now = self._served.now(sequence.adapter)
                if not carry_over(sequence, interrupt_of(sequence, interrupt), now, self._scheduler):
                    self._ended.append(self._end(sequence, "cancelled"))
            self._scheduler.give_up_shared(
                lambda sequence: whose in (None, sequence.adapter) and interrupt_of(sequence, interrupt) != "keep"
            )
            went_on = len(concerned) - (len(self._ended) - ended)
        return SwapReport(version=version, pause_s=time.perf_counter() - began, running=went_on)

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
            self._served.release(keep_weights)
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory back, at the same addresses. Where there is too little it sleeps on; try again."""
        self._served.check_whole()
        with self._exclusive("an engine was woken within a swap"), self._runner.scope():
            self._served.restore()
            self._kv.restore()
            self.asleep = False

    # ── A step ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self, *, admit: bool = True, but: str | None = None) -> Ended:
        """Begin at most one step: a token for each running sequence that is up to date, and chunks of prompts.

        Returns the requests that ended, which a runner that works ahead shows one step later. With
        `admit=False` nothing new begins, with `but` nothing new of that adapter; what was preempted returns.
        """
        exclusive = self._exclusive("a forward pass began within a swap")
        with exclusive, torch.inference_mode(), self._runner.scope():
            if self._broken is not None:
                raise self._broken
            versions, idle = self._served.versions.tolist(), not self._under_way
            without = None if but is None else self._served.numbers.get(but)
            before = self._slots.computed()
            plan = None if self.asleep else self._scheduler.plan(self._served.versions, admit=admit, but=without)
            if plan is not None:
                with self._to_its_end():
                    why = self._try(plan)
                    if why:
                        self._give_cache_back(before, why)
            elif idle and admit and but is None and not self.asleep and self._sequences and not self._ended:
                pages = f"{self.pages_free} of {self.pages_total} pages free"
                raise HeadraceError(
                    f"{self.name} makes progress while it has requests",
                    f"{self.running} running, {self.waiting} waiting, {pages}",
                    "report this with the requests: it is a fault of the scheduler",
                )
            while len(self._under_way) > (self._runner.ahead if plan is not None else 0):
                self._collect()
        if (now := self._served.versions.tolist()) != versions:
            raise LawBroken("atomic swap", self.name, f"{versions} became {now} within a forward pass")
        ended, self._ended = self._ended, []
        return ended

    def _try(self, plan: Plan) -> str:
        """Begin the step; why there is not enough memory for it, or nothing."""
        try:
            self._begin(plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return str(error) or "out of memory"
        self._failed_at_least = False
        return ""

    def _give_cache_back(self, before: Computed, why: str) -> None:
        """After a step for which memory was too small: a smaller cache, or at its least shorter chunks of prompts.
        What ran is preempted, and computed again."""
        self._settle()
        self._slots.take_back(before)
        self._scheduler.lose_everything("preempt")
        old, config = self._scheduler, self._config
        least, pages = pages_for(config.max_context, self._kv.page_size), self._kv.pages
        prefill = self._scheduler.prefill_tokens
        if pages > least:
            pages = max(least, int(pages * CACHE_KEPT))
        elif prefill > LEAST_PREFILL:
            prefill = max(LEAST_PREFILL, prefill // 2)
        elif not self._failed_at_least:
            # Others may have given memory back by now.
            self._failed_at_least = True
        else:
            raise HeadraceError(
                f"{self.name} has memory for a step of one sequence beside a cache of {pages:,} pages of "
                f"{self._kv.page_size} tokens ({room(self.device)})",
                why[:QUOTED_CHARS],
                "lower engine.max_context or training.micro_batch_tokens, or end what else uses the memory",
            )
        self._kv.release()
        del self._runner
        free_memory(self.device)
        self._kv = self._kv.smaller(pages)
        # Graphs for the other set of weights come with the next swap: a version may be arriving there now.
        self._run_over(msgspec.structs.replace(config, prefill_tokens=prefill, standby=False))
        self._scheduler.take_over(old)
        tokens = pages * self._kv.page_size
        self.on_event(
            "out_of_memory",
            {
                "cache_tokens": tokens,
                "prefill_tokens": prefill,
                "preempted": len(self._scheduler.preempted),
                "why": f"a step did not fit into memory; the cache has {tokens:,} tokens from now on, and a step "
                f"{prefill:,} of prompts",
            },
        )

    @property
    def device_gaps(self) -> deque[float]:
        """Seconds the device stood still before each of the latest passes; empty where a pass is not measured."""
        return self._runner.gaps

    def device_peaks(self) -> tuple[int, int]:
        """Most bytes of the GPU (held, in tensors) at once: torch's and the blocks'; zeros on the CPU."""
        if self.device.type != "cuda":
            return 0, 0
        blocks = memory.most_mapped()
        held, allocated = torch.cuda.max_memory_reserved(self.device), torch.cuda.max_memory_allocated(self.device)
        return held + blocks, allocated + blocks

    def synchronize(self) -> None:
        """Wait until the device has done all that was begun."""
        self._runner.synchronize()

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """What raises within leaves passes that were planned and not made: nothing may go on from such a cache."""
        try:
            yield
        except Exception as error:
            self._broken = (
                error
                if isinstance(error, HeadraceError)
                else HeadraceError(
                    f"a step of {self.name} runs to its end",
                    f"{type(error).__name__}: {error}",
                    "start the engine anew",
                )
            )
            raise

    def _begin(self, plan: Plan) -> None:
        chunk_tokens = plan.chunk_tokens
        self.steps += 1
        self.tokens_prefilled += chunk_tokens
        self.tokens_passed += chunk_tokens + len(plan.rows)
        self.pages_copied += len(plan.copies[0]) + len(plan.later_copies[0])
        running = self._runner.begin(plan)
        self._under_way.append(outcomes.begun(plan, self._slots, self._served.versions, running))

    def _settle(self) -> bool:
        """Collect all that is under way; whether there was anything."""
        any_under_way = bool(self._under_way)
        while self._under_way:
            self._collect()
        return any_under_way

    def _collect(self) -> None:
        """Take in the outcome of the oldest step under way; end what it ended."""
        with self._to_its_end():
            taken = outcomes.take_in(self._under_way.popleft(), self._slots, self._decode, self.name)
            self.tokens_sampled += taken.tokens
            self._ended += [self._end(sequence, stop) for sequence, stop in taken.ended]

    # ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────

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

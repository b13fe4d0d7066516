"""NativeEngine: continuous batching over a paged KV cache, one forward pass a step.

What a turn's columns and lineage mean, here and wherever a log-prob is recomputed:

- Token j's logits come from the pass over the token before it; that pass ran under `versions[j]`.
- Keys and values of positions in [event.position, next event's position) were computed under `event.version`,
  unless a later "recomputed" event rebuilt everything before its position under its own version.
- The first event is a "start" at position 0. A swap's position is the number of the sequence's positions whose
  keys and values were in the cache at that moment; a preemption's is their number when they were given up, and
  its version the one they were rebuilt under. A sequence that waits without a cache while weights are swapped
  has only the event of its return.
- Events without a pass between them have one position: of those only what still matters is kept
  (`requests.note`). A swap that ends a sequence's record, with no token sampled after it, may be listed too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headrace.engine.base import KvPolicy, SampleRequest, SwapReport
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.attention import DecodeContext, PromptContext, SuffixContext
from headrace.engine.native.kv import KvCache
from headrace.engine.native.pages import pages_for
from headrace.engine.native.prefix import Prefix
from headrace.engine.native.requests import Sequence, check_request, note
from headrace.engine.native.sampling import sample, uniforms
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.weights import Weights
from headrace.errors import ConfigError, EpisodeFailure, HeadraceError, LawBroken, SyncError
from headrace.models import CausalLM
from headrace.records import KvEvent, Support, Turn

DEFAULT_CACHE_BYTES = 2**30
# A stop string may begin in the middle of a token, and special tokens decode to nothing.
EXTRA_TAIL_TOKENS = 8

Ended = list[tuple[int, Turn]]


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
        self.version = version
        self.name = name
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        self.prefill_passes = 0
        self.decode_passes = 0
        self._model = model.requires_grad_(False).eval()
        self._config = config
        self._eos = eos_tokens
        self._decode = decode
        self._weights = Weights(model)
        self._device = self._weights.device
        pages = pages_for(_cache_tokens(model, config, self._weights.dtype), config.page_size)
        self._kv = KvCache(model.config, pages, config.page_size, self._weights.dtype, self._device)
        self._scheduler = Scheduler(self._kv, config.max_running, config.max_context, config.prefill_tokens)
        self._slots = self._scheduler.slots
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._weights_in_use = threading.Lock()

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: SampleRequest) -> None:
        """Queue a request. One that cannot be served raises EpisodeFailure and changes nothing."""
        check_request(
            request,
            vocab_size=self._model.config.vocab_size,
            max_context=self._config.max_context,
            can_decode=self._decode is not None,
        )
        if request.id in self._sequences:
            raise EpisodeFailure("bad_request", f"a request's id is unique while it runs (got {request.id})")
        context = np.ascontiguousarray(request.context, np.int32)
        sequence = Sequence(
            request=request,
            context=context,
            order=self._arrivals,
            limit=min(request.max_tokens, self._config.max_context - len(context)),
            stop_ids=tuple(sorted({*self._eos, *request.stop_tokens})),
        )
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._scheduler.queue.append(sequence)

    def cancel(self, request_id: int) -> None:
        """Forget a request and free what it holds. An unknown id is ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.slot is None:
            self._scheduler.queue.remove(sequence)
        else:
            self._scheduler.release(sequence.slot)

    def cut(self, request_id: int) -> Turn | None:
        """End a request now: what there is of its turn, with stop "cancelled". None for an unknown id."""
        sequence = self._sequences.get(request_id)
        self.cancel(request_id)
        return None if sequence is None else self._turn(sequence, "cancelled")

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

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
        """Free the pages of prompts that are kept for requests to come."""
        self._scheduler.prefixes.clear()

    # ── Weights ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def standby(self) -> Mapping[str, Tensor]:
        """A buffer per parameter, by Hugging Face name: what the next swap will serve. Read it anew after each."""
        return self._weights.standby

    def swap(self, version: int, kv: KvPolicy) -> SwapReport:
        """Between two steps, serve the standby weights as `version`. All or nothing; running sequences go on.

        "keep" leaves their caches as they are; "recompute" rebuilds all of them before they continue.
        """
        began = time.perf_counter()
        with self._exclusive("a swap began within a forward pass"):
            if version == self.version:
                raise SyncError("swap", self.name, f"version {version} is served already")
            running = self.running
            self._weights.flip()
            self.version = version
            self._scheduler.prefixes.clear()
            if kv == "recompute":
                self._scheduler.recompute_all()
            else:
                for slot in self._slots.active.tolist():
                    position = int(self._slots.cached[slot])
                    sequence = self._sequence(slot)
                    note(sequence.lineage, KvEvent(position=position, version=version, before="kept", cause="swap"))
        return SwapReport(version=version, pause_s=time.perf_counter() - began, running=running)

    # ── A step ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> Ended:
        """At most one forward pass: prompts, suffixes of sequences whose cache was lost, or one token for each
        running sequence. Returns the requests that ended."""
        with self._exclusive("a forward pass began within a swap"), torch.inference_mode():
            version = self.version
            ended = self._step(version)
        if self.version != version:
            raise LawBroken("atomic swap", self.name, f"{version} became {self.version} within a forward pass")
        return ended

    def _step(self, version: int) -> Ended:
        ended, suffixed = self._start(version)
        if suffixed:
            return ended + self._suffix_pass(suffixed)
        queue, scheduler = self._scheduler.queue, self._scheduler
        if queue and self._slots.free and scheduler.prefixes.get((version, queue[0].prompt)) is None:
            planned = scheduler.plan_prompts(version)
            if planned:
                self._prompt_pass(planned)
                # What needs a suffix pass stays queued: this step has had its pass.
                return ended + self._start(version, only_fresh=True)[0]
        return ended + (self._decode_pass() if self.running else [])

    def _start(self, version: int, only_fresh: bool = False) -> tuple[Ended, list[Sequence]]:
        fresh, hidden, suffixed = self._scheduler.fork(version, only_fresh)
        if not fresh:
            return [], suffixed
        rows = np.array([sequence.slot for sequence in fresh])
        return self._sample(rows, torch.stack(hidden)), suffixed

    def _prompt_pass(self, planned: list[Prefix]) -> None:
        lengths = [len(entry.tokens) for entry in planned]
        context = PromptContext(self._kv, lengths, [entry.pages for entry in planned])
        tokens = torch.from_numpy(np.concatenate([entry.tokens for entry in planned])).to(self._device)
        hidden_td = self._model(tokens, context.positions, context)
        lasts_bd = hidden_td[torch.from_numpy(np.cumsum(lengths) - 1).to(self._device)]
        for entry, last_d in zip(planned, lasts_bd, strict=True):
            entry.hidden = last_d
            self._scheduler.prefixes.put(entry)
        self.tokens_prefilled += len(tokens)
        self.prefill_passes += 1

    def _suffix_pass(self, sequences: list[Sequence]) -> Ended:
        slots = self._slots
        rows = np.array([sequence.slot for sequence in sequences])
        tables = [slots.page_table[row, : slots.num_pages[row]] for row in rows]
        new = [len(sequence.tokens) for sequence in sequences]
        context = SuffixContext(self._kv, tables, slots.cached[rows].tolist(), new)
        tokens = torch.from_numpy(np.concatenate([sequence.tokens for sequence in sequences])).to(self._device)
        hidden_td = self._model(tokens, context.positions, context)
        slots.cached[rows] += new
        self.tokens_prefilled += len(tokens)
        self.prefill_passes += 1
        return self._sample(rows, hidden_td[torch.from_numpy(context.lasts).to(self._device)])

    def _decode_pass(self) -> Ended:
        self._scheduler.make_room_to_decode()
        slots = self._slots
        rows = slots.active[np.argsort(slots.cached[slots.active], kind="stable")]
        positions = slots.cached[rows]
        context = DecodeContext(self._kv, slots.page_table[rows], positions)
        tokens = torch.from_numpy(slots.last_token[rows]).to(self._device)
        hidden_bd = self._model(tokens, torch.from_numpy(positions).to(self._device), context)
        slots.cached[rows] += 1
        self.decode_passes += 1
        return self._sample(rows, hidden_bd)

    def _sample(self, rows: np.ndarray, hidden_bd: Tensor) -> Ended:
        """Sample the next token of these slots' sequences; take out those that ended."""
        slots = self._slots
        uniform_b = uniforms(slots.seed[rows], slots.sampled[rows])
        sampled = sample(self._model.logits(hidden_bd), uniform_b, slots.parameters.rows(rows))
        if np.isnan(sampled.logprobs).any():
            broken = [self._sequence(slot).request.id for slot in rows[np.isnan(sampled.logprobs)].tolist()]
            raise HeadraceError(
                f"logits are numbers ({self.name}, version {self.version})",
                f"NaN or infinity for requests {broken}",
                "the weights published as this version are broken: look at the trainer's loss and gradients",
            )
        slots.append(rows, sampled.tokens, sampled.logprobs, self.version)
        for slot, ids in zip(rows[sampled.truncated].tolist(), sampled.supports, strict=True):
            self._sequence(slot).supports.append(ids)
        self.tokens_sampled += len(rows)
        stopped = (slots.stop_ids[rows] == sampled.tokens[:, None]).any(1)
        for i in np.flatnonzero(slots.has_stop_strings[rows] & ~stopped).tolist():
            stopped[i] = self._meets_stop_string(int(rows[i]))
        full = slots.sampled[rows] >= slots.limit[rows]
        return [self._end(int(rows[i]), "stop" if stopped[i] else "length") for i in np.flatnonzero(stopped | full)]

    # ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────

    def _meets_stop_string(self, slot: int) -> bool:
        strings = self._sequence(slot).request.stop_strings
        count = int(self._slots.sampled[slot])
        tail = max(len(string.encode()) for string in strings) + EXTRA_TAIL_TOKENS
        assert self._decode is not None
        text = self._decode(self._slots.tokens[slot, max(0, count - tail) : count].tolist())
        return any(string in text for string in strings)

    def _end(self, slot: int, stop: Literal["stop", "length"]) -> tuple[int, Turn]:
        sequence = self._scheduler.release(slot)
        del self._sequences[sequence.request.id]
        return sequence.request.id, self._turn(sequence, stop)

    def _turn(self, sequence: Sequence, stop: Literal["stop", "length", "cancelled"]) -> Turn:
        request = sequence.request
        return Turn(
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            versions=sequence.versions,
            context=sequence.context,
            stop=stop,
            sampling=request.sampling,
            lineage=tuple(sequence.lineage),
            support=Support.from_rows(sequence.supports) if request.sampling.truncates else None,
            policy=request.policy,
            engine=self.name,
            seed=request.seed,
        )

    def _sequence(self, slot: int) -> Sequence:
        sequence = self._slots.sequences[slot]
        assert sequence is not None
        return sequence

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        """Law 4: the weights that a step reads do not change under it, whatever thread tries."""
        if not self._weights_in_use.acquire(blocking=False):
            raise LawBroken("atomic swap", self.name, what)
        try:
            yield
        finally:
            self._weights_in_use.release()


def _cache_tokens(model: CausalLM, config: NativeEngineConfig, dtype: torch.dtype) -> int:
    if config.cache_tokens is not None:
        return config.cache_tokens
    affordable = DEFAULT_CACHE_BYTES // KvCache.bytes_per_token(model.config, dtype)
    return max(config.max_context, min(config.max_running * config.max_context, affordable))

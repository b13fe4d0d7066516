"""The runner for GPUs: Triton kernels, CUDA graphs by number of sequences, steps begun before the last is known.

A step without chunks is one copy of numbers to the device, one graph, and the copies of its results back:

    numbers ─▶ fetch last tokens, update page table ─▶ model ─▶ logits ─▶ sample ─▶ tokens, log-probs, supports
               (kernels.inputs)                        (FusedOps over PagedContext)   (kernels.sampler)

A sampled token stays on the device for the next step, so the host prepares step n + 1 while step n runs. Graphs
hold the weights' addresses, so there are two of each: one per set of buffers (`Weights.side`). Steps with chunks
launch their kernels one by one; they are long enough to hide it.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace import models
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.kv import KvCache
from headrace.engine.native.plan import Outcome, Plan
from headrace.engine.native.sampling import Sampled, uniforms
from headrace.engine.native.served import ServedWeights
from headrace.engine.native.slots import Slots
from headrace.engine.native.staging import Copied, Layout, Staging
from headrace.errors import ConfigError
from headrace.kernels import attention as kernels
from headrace.kernels import hopper_decode
from headrace.kernels.decode import tile_keys
from headrace.kernels.inputs import prepare
from headrace.kernels.sampler import Sampler, SamplerInputs, SamplerOutputs
from headrace.kernels.truncation import expand_support
from headrace.models import CausalLM, ModelConfig, PagedContext

LOG = logging.getLogger(__name__)

AHEAD = 1
FEW = 48
"""Sequences below which attention is always prepared to split them, so that fewer graphs are captured. Where the
kernel joins parts itself, however many there are."""
SPARE_UPDATES = 512
"""Page numbers that a captured step can bring to its table beyond one for each sequence."""
SUPPORT_CAPACITY = 1024
"""Ids of a support that come back as a list; more come as a bit mask, which is slower."""
SPLIT_PROGRAMS = 512
"""Work items of an attention kernel, over all key heads, that fill the device; long sequences are split to get
there."""


class Shape(NamedTuple):
    """What the arrays of a step are sized for."""

    single: int
    """Sequences that pass one token."""
    chunk: int = 0
    """Tokens in chunks."""
    items: int = 0
    """Of the chunks' attention."""
    samples: int = 0
    updates: int = 0
    extra: int = 0
    """Items of the single tokens' attention beyond one for each: long sequences are split."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: SamplerOutputs


class _Begun:
    def __init__(self, runner: GraphRunner, copied: Copied, scores: list[Tensor], span: Any):
        self._runner, self._copied, self._scores, self._span = runner, copied, scores, span

    def outcome(self) -> Outcome:
        sampled = _sampled(self._copied)
        if self._span is not None:
            self._runner.note_gap(*self._span)
        return Outcome(sampled, [score.cpu().numpy() for score in self._scores])


class GraphRunner:
    """Also runs in Triton's interpreter, without graphs and streams, so that a CPU can test all but those."""

    ahead = AHEAD

    def __init__(
        self,
        model: CausalLM,
        served: ServedWeights,
        kv: KvCache,
        slots: Slots,
        config: NativeEngineConfig,
    ) -> None:
        self._weights, self._kv, self._slots = served.base, kv, slots
        self._device, self._cuda = kv.device, kv.device.type == "cuda"
        self._ops, adapters = _ops(config, served), served.adapters
        self._adapted = (
            None
            if adapters is None
            else models.AdaptedOps(self._ops, adapters.stack_of, adapters.scales, fused=True)
        )
        self._model = model.use(self._adapted or self._ops)
        self._model.model.rotary.know(config.max_context, self._weights.dtype, kv.device)
        self._exact = config.numerics == "exact"
        per_group = model.config.num_heads // model.config.num_kv_heads
        if per_group > kernels.DECODE.rows:
            raise ConfigError(
                f"the fused kernels serve up to {kernels.DECODE.rows} query heads for each key head",
                per_group,
                'set engine.kernels = "reference"',
            )
        self._queries_per_item = (kernels.INVARIANT if self._exact else kernels.CHUNK).rows // per_group
        self._extra = 0 if self._exact else -(-SPLIT_PROGRAMS // model.config.num_kv_heads)
        self._few = sys.maxsize if not self._exact and self._joins_parts(model.config) else FEW
        self._tile_keys = tile_keys(kv.page_size) or kernels.DECODE.keys
        self._buckets = buckets(config.max_running)
        self._table = torch.zeros(slots.page_table.shape, dtype=torch.int32, device=self._device)
        counters = hopper_decode.counters_for(self._extra, model.config.num_kv_heads)
        self._counters = torch.zeros(counters, dtype=torch.int32, device=self._device)
        self._last_token = torch.zeros(slots.capacity, dtype=torch.int32, device=self._device)
        vocab = model.config.vocab_size
        self._sampler = Sampler(config.max_running, vocab, self._device, min(SUPPORT_CAPACITY, vocab))
        block = self._layout(self._largest(config)).size
        self._staging = Staging(block, config.max_running, self._device, depth=AHEAD + 2)
        self._graphs: dict[tuple[int, Shape, bool], _Captured] = {}
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._last_end: torch.cuda.Event | None = None
        self.gaps: deque[float] = deque(maxlen=4096)
        """Seconds between the end of a step and the beginning of the next on the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            self._capture_all(config.standby is not False)

    def scope(self) -> AbstractContextManager[Any]:
        """A stream of its own for everything on the device, so that copies elsewhere do not delay it."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    # ── A step ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, plan: Plan) -> _Begun:
        places, pages = self._take_updates()
        start = self._event()
        if plan.copies[0]:
            self._kv.copy(*plan.copies)
        truncating = bool(self._slots.parameters.rows(plan.samples).truncates.any())
        bucket = next((size for size in self._buckets if size >= len(plan.rows)), 0)
        captured = self._cuda and not plan.chunks and len(places) <= bucket + SPARE_UPDATES
        extra = self._extra_for(plan, bucket)
        shape = self._single_shape(bucket, extra) if captured else self._shape_of(plan, len(places), extra)
        layout = self._layout(shape)
        self._fill(layout.on_host(self._staging.host_block()), shape, plan, places, pages)
        self._staging.send(layout.size)
        scores: list[Tensor] = []
        if captured:
            graph, outputs = self._captured(shape, truncating)
            graph.replay()
        else:
            hidden_td, outputs = self._forward(shape, truncating)
            scores = self._score(plan, hidden_td)
            if plan.later_copies[0]:
                self._kv.copy(*plan.later_copies)
        span = None
        if start is not None:
            span = self._last_end, start
            self._last_end = self._event()
        return _Begun(self, self._staging.receive(outputs, len(plan.samples)), scores, span)

    def note_gap(self, end: torch.cuda.Event | None, start: torch.cuda.Event) -> None:
        if end is not None:
            self.gaps.append(end.elapsed_time(start) / 1e3)

    def _forward(self, shape: Shape, truncating: bool) -> tuple[Tensor, SamplerOutputs]:
        """Everything a step does on the device, from numbers that were sent. Waits for nothing."""
        given = self._layout(shape).on_device(self._staging.device_block)
        tokens = torch.empty_like(given["tokens"])
        prepare(
            given["tokens"], given["slots"], self._last_token, tokens, given["places"], given["pages"], self._table
        )
        context = PagedContext(
            self._kv.layer,
            self._table,
            given["rows"],
            given["single_items"],
            given["merges"],
            given["chunk_items"],
            self._counters,
            invariant=self._exact,
        )
        if self._adapted is not None:
            self._adapted.serve(given["adapters"])
        hidden_td: Tensor = self._model(tokens, given["positions"], context)
        sampled_bd = hidden_td.index_select(0, given["sample_rows"]) if shape.chunk else hidden_td
        if not shape.samples:
            return hidden_td, SamplerOutputs(tokens[:0], tokens[:0].float(), None)
        inputs = SamplerInputs(
            given["temperature"],
            given["top_k"],
            given["top_p"],
            given["min_p"],
            given["uniform"],
            given["sample_slots"],
            self._last_token,
        )
        return hidden_td, self._sampler.sample(self._model.logits(sampled_bd), inputs, truncating)

    def _score(self, plan: Plan, hidden_td: Tensor) -> list[Tensor]:
        scores, at = [], len(plan.rows)
        for chunk in plan.chunks:
            at += len(chunk.tokens)
            if len(chunk.targets):
                targets = torch.from_numpy(chunk.targets.astype(np.int64)).to(self._device)
                temperature = float(self._slots.parameters.temperature[chunk.slot])
                rows_td = hidden_td[at - len(chunk.targets) : at]
                head = self._model.head_weight
                scores.append(self._model.ops.token_logprobs(rows_td, head, targets, temperature)[0])
        return scores

    # ── Graphs ───────────────────────────────────────────────────────────────────────────────────────────

    def _capture_all(self, both: bool) -> None:
        sides = 2 if both else 1
        for side in range(sides):
            with torch.inference_mode(), self.scope():
                for i, bucket in enumerate(reversed(self._buckets)):
                    count = side * len(self._buckets) + i
                    LOG.info("capturing graphs: %d of %d batch sizes", count, sides * len(self._buckets))
                    for extra in {self._extra, 0 if bucket >= self._few else self._extra}:
                        self._captured(self._single_shape(bucket, extra), truncating=False)
            self.synchronize()
            if both:
                self._weights.flip()

    def _captured(self, shape: Shape, truncating: bool) -> _Captured:
        key = (self._weights.side, shape, truncating)
        if key not in self._graphs:
            self._graphs[key] = self._capture(shape, truncating)
        return self._graphs[key]

    def _capture(self, shape: Shape, truncating: bool) -> _Captured:
        sent = self._staging.device_block.clone()
        self._staging.device_block.zero_()
        # Rows that write nothing, see nothing and go nowhere.
        idle = self._layout(shape).on_device(self._staging.device_block)
        for name in ("rows", "places", "sample_slots"):
            idle[name].fill_(-1)
        idle["temperature"].fill_(1.0)
        idle["top_p"].fill_(1.0)
        with self._tuning():
            self._forward(shape, truncating)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be copying weights meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            _, outputs = self._forward(shape, truncating)
        self._staging.device_block.copy_(sent)
        return _Captured(graph, outputs)

    def _tuning(self) -> AbstractContextManager[Any]:
        return self._ops.tuning() if isinstance(self._ops, models.FusedOps) else nullcontext()

    def _joins_parts(self, config: ModelConfig) -> bool:
        """Whether the kernel that attends to a split sequence also joins its parts."""
        q_thd = torch.empty(1, config.num_heads, config.head_dim, dtype=self._kv.dtype, device=self._device)
        return hopper_decode.serves(q_thd, kernels.Cache.paged(*self._kv.layer(0)))

    # ── Numbers ──────────────────────────────────────────────────────────────────────────────────────────

    def _single_shape(self, bucket: int, extra: int) -> Shape:
        return Shape(single=bucket, samples=bucket, updates=bucket + SPARE_UPDATES, extra=extra)

    def _shape_of(self, plan: Plan, updates: int, extra: int) -> Shape:
        items = sum(-(-len(chunk.tokens) // self._queries_per_item) for chunk in plan.chunks)
        return Shape(len(plan.rows), plan.chunk_tokens, items, len(plan.samples), updates, extra)

    def _extra_for(self, plan: Plan, bucket: int) -> int:
        """Few sequences are always prepared to be split, many only where one of them is long."""
        if not self._extra or not len(plan.rows):
            return 0
        lengths = plan.positions + 1
        if bucket >= self._few and lengths.max() <= kernels.split_size(lengths, self._extra, self._tile_keys):
            return 0
        return self._extra

    def _largest(self, config: NativeEngineConfig) -> Shape:
        items = config.prefill_tokens // self._queries_per_item + config.max_running
        updates = self._table.numel() + SPARE_UPDATES
        return Shape(config.max_running, config.prefill_tokens, items, config.max_running, updates, self._extra)

    def _layout(self, shape: Shape) -> Layout:
        i, tokens, samples = np.int32, (shape.single + shape.chunk,), (shape.samples,)
        return Layout(
            {
                **({} if self._adapted is None else {"adapters": (i, tokens)}),
                "tokens": (i, tokens),
                "slots": (i, tokens),
                "positions": (i, tokens),
                "rows": (i, tokens),
                "single_items": (i, (shape.single + shape.extra, kernels.ITEM)),
                "merges": (i, (shape.extra, kernels.MERGE)),
                "chunk_items": (i, (shape.items, kernels.ITEM)),
                "sample_rows": (i, samples),
                "sample_slots": (i, samples),
                "temperature": (np.float32, samples),
                "top_k": (i, samples),
                "top_p": (np.float32, samples),
                "min_p": (np.float32, samples),
                "uniform": (np.float64, samples),
                "places": (i, (shape.updates,)),
                "pages": (i, (shape.updates,)),
            }
        )

    def _fill(
        self, host: dict[str, np.ndarray], shape: Shape, plan: Plan, places: np.ndarray, pages: np.ndarray
    ) -> None:
        size, count, samples, slots = self._kv.page_size, len(plan.rows), len(plan.samples), self._slots
        for name in ("tokens", "slots", "positions", "single_items", "merges", "top_k", "min_p", "uniform"):
            host[name][...] = 0
        for name in ("rows", "sample_slots", "places"):
            host[name][...] = -1
        for name in ("temperature", "top_p"):
            host[name][...] = 1
        host["tokens"][:count] = plan.tokens
        host["slots"][:count] = plan.rows
        host["positions"][:count] = plan.positions
        home = slots.page_table[plan.rows, plan.positions // size] * size + plan.positions % size
        host["rows"][:count] = np.where(plan.writes, home, -1)
        if count:
            items, merges = kernels.decode_items(plan.positions + 1, plan.rows, shape.extra, self._tile_keys)
            host["single_items"][: len(items)] = items
            host["merges"][:] = merges
        self._fill_chunks(host, shape, plan)
        if self._adapted is not None:
            # Rows that are not used have slot 0 and go nowhere, with whatever adapter it has.
            host["adapters"][...] = slots.adapter[host["slots"]]
        sample_slots, parameters = plan.samples, slots.parameters.rows(plan.samples)
        host["sample_slots"][:samples] = sample_slots
        host["temperature"][:samples] = parameters.temperature
        host["top_k"][:samples] = parameters.top_k
        host["top_p"][:samples] = parameters.top_p
        host["min_p"][:samples] = parameters.min_p
        host["uniform"][:samples] = uniforms(slots.seed[sample_slots], plan.indices)
        host["places"][: len(places)] = places
        host["pages"][: len(pages)] = pages

    def _fill_chunks(self, host: dict[str, np.ndarray], shape: Shape, plan: Plan) -> None:
        if not plan.chunks:
            return
        size, start = self._kv.page_size, len(plan.rows)
        counts = np.array([len(chunk.tokens) for chunk in plan.chunks])
        firsts = np.array([chunk.first for chunk in plan.chunks])
        rows = np.array([chunk.slot for chunk in plan.chunks])
        starts = start + np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(starts - start, counts) + np.repeat(firsts, counts)
        slots = np.repeat(rows, counts)
        host["tokens"][start:] = np.concatenate([chunk.tokens for chunk in plan.chunks])
        host["slots"][start:] = slots
        host["positions"][start:] = positions
        host["rows"][start:] = self._slots.page_table[slots, positions // size] * size + positions % size
        host["chunk_items"][...] = kernels.chunk_items(starts, counts, firsts, rows, self._queries_per_item)
        ends = starts + counts - 1
        own = ends[[chunk.samples for chunk in plan.chunks]]
        end_of = dict(zip(rows.tolist(), ends.tolist(), strict=True))
        host["sample_rows"][...] = [*range(start), *own.tolist(), *(end_of[slot] for slot in plan.twins)]

    def _take_updates(self) -> tuple[np.ndarray, np.ndarray]:
        """(places in the flat table, pages) that changed since the last step. A later one stands alone."""
        updates = self._slots.page_updates
        if not updates:
            nothing = np.empty(0, np.int64)
            return nothing, nothing
        width = self._table.shape[1]
        places = np.concatenate([slots * width + indices for slots, indices, _ in updates])
        pages = np.concatenate([pages for _, _, pages in updates])
        updates.clear()
        # A slot may have been given up and taken again: of several pages for a place only the last counts.
        last = len(places) - 1 - np.unique(places[::-1], return_index=True)[1]
        return places[last], pages[last]

    def _event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _ops(config: NativeEngineConfig, served: ServedWeights) -> models.Ops:
    if config.numerics == "exact":
        return models.ExactOps()
    return models.FusedOps() if served.quantized is None else models.FusedFp8Ops(served.quantized.rows_of)


def buckets(most: int) -> list[int]:
    """Numbers of sequences that graphs are captured for: close enough that little is padded."""
    sizes = [
        1,
        2,
        4,
        8,
        *range(16, 64, 8),
        *range(64, 256, 16),
        *range(256, 1024, 32),
        *range(1024, most + 128, 128),
    ]
    return [*(size for size in sizes if size < most), most]


def _sampled(copied: Copied) -> Sampled:
    """The results of a step, once they have arrived."""
    if copied.done is not None:
        copied.done.synchronize()
    tokens, logprobs = copied.tokens.numpy().astype(np.int64), copied.logprobs.numpy().copy()
    if copied.counts is None or copied.ids is None or copied.mask is None:
        return Sampled(tokens, logprobs, np.empty(0, np.int64), [])
    counts, ids, supports = copied.counts.numpy(), copied.ids.numpy(), []
    truncated = np.flatnonzero(counts >= 0)
    for row in truncated.tolist():
        over = int(counts[row]) > ids.shape[1]
        mask = copied.mask[row].cpu().numpy() if over else ids[row]
        supports.append(expand_support(ids[row], int(counts[row]), mask))
    return Sampled(tokens, logprobs, truncated, supports)

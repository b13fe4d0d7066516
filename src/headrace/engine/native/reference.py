"""The runner that is plain PyTorch, on any device: what the fast one is compared with, and the CPU's own."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.engine.native.attention import DecodeContext, PromptContext, SuffixContext
from headrace.engine.native.kv import KvCache
from headrace.engine.native.plan import Chunk, Outcome, Plan
from headrace.engine.native.sampling import Sampled, sample, uniforms
from headrace.engine.native.slots import Slots
from headrace.models import AdaptedOps, CausalLM, InvariantContext


class _Done:
    def __init__(self, outcome: Outcome):
        self._outcome = outcome

    def outcome(self) -> Outcome:
        return self._outcome


class ReferenceRunner:
    """Up to three passes a step: prompts from their beginning, other chunks, single tokens.

    With `exact`, chunks are one pass, and a token's result does not depend on what else is in a pass. `adapted` are
    the model's operations where tokens may have adapters.
    """

    ahead = 0

    def __init__(
        self,
        model: CausalLM,
        kv: KvCache,
        slots: Slots,
        *,
        exact: bool = False,
        adapted: AdaptedOps | None = None,
    ):
        self._model, self._kv, self._slots, self._exact = model, kv, slots, exact
        self._adapted = adapted
        self.gaps: deque[float] = deque()

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self, plan: Plan) -> _Done:
        self._slots.page_updates.clear()
        if plan.copies[0]:
            self._kv.copy(*plan.copies)
        hidden: dict[int, Tensor] = {}
        prompts = [chunk for chunk in plan.chunks if chunk.first == 0 and not self._exact]
        suffixes = [chunk for chunk in plan.chunks if chunk.first > 0 or self._exact]
        for chunks, pass_ in ((prompts, self._prompts), (suffixes, self._suffixes)):
            if chunks:
                lengths = [len(chunk.tokens) for chunk in chunks]
                pieces = pass_(chunks).split_with_sizes(lengths)
                hidden |= {chunk.slot: piece for chunk, piece in zip(chunks, pieces, strict=True)}
        parts = [self._single(plan)] if len(plan.rows) else []
        parts += [hidden[chunk.slot][-1:] for chunk in plan.chunks if chunk.samples]
        parts += [hidden[slot][-1:] for slot in plan.twins]
        scores = [self._score(chunk, hidden[chunk.slot]) for chunk in plan.chunks if len(chunk.targets)]
        if plan.later_copies[0]:
            self._kv.copy(*plan.later_copies)
        return _Done(Outcome(self._sample(plan, parts), scores))

    def synchronize(self) -> None:
        pass

    def _prompts(self, chunks: list[Chunk]) -> Tensor:
        tables = [self._pages(chunk) for chunk in chunks]
        context = PromptContext(self._kv, [len(chunk.tokens) for chunk in chunks], tables)
        return self._pass(chunks, context)

    def _suffixes(self, chunks: list[Chunk]) -> Tensor:
        tables = [self._pages(chunk) for chunk in chunks]
        first, new = [chunk.first for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        if self._exact:
            return self._pass(chunks, InvariantContext(self._kv.layer, tables, np.array(first), np.array(new)))
        return self._pass(chunks, SuffixContext(self._kv, tables, first, new))

    def _pass(self, chunks: list[Chunk], context: PromptContext | SuffixContext | InvariantContext) -> Tensor:
        tokens = torch.from_numpy(np.concatenate([chunk.tokens for chunk in chunks])).to(self._kv.device)
        self._serve(np.repeat([chunk.slot for chunk in chunks], [len(chunk.tokens) for chunk in chunks]))
        hidden_td: Tensor = self._model(tokens, context.positions, context)
        return hidden_td

    def _serve(self, slots_t: np.ndarray) -> None:
        """Let each token of the next pass have its sequence's adapter."""
        if self._adapted is not None:
            numbers_t = self._slots.adapter[slots_t]
            self._adapted.serve(torch.from_numpy(numbers_t).to(self._kv.device) if numbers_t.any() else None)

    def _pages(self, chunk: Chunk) -> np.ndarray:
        size = self._kv.page_size
        return self._slots.page_table[chunk.slot, : -(-chunk.last // size)]

    def _single(self, plan: Plan) -> Tensor:
        order = np.argsort(plan.positions, kind="stable")
        positions, writes, tables = (
            plan.positions[order],
            plan.writes[order],
            self._slots.page_table[plan.rows[order]],
        )
        context: DecodeContext | InvariantContext
        if self._exact:
            context = InvariantContext(self._kv.layer, tables, positions, np.ones_like(positions), writes)
        else:
            context = DecodeContext(self._kv, tables, positions, writes)
        tokens = torch.from_numpy(plan.tokens[order]).to(self._kv.device)
        self._serve(plan.rows[order])
        hidden_bd = self._model(tokens, torch.from_numpy(positions).to(self._kv.device), context)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return hidden_bd[torch.from_numpy(back).to(self._kv.device)]

    def _sample(self, plan: Plan, hidden: list[Tensor]) -> Sampled:
        if not hidden:
            nothing = np.empty(0, np.int64)
            return Sampled(nothing, nothing.astype(np.float32), nothing, [])
        uniform_b = uniforms(self._slots.seed[plan.samples], plan.indices)
        parameters = self._slots.parameters.rows(plan.samples)
        return sample(self._model.logits(torch.cat(hidden)), uniform_b, parameters)

    def _score(self, chunk: Chunk, hidden_td: Tensor) -> np.ndarray:
        targets = torch.from_numpy(chunk.targets.astype(np.int64)).to(self._kv.device)
        temperature = float(self._slots.parameters.temperature[chunk.slot])
        rows = hidden_td[len(chunk.tokens) - len(chunk.targets) :]
        logprobs, _ = self._model.ops.token_logprobs(rows, self._model.head_weight, targets, temperature)
        return logprobs.cpu().numpy()

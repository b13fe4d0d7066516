"""Recompute a turn's log-probs from its record alone: tokens, versions, KV lineage, sampling and supports.

The lineage is walked event by event. An event's model computes the keys and values of the positions from its
own up to the next event's, over a cache that was kept as older versions left it or, at a "recomputed" event,
rebuilt under the event's version. The pass over a position gives the logits of the token after it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.errors import RecordError
from headrace.models import CachedContext, CausalLM
from headrace.records import Turn

Look = Callable[[Tensor, Tensor, slice], None]
"""Gets final hidden states, the head's weights, and the sampled tokens that these gave."""


@torch.no_grad()
def replay_logprobs(
    models: Callable[[int], CausalLM], context: np.ndarray, turn: Turn, look: Look | None = None
) -> np.ndarray:
    """float32 (T,): each sampled token's log-prob. `models` gives a version's model.

    `context` is every token before the first sampled one. Raises RecordError where the record contradicts
    itself; whether the numbers agree with the record's is for the caller to judge. `look` sees what they were
    computed from.
    """
    if len(turn.tokens) == 0:
        return np.empty(0, np.float32)
    if turn.sampling.truncates and turn.support is None:
        raise RecordError("a turn whose sampling truncates carries its supports", turn.sampling)
    if not turn.lineage or turn.lineage[0].position != 0:
        raise RecordError("a turn's lineage starts at position 0", turn.lineage[:1])
    sequence = np.concatenate([context, turn.tokens]).astype(np.int64)
    first_sampled = len(context)
    # The last token was sampled but never passed through the model.
    ends = [event.position for event in turn.lineage[1:]] + [len(sequence) - 1]
    cache: CachedContext | None = None
    out: list[np.ndarray] = []
    for event, end in zip(turn.lineage, ends, strict=True):
        begin, end = event.position, min(end, len(sequence) - 1)
        if begin >= len(sequence) - 1:
            break
        if end < begin:
            raise RecordError("lineage events stand in the order of their positions", turn.lineage)
        model = models(event.version)
        if cache is None or event.before == "recomputed":
            cache = CachedContext(model.config.num_layers)
            _pass(model, cache, sequence[:begin])
        hidden_td = _pass(model, cache, sequence[begin:end])
        first = max(begin, first_sampled - 1)
        if end > first:
            rows = slice(first + 1 - first_sampled, end + 1 - first_sampled)
            if (turn.versions[rows] != event.version).any():
                raise RecordError(
                    f"tokens {rows.start} to {rows.stop - 1} were sampled under their lineage's version",
                    (event.version, turn.versions[rows].tolist()),
                )
            out.append(_logprobs(model, hidden_td[first - begin :], turn, rows))
            if look is not None:
                look(hidden_td[first - begin :], model.head_weight, rows)
    return np.concatenate(out)


def _pass(model: CausalLM, cache: CachedContext, tokens: np.ndarray) -> Tensor:
    device = model.head_weight.device
    if len(tokens) == 0:
        return torch.empty(0, model.config.hidden_size, device=device)
    positions = torch.arange(cache.length, cache.length + len(tokens), device=device)
    hidden_td: Tensor = model(torch.from_numpy(tokens).to(device), positions, cache)
    return hidden_td


def _logprobs(model: CausalLM, hidden_td: Tensor, turn: Turn, rows: slice) -> np.ndarray:
    device = hidden_td.device
    support = None
    if turn.support is not None:
        offsets = turn.support.offsets[rows.start : rows.stop + 1]
        ids = turn.support.ids[offsets[0] : offsets[-1]]
        support = (
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy((offsets - offsets[0]).astype(np.int64)).to(device),
        )
    targets = torch.from_numpy(turn.tokens[rows].astype(np.int64)).to(device)
    # Greedy leaves one token, whose log-prob is 0 at any temperature.
    temperature = turn.sampling.temperature or 1.0
    logprobs, _ = model.ops.token_logprobs(hidden_td, model.head_weight, targets, temperature, support)
    return logprobs.cpu().numpy()

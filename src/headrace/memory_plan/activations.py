"""What a forward pass keeps for its backward pass, for each token. Unit: bytes.

Derived from what the operations save (`models/ops.py`, `models/trained.py`, `training/backends/`). Shape letters:
D hidden size, Q all query heads, K all key heads, I inner size, V vocabulary, T tokens of a micro-batch.
"""

from __future__ import annotations

from headrace.models.config import ModelConfig

ADAPTED = 7
"""Projections of a layer that may have an adapter."""
PADDING = 1.1
"""Most that a bucket of sequences is padded (`models.attention.MAX_PADDING`)."""
CHUNK_ELEMENTS = 2**27
"""Logits of one chunk in the reference (`models.logprobs.CHUNK_ELEMENTS`)."""
LOGITS_SHARE = 12
"""The part of a device up to which fused logits are kept whole (`models.trained.LOGITS_SHARE`)."""


def layer_bytes(model: ModelConfig, itemsize: int, *, fused: bool, rank: int = 0) -> float:
    """Kept by one layer for one token. `rank` is an adapter's."""
    d, q, k, i = model.hidden_size, model.q_size, model.kv_size, model.intermediate_size
    adapters = itemsize * ADAPTED * rank
    if fused:
        # Two norms keep their sum and the products after them their input (4 D). Queries and keys are kept as
        # projected, in one block with the values, and rotated (2 Q + 3 K); attention keeps its output and a float32
        # sum of each head. The gate keeps both its inputs, the last product its input (3 I).
        return itemsize * (4 * d + 3 * q + 3 * k + 3 * i) + 4 * model.num_heads + adapters
    # Each norm keeps its input and its root in float32, the normalised numbers and its output.
    norms = 2 * (4 * d + 2 * itemsize * d + 8)
    # The rotation keeps nothing but its tables; attention its three inputs and its output, padded, and the output
    # once more, without padding.
    heads = itemsize * q + PADDING * itemsize * (2 * q + 2 * k)
    if model.qk_norm:
        heads += (4 + itemsize) * (q + k) + 8 * (model.num_heads + model.num_kv_heads)
    # silu(gate) is a tensor of its own.
    return norms + heads + itemsize * 4 * i + 4 * model.num_heads + adapters


def pass_bytes(
    model: ModelConfig, tokens: int, itemsize: int, *, fused: bool, recompute: bool, rank: int = 0
) -> int:
    """Kept by all layers for a micro-batch. With recomputation a layer keeps its two inputs, and one layer at a
    time has all of its own."""
    one = layer_bytes(model, itemsize, fused=fused, rank=rank)
    layers = 2 * itemsize * model.hidden_size * model.num_layers + one if recompute else one * model.num_layers
    # The embedding's output, the last norm and the trained tokens' hidden states.
    return int(tokens * (layers + 4 * itemsize * model.hidden_size))


def backward_bytes(model: ModelConfig, tokens: int, itemsize: int) -> int:
    """Gradients that one layer's backward pass holds at once: of the gate and its inputs, of attention with its
    keys repeated for each query head, and of the residual stream."""
    return tokens * itemsize * (3 * model.intermediate_size + 4 * model.q_size + 3 * model.hidden_size)


def logits_bytes(model: ModelConfig, tokens: int, itemsize: int, *, fused: bool, device_total: int) -> int:
    """At most, for trained tokens: no more than the micro-batch has."""
    v = model.vocab_size
    if fused and device_total:
        # float32 logits up to a share of the device, and their gradient in the pass's dtype. Beyond it they are
        # computed by pieces, so the most is held just below it.
        rows = min(tokens, device_total // LOGITS_SHARE // (4 * v))
        return rows * v * (4 + itemsize)
    rows = min(tokens, max(1, CHUNK_ELEMENTS // v))
    # A chunk's logits, their log-softmax and its exponential, in float32; before that, in the pass's dtype.
    return rows * v * (12 + (itemsize if itemsize < 4 else 0))


def inference_bytes(model: ModelConfig, tokens: int, rows: int, itemsize: int) -> int:
    """Of a pass without a backward pass: the widest point of one layer, and float32 logits of `rows` with what
    sampling makes of them."""
    widest = 3 * model.intermediate_size + model.q_size + 2 * model.kv_size + 3 * model.hidden_size
    return tokens * itemsize * widest + rows * model.vocab_size * 4 * 3

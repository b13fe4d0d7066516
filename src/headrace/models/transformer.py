"""The causal language model: one definition for Llama, Qwen2/2.5 and Qwen3, over an ops back end.

    tokens ─▶ embed ─▶ [ norm ─▶ q,k,v ─▶ (q,k norm) ─▶ rope ─▶ attention ─▶ o ─▶ +
                         norm ─▶ gate,up ─▶ silu·  ─▶ down ─▶ + ] × layers ─▶ norm ─▶ hidden

Inputs are flat vectors of tokens, no batch dimension: what a token sees is the context's business. Parameters
have their Hugging Face names. Shape letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from headrace.errors import ConfigError
from headrace.models.attention import AttentionContext
from headrace.models.config import ModelConfig
from headrace.models.ops import Ops, ReferenceOps, Rotation
from headrace.models.rope import Rotary


class RMSNorm(nn.Module):
    """Holds the scale; the computation is the back end's."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, ops: Ops):
        super().__init__()
        self.layer, self.ops = layer, ops
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.q_proj = nn.Linear(config.hidden_size, config.q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else None

    def forward(self, x_td: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        ops, tokens, dim = self.ops, x_td.shape[0], self.head_dim
        q, k, v = ops.linears(x_td, (self.q_proj, self.k_proj, self.v_proj))
        q = q.view(tokens, self.num_heads, dim)
        k = k.view(tokens, self.num_kv_heads, dim)
        v = v.view(tokens, self.num_kv_heads, dim)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        rotation = Rotation(cos, sin, q_norm, k_norm, self.eps)
        return project(ops, ops.attention(q, k, v, rotation, self.layer, context).flatten(1), self.o_proj)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops = ops
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_td: Tensor) -> Tensor:
        return project(self.ops, self.ops.gated(x_td, self.gate_proj, self.up_proj), self.down_proj)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, ops: Ops):
        super().__init__()
        self.ops, self.eps = ops, config.rms_norm_eps
        self.self_attn = Attention(config, layer, ops)
        self.mlp = MLP(config, ops)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)

    def forward(
        self, x_td: Tensor, residual_td: Tensor | None, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """(output, residual), not yet added: the next norm does it, so that a back end can fuse them."""
        ops = self.ops
        if residual_td is None:
            residual_td, x_td = x_td, ops.rms_norm(x_td, self.input_layernorm.weight, self.eps)
        else:
            x_td, residual_td = ops.add_rms_norm(x_td, residual_td, self.input_layernorm.weight, self.eps)
        x_td = self.self_attn(x_td, cos, sin, context)
        x_td, residual_td = ops.add_rms_norm(x_td, residual_td, self.post_attention_layernorm.weight, self.eps)
        return self.mlp(x_td), residual_td


class Decoder(nn.Module):
    """Everything under the `model.` prefix of a checkpoint."""

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops, self.eps = ops, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, ops) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.rotary = Rotary(config)
        self.recompute = False
        """Whether a layer keeps its input alone for the backward pass, and computes the rest again."""

    def forward(self, tokens_t: Tensor, positions_t: Tensor, context: AttentionContext) -> Tensor:
        x_td = self.embed_tokens(tokens_t)
        cos, sin = self.rotary.tables(positions_t, x_td.dtype)
        residual_td: Tensor | None = None
        for layer in self.layers:
            run = _again(layer) if self.recompute and torch.is_grad_enabled() else layer
            x_td, residual_td = run(x_td, residual_td, cos, sin, context)
        assert residual_td is not None  # there is at least one layer
        return self.ops.add_rms_norm(x_td, residual_td, self.norm.weight, self.eps)[0]


class CausalLM(nn.Module):
    """A causal language model whose every operation goes through `ops`.

    A projection replaced by another module (a PEFT adapter's wrapper) is called instead of read. Forward
    hooks on plain projections do not run; those on layers do, and see what the back end passes between them.
    """

    def __init__(self, config: ModelConfig, ops: Ops | None = None):
        super().__init__()
        self.config = config
        self.ops: Ops = ops if ops is not None else ReferenceOps()
        self.model = Decoder(config, self.ops)
        self.lm_head = (
            None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def use(self, ops: Ops) -> CausalLM:
        """Compute with this back end from now on."""
        for module in self.modules():
            if isinstance(module, Attention | MLP | DecoderLayer | Decoder | CausalLM):
                module.ops = ops
        return self

    def forward(self, tokens_t: Tensor, positions_t: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states (T, D) after the final norm.

        `positions_t` is each token's place in its own sequence. The context serves this pass alone, unless it
        is one that keeps a cache.
        """
        hidden_td: Tensor = self.model(tokens_t, positions_t, context)
        return hidden_td

    def logits(self, hidden_td: Tensor) -> Tensor:
        """(T, V), before any temperature."""
        return self.ops.logits(hidden_td, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the output head, or the embedding where the two are tied."""
        source: nn.Module = self.model.embed_tokens if self.lm_head is None else self.lm_head
        if type(source) not in (nn.Linear, nn.Embedding):
            raise ConfigError(
                "the output head must not carry an adapter, because log-probs are computed from its weight",
                type(source).__name__,
                "leave lm_head and embed_tokens out of the adapter's target modules",
            )
        weight = source.weight
        assert isinstance(weight, Tensor)
        return weight


def _again(layer: nn.Module) -> Callable[..., Any]:
    """The layer, with the parameters of now also when it is computed again: a `functional_call` may be over."""
    weights: dict[str, Tensor] = dict(layer.named_parameters())

    def run(*inputs: Any) -> Any:
        return functional_call(layer, weights, inputs)

    return lambda *inputs: checkpoint(run, *inputs, use_reentrant=False)


def project(ops: Ops, x: Tensor, layer: nn.Module) -> Tensor:
    """A projection back to the residual stream: the back end's, or the module's where it is not a plain one."""
    if type(layer) is nn.Linear:
        return ops.branch(x, layer.weight, layer.bias)
    out = layer(x)
    assert isinstance(out, Tensor)
    return out

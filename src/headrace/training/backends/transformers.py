"""Any causal language model of `transformers`.

Two layouts give the same numbers, and the cheaper one is taken for each micro-batch:

    packed   [1, T]: sequences end to end; positions that restart tell the model where one begins. Attention is
             computed over all pairs and masked. Only for models that were seen to keep sequences apart.
    rows     [B, L] a few times: sequences of similar length, padded at the end, where causality hides it.

Shape letters: t input tokens, d hidden size, v vocabulary, n trained tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch.func import functional_call

from headrace.errors import ModelFolderError
from headrace.models import refuse_non_finite, token_logprobs
from headrace.training.backends.base import Weights, copy_companions, distribution, to_device
from headrace.training.backends.lora import FOLDER, Adapter
from headrace.training.backends.masters import Masters
from headrace.training.config import LoraConfig
from headrace.training.packing import Packed

# Shortest sequence, as a share of the longest, that joins its rows.
_SIMILAR = 0.75
# The library does not check a configuration's types and sizes, but computes with them.
_WHAT_LOADING_RAISES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
# Logits that no model leaves as they are unless it leaves all.
_LOUD = 1000.0


class _Pass(NamedTuple):
    """One call of the model."""

    tokens: np.ndarray
    positions: np.ndarray
    sources: np.ndarray
    """Places, in the flattened tokens, whose outputs are wanted."""
    trained: np.ndarray
    """Which of the n trained tokens they predict."""


class TransformersBackend:
    """Trains what `AutoModelForCausalLM` loads. Dropout is off: a token's log-prob must be reproducible."""

    counts_shared_once = False

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        lora: LoraConfig | None = None,
        seed: int = 0,
        frozen: bool = False,
    ):
        from transformers import AutoModelForCausalLM

        kept = dtype if frozen or lora is not None else torch.float32
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=kept, local_files_only=True, use_safetensors=True
            )
        except _WHAT_LOADING_RAISES as error:
            raise ModelFolderError(
                "a model folder must be one that transformers can load",
                str(folder),
                f"{type(error).__name__}: {error}",
            ) from error
        for name, parameter in model.named_parameters():
            refuse_non_finite(name, parameter, str(folder))
        self.device = torch.device(device)
        self._folder = Path(folder)
        self._dtype = dtype
        self._model = model.to(self.device).eval()
        self._adapter: Adapter | None = None
        inside = names = dict(self._model.named_parameters())
        self._head: torch.nn.Module = self._model.get_output_embeddings()
        self._takes_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        text = self._model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self._flops_per_token = 2 * sum(p.numel() for p in inside.values())
        self._flops_per_pair = 4 * text.hidden_size * text.num_hidden_layers
        self.keeps_sequences_apart = self._takes_positions and self._seen_to_keep_apart()
        self._head_is_plain = self._seen_to_have_plain_head()
        if frozen:
            self._model.requires_grad_(False)
            inside = names = {}
        if lora is not None:
            self._adapter = Adapter(model, lora, head_and_embedding=_head_and_embedding(model), seed=seed)
            inside, names = self._adapter.inside, self._adapter.parameters
        self._masters = Masters(inside, dtype)
        self._parameters = dict(zip(names, self._masters.parameters.values(), strict=True))
        self._inside = inside

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._parameters

    def embeddings(self) -> set[str]:
        names = {
            f"{name}.{own}"
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Embedding)
            for own, _ in module.named_parameters(recurse=False)
        }
        return names & self._parameters.keys()

    def token_logprobs(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        if self._head_is_plain:
            return self.logprobs_of(packed, *self.hidden(packed))
        self._masters.cast()
        passes, back = self._passes(packed)
        temperature, support = distribution(packed, self.device)
        logits_nv = torch.cat([self._logits(one) for one in passes]).index_select(0, back)
        return _logprobs_of_logits(
            logits_nv.float(), to_device(packed.targets_n, self.device), temperature, support
        )

    def drop_unfinished(self) -> None:
        self._masters.drop_unfinished()

    def snapshot(self) -> Weights:
        return {name: p.detach().to(self._dtype, copy=True) for name, p in self._masters.parameters.items()}

    def check_hidden(self) -> None:
        if not self._head_is_plain:
            raise ModelFolderError(
                "distillation needs a model whose logits are its hidden states times the head's weight",
                str(self._folder),
                "use a model without soft caps, scales or biases on its logits",
            )

    def hidden(self, packed: Packed, weights: Weights | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if weights is None:
            self._masters.cast()
        passes, back = self._passes(packed)
        hidden_nd = torch.cat([self._hidden(one, weights) for one in passes]).index_select(0, back)
        return hidden_nd, self._head_weight(weights)

    def logprobs_of(
        self, packed: Packed, hidden_nd: torch.Tensor, head_vd: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        temperature, support = distribution(packed, self.device)
        return token_logprobs(hidden_nd, head_vd, to_device(packed.targets_n, self.device), temperature, support)

    def without_adapter(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapter is None else self._adapter.absent()

    def save_hf(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        with self._masters.in_place():
            state = self._model.state_dict() if self._adapter is None else self._adapter.merged()
            self._model.save_pretrained(str(folder), state_dict=_cast(state, dtype))
            # It states the type of the parameters as they are kept.
            kept, self._model.config.dtype = self._model.config.dtype, str(dtype).removeprefix("torch.")
            self._model.config.save_pretrained(str(folder))
            self._model.config.dtype = kept
            if self._adapter is not None:
                self._adapter.save(Path(folder) / FOLDER, self._folder, dtype)
        copy_companions(self._folder, folder)

    # ── Layouts ──────────────────────────────────────────────────────────────────────────────────────────

    def _passes(self, packed: Packed) -> tuple[list[_Pass], torch.Tensor]:
        """(calls of the model, where each trained token is among their outputs)."""
        passes = self._plan(packed)
        order = np.concatenate([one.trained for one in passes])
        return passes, to_device(np.argsort(order), self.device)

    def _plan(self, packed: Packed) -> list[_Pass]:
        rows = list(_rows(packed))
        if not self.keeps_sequences_apart:
            return rows
        together = len(packed.tokens_t)
        rows_cost = sum(self._cost(one.tokens.size, one.tokens.size * one.tokens.shape[1]) for one in rows)
        return [_end_to_end(packed)] if self._cost(together, together**2) <= rows_cost else rows

    def _cost(self, tokens: int, pairs: int) -> int:
        return tokens * self._flops_per_token + pairs * self._flops_per_pair

    # ── One call of the model ────────────────────────────────────────────────────────────────────────────

    def _head_weight(self, weights: Weights | None = None) -> torch.Tensor:
        own: torch.Tensor = self._head.weight  # type: ignore[assignment]
        if weights is None:
            return own
        return next((weights[name] for name, p in self._inside.items() if p is own), own)

    def _logits(self, one: _Pass) -> torch.Tensor:
        """(n, v): whatever the model makes of the chosen hidden states, scaling and soft caps included."""
        sources = to_device(one.sources, self.device)
        choose = lambda module, args: (args[0].flatten(0, 1).index_select(0, sources)[None], *args[1:])  # noqa: E731
        return self._call(one, choose)[0]

    def _hidden(self, one: _Pass, weights: Weights | None = None) -> torch.Tensor:
        """(n, d): what goes into the head, whose own product is spared."""
        sources = to_device(one.sources, self.device)
        caught: list[torch.Tensor] = []

        def catch(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            caught.append(args[0].flatten(0, 1).index_select(0, sources))
            return (args[0][:1, :1], *args[1:])

        self._call(one, catch, weights)
        return caught[0]

    def _call(self, one: _Pass, before_head: Any, weights: Weights | None = None) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": to_device(one.tokens, self.device), "use_cache": False}
        if self._takes_positions:
            inputs["position_ids"] = to_device(one.positions, self.device)
        hook = self._head.register_forward_pre_hook(before_head)
        try:
            output = functional_call(self._model, weights, (), inputs) if weights else self._model(**inputs)
        finally:
            hook.remove()
        logits: torch.Tensor = output.logits
        return logits

    # ── What the model was seen to do ────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _seen_to_keep_apart(self) -> bool:
        """Whether a packed second sequence gives bitwise the same whatever the first one is, and what it gives
        alone within rounding."""
        first, other, second = (np.random.default_rng(i).integers(0, self.vocab_size, 6) for i in range(3))
        alone = self._logits(_probe(second))
        beside = [self._logits(_probe(neighbour, second))[-len(second) :] for neighbour in (first, other)]
        scale = float(alone.abs().max())
        rounding = 1e-4 if alone.dtype == torch.float32 else 0.05
        return torch.equal(*beside) and float((beside[0] - alone).abs().max()) <= rounding * scale

    @torch.no_grad()
    def _seen_to_have_plain_head(self) -> bool:
        """Whether the logits are the hidden states times the head's weight and nothing else."""
        weight = getattr(self._head, "weight", None)
        biased = getattr(self._head, "bias", None) is not None
        if weight is None or biased or all(p is not weight for p in self._model.parameters()):
            return False
        probe = _probe(np.random.default_rng(3).integers(0, self.vocab_size, 6))
        hidden_nd = self._hidden(probe)
        loudest = float(torch.nn.functional.linear(hidden_nd, weight).abs().max())
        # A soft cap is hard to see in small logits, and hidden by half precision's rounding.
        louder_nd = hidden_nd * (_LOUD / max(loudest, 1e-6))
        return self._head_multiplies(probe, hidden_nd) and self._head_multiplies(probe, louder_nd)

    def _head_multiplies(self, probe: _Pass, hidden_nd: torch.Tensor) -> bool:
        product_nv = torch.nn.functional.linear(hidden_nd, self._head_weight())
        logits_nv = self._call(probe, lambda module, args: (hidden_nd[None], *args[1:]))[0]
        if logits_nv.shape != product_nv.shape:
            return False
        rounding = 1e-5 if logits_nv.dtype == torch.float32 else 0.02
        return float((logits_nv - product_nv).abs().max()) <= rounding * float(product_nv.abs().max())


@torch.no_grad()
def _cast(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating-point tensors in `dtype`; what was one tensor under two names is one again."""
    once: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in once:
            once[place] = tensor.detach()
            if tensor.is_floating_point() and tensor.dtype != dtype:
                once[place] = tensor.to("cpu", dtype)
                refuse_non_finite(name, once[place], "an export")
        found[name] = once[place]
    return found


def _head_and_embedding(model: Any) -> set[str]:
    """Their modules' names."""
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name for name, module in model.named_modules() if any(module is one for one in both)}


def _probe(*sequences: np.ndarray) -> _Pass:
    tokens = np.concatenate(sequences)[None]
    positions = np.concatenate([np.arange(len(sequence)) for sequence in sequences])[None]
    return _Pass(tokens, positions, np.arange(tokens.size), np.arange(tokens.size))


def _end_to_end(packed: Packed) -> _Pass:
    everything = np.arange(len(packed.targets_n))
    return _Pass(packed.tokens_t[None], packed.positions_t[None], packed.sources_n, everything)


def _rows(packed: Packed) -> Iterator[_Pass]:
    """Sequences of similar length together, longest first."""
    lengths = packed.lengths_s
    starts = np.cumsum(lengths) - lengths
    sequence_of_n = np.repeat(np.arange(len(lengths)), packed.trained_s)
    place_of_n = packed.positions_t[packed.sources_n]
    remaining = np.argsort(-lengths, kind="stable")
    while len(remaining):
        longest = int(lengths[remaining[0]])
        count = int((lengths[remaining] >= _SIMILAR * longest).sum())
        members, remaining = remaining[:count], remaining[count:]
        offsets = np.minimum(np.arange(longest), lengths[members, None] - 1)
        row_of = np.full(len(lengths), -1)
        row_of[members] = np.arange(count)
        trained = np.flatnonzero(row_of[sequence_of_n] >= 0)
        yield _Pass(
            tokens=packed.tokens_t[starts[members, None] + offsets],
            positions=np.broadcast_to(np.arange(longest), (count, longest)).copy(),
            sources=row_of[sequence_of_n[trained]] * longest + place_of_n[trained],
            trained=trained,
        )


def _logprobs_of_logits(
    logits_nv: torch.Tensor,
    targets_n: torch.Tensor,
    temperature: float | torch.Tensor,
    support: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logits_nv = logits_nv / scale
    if support is not None:
        ids, offsets = support
        counts = offsets.diff()
        outside = (counts > 0)[:, None].expand_as(logits_nv).contiguous()
        rows = torch.arange(len(counts), device=ids.device).repeat_interleave(counts, output_size=len(ids))
        outside[rows, ids.long()] = False
        logits_nv = logits_nv.masked_fill(outside, -1e30)
    logp_nv = torch.log_softmax(logits_nv, -1)
    entropy_n = -(logp_nv.exp() * logp_nv).sum(-1)
    return logp_nv.gather(1, targets_n[:, None]).squeeze(1), entropy_n

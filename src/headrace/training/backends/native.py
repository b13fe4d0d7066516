"""Headrace's own model definitions, the same that the native engine serves.

Shape letters: t packed tokens, u those that go through the model, d hidden size, n trained tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.func import functional_call

from headrace.models import AttentionContext, Ops, PackedContext, has_kernel, load_model, save_model
from headrace.training.backends.base import Weights, copy_companions, distribution, to_device
from headrace.training.backends.lora import FOLDER, HEAD_AND_EMBEDDING, Adapter
from headrace.training.backends.masters import Masters
from headrace.training.backends.shared_prefix import MIN_SAVING, prefix_tree, tree_context
from headrace.training.config import LoraConfig
from headrace.training.packing import Packed

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class NativeBackend:
    """Trains the families of `headrace.models` (Llama, Qwen2, Qwen3).

    Sharing prefixes changes log-probs within rounding; where bits count it is to be off.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
        share_prefixes: bool = True,
        lora: LoraConfig | None = None,
        seed: int = 0,
        frozen: bool = False,
        recompute: bool = False,
    ):
        self.device = torch.device(device)
        self._folder = Path(folder)
        self._dtype = dtype
        self._share_prefixes = share_prefixes
        kept = dtype if frozen or lora is not None else torch.float32
        self._model = load_model(folder, dtype=kept, device=self.device, ops=ops)
        self._model.model.recompute = recompute
        self._adapter: Adapter | None = None
        inside = names = dict(self._model.named_parameters())
        if frozen:
            self._model.requires_grad_(False)
            inside = names = {}
        if lora is not None:
            self._adapter = Adapter(self._model, lora, head_and_embedding=HEAD_AND_EMBEDDING, seed=seed)
            inside, names = self._adapter.inside, self._adapter.parameters
        self._masters = Masters(inside, dtype)
        self._parameters = dict(zip(names, self._masters.parameters.values(), strict=True))
        self.vocab_size = self._model.config.vocab_size
        self._head_size = self._model.config.head_dim
        self.counts_shared_once = share_prefixes and has_kernel(self.device, dtype, self._head_size)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._parameters

    def embeddings(self) -> set[str]:
        return {_EMBEDDING} & self._parameters.keys()

    def token_logprobs(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logprobs_of(packed, *self.hidden(packed))

    def check_hidden(self) -> None: ...

    def drop_unfinished(self) -> None:
        self._masters.drop_unfinished()

    def snapshot(self) -> Weights:
        return {name: p.detach().to(self._dtype, copy=True) for name, p in self._masters.parameters.items()}

    def hidden(self, packed: Packed, weights: Weights | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_u, positions_u, sources_n = packed.tokens_t, packed.positions_t, packed.sources_n
        tree = prefix_tree(packed.tokens_t, packed.lengths_s) if self._share_prefixes else None
        context: AttentionContext
        if tree is None or tree.saving <= (0 if self.counts_shared_once else MIN_SAVING):
            context = PackedContext(packed.lengths_s.tolist(), self.device)
        else:
            context = tree_context(tree, packed.lengths_s.tolist(), self.device, self._dtype, self._head_size)
            tokens_u, positions_u = tokens_u[tree.tokens_u], positions_u[tree.tokens_u]
            sources_n = tree.nodes_t[sources_n]
        inputs = (to_device(tokens_u, self.device), to_device(positions_u, self.device), context)
        if weights is None:
            self._masters.cast()
            hidden_ud, head = self._model(*inputs), self._model.head_weight
        else:
            hidden_ud = functional_call(self._model, weights, inputs)
            head = weights.get(_HEAD, weights.get(_EMBEDDING, self._model.head_weight))
        return hidden_ud.index_select(0, to_device(sources_n, self.device)), head

    def logprobs_of(
        self, packed: Packed, hidden_nd: torch.Tensor, head_vd: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        temperature, support = distribution(packed, self.device)
        targets_n = to_device(packed.targets_n, self.device)
        return self._model.ops.token_logprobs(hidden_nd, head_vd, targets_n, temperature, support=support)

    def without_adapter(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapter is None else self._adapter.absent()

    def save_hf(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        with self._masters.in_place():
            state = self._model if self._adapter is None else self._adapter.merged()
            save_model(state, self._model.config, folder, dtype=dtype)
            if self._adapter is not None:
                self._adapter.save(Path(folder) / FOLDER, self._folder, dtype)
        copy_companions(self._folder, folder)

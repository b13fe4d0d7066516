"""What the trainer needs from a model, whoever defines it."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.models import Ops, dtype_on, upload
from headrace.training.config import TrainingConfig
from headrace.training.packing import Packed

_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
)

Weights = dict[str, torch.Tensor]
"""By the parameters' names in the model."""


class Backend(Protocol):
    """A causal language model with float32 parameters. Forward and backward run in the dtype it was built with:
    it computes with casts of the parameters, as the engine that serves them does, and gradients arrive in float32.
    Parameters are changed in place, and not between a pass and its backward pass.

    With an adapter, its tensors are the parameters; the model's own weights are frozen and kept in that dtype."""

    vocab_size: int
    device: torch.device
    counts_shared_once: bool
    """Whether what sequences of a pass begin with in common takes time and memory once."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The live parameters under their Hugging Face names, an adapter's under those of PEFT's files; a tied head
        is not among them."""
        ...

    def embeddings(self) -> set[str]:
        """Names of those parameters that are embeddings: one row for a token, or for a position."""
        ...

    def token_logprobs(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropies) of the n trained tokens in float32, under each one's temperature and support.

        Sequences do not see each other. Differentiable in the parameters.
        """
        ...

    def hidden(self, packed: Packed, weights: Weights | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """((n, d) what the head makes the trained tokens' logits of, its weight (v, d)), in the dtype of forward.

        With `weights`, as `snapshot` gave them, of these in place of the parameters.
        """
        ...

    def check_hidden(self) -> None:
        """Raise ModelFolderError for a model whose logits are not a plain product of `hidden` and its head."""
        ...

    def logprobs_of(
        self, packed: Packed, hidden_nd: torch.Tensor, head_vd: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `token_logprobs` is, of `hidden`."""
        ...

    def snapshot(self) -> Weights:
        """A copy of the parameters as they are now, in the dtype of forward."""
        ...

    def drop_unfinished(self) -> None:
        """Forget what a backward pass that failed has left beside the parameters' gradients."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within it the model computes as if it had none."""
        ...

    def save_hf(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face folder: configuration, weights in `dtype` and, where there is one, the tokenizer.

        An adapter is merged into the weights, in float32, and by itself in the subfolder adapter/, in `dtype`."""
        ...


def open_backend(
    model_folder: str | Path, config: TrainingConfig, *, seed: int = 0, frozen: bool = False
) -> Backend:
    """The back end the configuration names, with the folder's weights. A new adapter is drawn from `seed`.

    `frozen`: without parameters, its weights once and in the dtype it computes in.
    """
    device = resolve_device(config.device)
    dtype = dtype_on(device, config.dtype)
    if config.backend == "native":
        from headrace.training.backends.native import NativeBackend

        return NativeBackend(
            model_folder,
            dtype=dtype,
            device=device,
            ops=_ops(config, device),
            share_prefixes=config.shares_prefixes,
            lora=config.lora,
            seed=seed,
            frozen=frozen,
            recompute=config.recomputes,
        )
    from headrace.training.backends.transformers import TransformersBackend

    return TransformersBackend(model_folder, dtype=dtype, device=device, lora=config.lora, seed=seed, frozen=frozen)


def _ops(config: TrainingConfig, device: torch.device) -> Ops | None:
    """None: the reference's."""
    if config.numerics == "exact":
        from headrace.models import ExactOps

        return ExactOps()
    if config.kernels == "fused" and device.type == "cuda":
        from headrace.models import TrainedOps

        return TrainedOps()
    return None


def resolve_device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            'training.device = "cuda" needs a CUDA device that torch can use', name, 'use "cpu" or "auto"'
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on the CPU it shares the array's memory."""
    return upload(torch.from_numpy(array), device)


def distribution(
    packed: Packed, device: torch.device
) -> tuple[float | torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """(temperature, support) as `token_logprobs` wants them: one number where all temperatures are equal."""
    first = float(packed.temperatures_n[0])
    uniform = bool((packed.temperatures_n == first).all())
    temperature = first if uniform else to_device(packed.temperatures_n, device)
    if packed.support is None:
        return temperature, None
    ids, offsets = packed.support
    return temperature, (to_device(ids, device), to_device(offsets, device))


def copy_companions(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer's files and the generation settings beside saved weights."""
    for pattern in _COMPANIONS:
        for file in Path(source).glob(pattern):
            if file.is_file():
                shutil.copyfile(file, Path(target) / file.name)

"""Small batches and models for the training room's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from headrace.models import ModelConfig, check_folder, parameter_shapes, random_model, save_model
from headrace.records import Batch, Episode, Group, Sampling, Support, Task, Turn
from headrace.training.config import LoraConfig
from headrace.training.packing import Packed, pack, training_sequences

TASK = Task(id="t", prompt="p")
TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def turn(
    context: np.ndarray,
    tokens: np.ndarray,
    *,
    logprobs: np.ndarray | None = None,
    version: int | np.ndarray = 0,
    temperature: float = 1.0,
    support: list[list[int]] | None = None,
    **rest: object,
) -> Turn:
    return Turn(
        tokens=tokens,
        logprobs=np.full(len(tokens), -1.0, np.float32) if logprobs is None else logprobs.astype(np.float32),
        versions=np.full(len(tokens), version, np.int32) if isinstance(version, int) else version.astype(np.int32),
        context=context,
        stop=rest.pop("stop", "end"),
        sampling=Sampling(temperature=temperature, top_k=1 if support else 0),
        support=Support.from_rows([np.array(row, np.int32) for row in support]) if support else None,
        **rest,
    )


def episode(*turns: Turn, id: str = "e", reward: float | None = 0.0) -> Episode:
    return Episode(id=id, task=TASK, turns=turns, reward=reward)


def batch_of(
    episodes: list[Episode], advantages: list[float], *, step: int = 0, version: int = 0, group_size: int = 0
) -> Batch:
    size = group_size or len(episodes)
    groups = tuple(
        Group(id=f"g{i}", sequence=i, task=TASK, episodes=tuple(episodes[i : i + size]))
        for i in range(0, len(episodes), size)
    )
    return Batch(step=step, version=version, groups=groups, advantages=np.array(advantages, np.float32))


def random_batch(seed: int, *, episodes: int = 12, group_size: int = 4, vocab: int = 32, version: int = 0) -> Batch:
    """Single-turn episodes of unequal lengths with plausible behaviour log-probs."""
    draw = np.random.default_rng(seed)
    made = []
    for i in range(episodes):
        context = draw.integers(0, vocab, draw.integers(1, 9)).astype(np.int32)
        tokens = draw.integers(0, vocab, draw.integers(1, 12)).astype(np.int32)
        logprobs = -3.4 + 0.5 * draw.standard_normal(len(tokens))
        made.append(
            episode(
                turn(context, tokens, logprobs=logprobs, version=version),
                id=f"e{i}",
                reward=float(draw.integers(2)),
            )
        )
    return batch_of(made, draw.standard_normal(episodes).tolist(), version=version, group_size=group_size)


def mixed_batch() -> Batch:
    """Unequal lengths, shared prompts, temperatures and a truncated turn."""
    plain = list(random_batch(1, episodes=5).episodes)
    prompt = ints(3, 1, 4, 1, 5)
    own = [
        episode(turn(prompt, ints(9, 2, 6), temperature=0.7)),
        episode(turn(prompt, ints(9, 2, 7, 8))),
        episode(turn(prompt, ints(5, 3), support=[[5, 1], [3, 2, 8]])),
        episode(turn(prompt, ints(9, 2, 6), temperature=0.7)),
    ]
    return batch_of(plain + own, [1.0] * 9)


def packed_of(batch: Batch) -> Packed:
    return pack(training_sequences(batch))


def tiny_model(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    config = ModelConfig.from_hf({"model_type": family, **TINY, **changes})
    save_model(random_model(config, seed), config, folder)
    return folder


def random_adapter(folder: Path, lora: LoraConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """An adapter for the folder's model, both halves of it drawn: it changes what the model computes."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(check_folder(folder)).items():
        if name.endswith(tuple(f"{target}.weight" for target in lora.targets)):
            key = "base_model.model." + name.removesuffix("weight")
            tensors[f"{key}lora_A.weight"] = 0.3 * torch.randn(lora.rank, shape[1], generator=draw)
            tensors[f"{key}lora_B.weight"] = 0.1 * torch.randn(shape[0], lora.rank, generator=draw)
    return tensors

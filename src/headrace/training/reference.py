"""A policy that is not trained, beside the one that is: log-probs of the same tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.records import Batch
from headrace.scoring import compared
from headrace.training.backends.base import Backend, open_backend
from headrace.training.config import ReferenceConfig, TrainingConfig
from headrace.training.losses.kl import kl_estimate
from headrace.training.packing import Packed, TrainingSequence


class Reference:
    """The model that a run began with, or another with the same tokenizer."""

    def __init__(self, config: TrainingConfig, backend: Backend, *, model: str | Path):
        """`model` is the run's. Where an adapter is trained over it, its frozen weights are the trainer's own."""
        assert config.reference is not None
        folder = config.reference.model
        self._trained = backend if folder is None and config.lora is not None else None
        self._frozen = backend
        if self._trained is None:
            self._frozen = open_backend(folder or model, msgspec.structs.replace(config, lora=None), frozen=True)
        if self._frozen.vocab_size < backend.vocab_size:
            raise ConfigError(
                "a reference policy has a probability for every token that the policy can sample",
                f"{self._frozen.vocab_size} tokens in {folder}, {backend.vocab_size} in the policy",
                "name a training.reference.model with at least as large a vocabulary",
            )

    @torch.no_grad()
    def logprobs(self, packed: Packed) -> Tensor:
        """(n,) of the trained tokens, under each one's temperature and support."""
        if self._trained is None:
            return self._frozen.token_logprobs(packed)[0]
        with self._trained.without_adapter():
            return self._trained.token_logprobs(packed)[0]


def with_prices(
    batch: Batch, sequences: list[TrainingSequence], config: TrainingConfig
) -> tuple[Batch, list[TrainingSequence]]:
    """With the advantages of rewards less the price of what was sampled far from the reference. The rewards, in
    metrics and records, stay those that the scorer gave."""
    assert config.reference is not None
    price = dict.fromkeys((episode.id for episode in batch.episodes), 0.0)
    for sequence in sequences:
        price[sequence.episode] += _price(sequence, config.reference)
    less = [
        msgspec.structs.replace(
            group,
            episodes=tuple(
                e.with_(reward=None if e.reward is None else e.reward - price[e.id]) for e in group.episodes
            ),
        )
        for group in batch.groups
    ]
    found = compared(less, config.comparison)
    by_episode = dict(zip(price, found.tolist(), strict=True))
    moved = [sequence._replace(advantage=by_episode[sequence.episode]) for sequence in sequences]
    return msgspec.structs.replace(batch, advantages=found), moved


def _price(sequence: TrainingSequence, config: ReferenceConfig) -> float:
    assert sequence.reference is not None
    chosen = [turn for turn, flag in zip(sequence.turns, sequence.trained, strict=True) if flag]
    sampled = np.concatenate([turn.logprobs for turn in chosen]).astype(np.float64)
    distance_n = kl_estimate(torch.from_numpy(sampled - sequence.reference), config.estimator)
    return config.coefficient * float(distance_n.sum())

"""`headrace bench mask`: what the recorded sampling mask is worth, at lag 0.

The same weights sample by the native engine, truncated, and are asked by the trainer for the log-probs of what was
sampled: over the recorded support, and over the whole vocabulary, as a trainer does that has no mask. Without a
difference of weights every ratio should be 1.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.bench import result
from headrace.errors import HeadraceError
from headrace.records import Sampling

WORDS, HIDDEN, LAYERS, PROMPT = 512, 64, 2, 16
TARGET_NATS, LEAST_NATS, MOST_NATS = 1.0, 0.5, 1.5
"""Mean entropy of the next token, before truncation."""
BAND = 0.9, 1.1
KINDS = {
    "top-p 0.8": Sampling(top_p=0.8),
    "top-k 8": Sampling(top_k=8),
    "min-p 0.1": Sampling(min_p=0.1),
    "top-p 0.9, top-k 16, min-p 0.05, temperature 0.9": Sampling(top_p=0.9, top_k=16, min_p=0.05, temperature=0.9),
}
HEADLINE = "top-p 0.8"


def run(sequences: int = 64, length: int = 64, seed: int = 0) -> dict[str, Any]:
    """On the CPU, in float32: random weights whose final norm is scaled until the entropy is about one nat."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch) / "model"
        _make_model(folder, seed)
        rows = [_row(folder, kind, sequences, length, seed) for kind in KINDS]
    figures = {
        "mask_outlier_frac_without": next(row for row in rows if row["sampling"] == HEADLINE)["outliers_without"],
        "mask_log_ratio_max_with": max(row["log_ratio_max_with"] for row in rows),
    }
    return result("mask", rows, figures)


def _make_model(folder: Path, seed: int) -> None:
    import numpy as np
    import torch

    from headrace.bench.engine.agreement import scale_for_entropy
    from headrace.bench.small_model import small_config, write_tokenizer
    from headrace.models import random_model, save_model

    config = small_config(WORDS, HIDDEN, LAYERS, 512, initializer_range=HIDDEN**-0.5)
    model = random_model(config, seed).requires_grad_(False)
    prompts = list(np.random.default_rng(seed).integers(0, WORDS, (16, 4 * PROMPT)))
    model.model.norm.weight.mul_(torch.tensor(scale_for_entropy(model, prompts, TARGET_NATS)))
    folder.mkdir()
    save_model(model, config, folder)
    write_tokenizer(folder, WORDS)


def _row(folder: Path, kind: str, sequences: int, length: int, seed: int) -> dict[str, Any]:
    import numpy as np
    import torch

    from headrace.training.backends.base import open_backend
    from headrace.training.config import TrainingConfig
    from headrace.training.packing import pack

    packed = pack(_sampled(folder, KINDS[kind], sequences, length, seed))
    trainer = open_backend(folder, TrainingConfig(device="cpu"))
    with torch.no_grad():
        with_mask, _ = trainer.token_logprobs(packed)
        plain = replace(packed, support=None)
        without, _ = trainer.token_logprobs(plain)
        _, entropy = trainer.token_logprobs(replace(plain, temperatures_n=np.ones_like(packed.temperatures_n)))
    nats = float(entropy.mean())
    if not LEAST_NATS <= nats <= MOST_NATS:
        raise HeadraceError(
            f"the model's mean entropy is {LEAST_NATS} to {MOST_NATS} nats", nats, "take another seed"
        )
    ratios = np.exp(without.double().numpy() - packed.behaviour_n)
    return {
        "sampling": kind,
        "tokens": len(packed.targets_n),
        "entropy_nats": nats,
        "outliers_without": float(np.mean((ratios < BAND[0]) | (ratios > BAND[1]))),
        "ratio_mean_without": float(ratios.mean()),
        "log_ratio_max_with": float(np.abs(with_mask.double().numpy() - packed.behaviour_n).max()),
    }


def _sampled(folder: Path, sampling: Sampling, sequences: int, length: int, seed: int) -> list[Any]:
    """What the engine samples, as the trainer gets it."""
    import numpy as np

    from headrace.engine.base import SampleRequest
    from headrace.engine.config import NativeEngineConfig
    from headrace.engine.native import NativeEngine
    from headrace.models import load_model
    from headrace.records import Batch, Episode, Group, Task
    from headrace.training.packing import training_sequences

    context = PROMPT + length
    config = NativeEngineConfig(
        device="cpu", dtype="float32", max_running=sequences, max_context=context, cache_tokens=sequences * context
    )
    engine = NativeEngine(load_model(folder), config, version=0)
    dice = np.random.default_rng(seed + 1)
    for number in range(sequences):
        prompt = dice.integers(0, WORDS, PROMPT).astype(np.int32)
        engine.add(SampleRequest(id=number, context=prompt, max_tokens=length, sampling=sampling, seed=number))
    turns = []
    while engine.has_work:
        turns += engine.step()
    task = Task(id="mask", prompt="")
    episodes = tuple(
        Episode(id=str(number), task=task, turns=(turn,), reward=0.0) for number, turn in sorted(turns)
    )
    group = Group(id="mask", sequence=0, task=task, episodes=episodes)
    batch = Batch(step=1, version=0, groups=(group,), advantages=np.ones(len(episodes), np.float32))
    return training_sequences(batch)

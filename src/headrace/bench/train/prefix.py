"""Groups behind long prompts: whole training steps with their prefix trees and without, in turns."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.bench.batches import random_batch, random_tokens
from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.bench.small_model import small_config
from headrace.models import ModelConfig, random_model, save_model
from headrace.records import Batch
from headrace.training.backends.native import NativeBackend
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

ROUNDS = 3
MANY = 8
"""Groups that fill a GPU; with one alone, a shared step's time is that of its launches."""
SMALL = small_config(words=2048, hidden=256, layers=4, max_positions=4096)


@dataclass(frozen=True)
class Work:
    groups: int = 1
    episodes: int = 8
    """Of each group."""
    prompt: int = 2048
    completion: int = 256


def measure(device: str, *, work: Work | None = None, rounds: int = ROUNDS, seed: int = 0) -> dict[str, Any]:
    work, place = work or Work(), drive.device_of(device)
    on_gpu = place.type == "cuda"
    shape = config_of("0.6b") if on_gpu else SMALL
    batch = _batch(work, shape.vocab_size, seed)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        _write_model(Path(scratch), shape, place, seed)
        shared_rows, gradient = _pass(_backend(Path(scratch), place, True), batch, work.episodes)
        rows, unshared_gradient = _pass(_backend(Path(scratch), place, False), batch, work.episodes)
        difference = float((gradient - unshared_gradient).norm() / unshared_gradient.norm())
        del gradient, unshared_gradient
        drive.free_memory()
        trainers = {share: _trainer(Path(scratch), place, work, share) for share in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for share, trainer in trainers.items():
            report = trainer.train(msgspec.structs.replace(batch, step=number + 1, version=number))
            seconds[share].append(report.seconds)
    # The first of each warms up.
    shared, unshared = (statistics.median(seconds[share][1:]) for share in (True, False))
    return drive.kept(
        {
            "part": "prefix tree",
            "device": place.type,
            "parameters": sum(p.numel() for p in trainers[True].tensors().values()),
            "groups": work.groups,
            "episodes": work.episodes,
            "prompt": work.prompt,
            "completion": work.completion,
            "tokens_unshared": rows,
            "tokens_shared": shared_rows,
            "token_saving": rows / shared_rows,
            "step_ms_unshared": 1e3 * unshared,
            "step_ms_shared": 1e3 * shared,
            "speedup": unshared / shared,
            "gradient_difference": difference,
        }
    )


def _batch(work: Work, vocabulary: int, seed: int) -> Batch:
    dice = np.random.default_rng(seed)
    prompts = [random_tokens(dice, vocabulary, work.prompt) for _ in range(work.groups)]
    return random_batch(dice, vocabulary, [[(prompt, work.completion)] * work.episodes for prompt in prompts])


def _write_model(folder: Path, shape: ModelConfig, place: torch.device, seed: int) -> None:
    model = random_weights(shape, place, seed) if place.type == "cuda" else random_model(shape, seed)
    save_model(model, shape, folder)


def _backend(folder: Path, place: torch.device, share: bool) -> NativeBackend:
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return NativeBackend(folder, dtype=dtype, device=place, share_prefixes=share)


def _trainer(folder: Path, place: torch.device, work: Work, share: bool) -> LocalTrainer:
    config = TrainingConfig(
        device="cuda" if place.type == "cuda" else "cpu",
        dtype="bfloat16" if place.type == "cuda" else "float32",
        # A rate at which the second step's batch is still within reason.
        optimizer=OptimizerConfig(learning_rate=1e-7),
        micro_batch_tokens=work.episodes * (work.prompt + work.completion),
        share_prefixes=share,
    )
    return LocalTrainer(config, model=folder)


def _pass(backend: NativeBackend, batch: Batch, episodes: int) -> tuple[int, torch.Tensor]:
    """(rows that enter the model, gradient of its log-probs' weighted sum as one vector), group after group."""
    rows: list[int] = []

    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            rows.append(args[0].numel())

    sequences = training_sequences(batch)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        for first in range(0, len(sequences), episodes):
            packed = pack(sequences[first : first + episodes])
            logprobs_n, _ = backend.token_logprobs(packed)
            (logprobs_n * torch.from_numpy(packed.advantages_n).to(logprobs_n)).sum().backward()
    finally:
        hook.remove()
    found = [p.grad.flatten().float() for p in backend.parameters().values() if p.grad is not None]
    return sum(rows), torch.cat(found)

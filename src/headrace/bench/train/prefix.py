"""Groups behind long prompts: whole training steps with their prefix trees and without."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from headrace.bench.batches import random_batch, random_tokens
from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.bench.small_model import small_config
from headrace.bench.train.speed import LORA
from headrace.models import ModelConfig, parameter_count, random_model, save_model
from headrace.records import Batch
from headrace.training.backends.base import Backend, open_backend
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

ROUNDS = 3
SMALL = small_config(words=2048, hidden=256, layers=4, max_positions=4096)


@dataclass(frozen=True)
class Work:
    groups: int = 1
    episodes: int = 8
    """Of each group."""
    prompt: int = 2048
    completion: int = 256


MANY = Work(groups=8)
"""Fill a GPU with a small model; with one group alone, a shared step's time is that of its launches."""


def measure(
    device: str,
    *,
    work: Work | None = None,
    shape: str = "0.6b",
    rounds: int = ROUNDS,
    kernels: Literal["fused", "reference"] = "fused",
    seed: int = 0,
) -> dict[str, Any]:
    """A row. The shape is a GPU's; elsewhere the model is `SMALL`."""
    work, place = work or Work(), drive.device_of(device)
    on_gpu = place.type == "cuda"
    config, lora = (config_of(shape), LORA.get(shape)) if on_gpu else (SMALL, None)
    batch = _batch(work, config.vocab_size, seed)
    rows: dict[bool, int] = {}
    gradients: dict[bool, torch.Tensor] = {}
    seconds: dict[bool, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch)
        _write_model(folder, config, place, seed)
        drive.free_memory()
        # One after the other: activations of two passes may be more than the device has.
        for share in (True, False):
            how = _training(place, work, share, lora, kernels)
            rows[share], gradients[share] = _pass(open_backend(folder, how), batch, work.episodes)
            drive.free_memory()
            seconds[share] = _step_seconds(LocalTrainer(how, model=folder), batch, rounds)
            drive.free_memory()
    return drive.kept(
        {
            "part": "prefix tree",
            "device": place.type,
            "parameters": parameter_count(config),
            "trains": "all" if lora is None else f"LoRA, rank {lora.rank}",
            "groups": work.groups,
            "episodes": work.episodes,
            "prompt": work.prompt,
            "completion": work.completion,
            "tokens_unshared": rows[False],
            "tokens_shared": rows[True],
            "token_saving": rows[False] / rows[True],
            "step_ms_unshared": 1e3 * seconds[False],
            "step_ms_shared": 1e3 * seconds[True],
            "speedup": seconds[False] / seconds[True],
            "gradient_difference": float((gradients[True] - gradients[False]).norm() / gradients[False].norm()),
        }
    )


def _step_seconds(trainer: LocalTrainer, batch: Batch, rounds: int) -> float:
    """Of a step; the first warms up."""
    reports = [trainer.train(msgspec.structs.replace(batch, step=n + 1, version=n)) for n in range(rounds + 1)]
    return statistics.median(report.seconds for report in reports[1:])


def _batch(work: Work, vocabulary: int, seed: int) -> Batch:
    dice = np.random.default_rng(seed)
    prompts = [random_tokens(dice, vocabulary, work.prompt) for _ in range(work.groups)]
    return random_batch(dice, vocabulary, [[(prompt, work.completion)] * work.episodes for prompt in prompts])


def _write_model(folder: Path, shape: ModelConfig, place: torch.device, seed: int) -> None:
    model = random_weights(shape, place, seed) if place.type == "cuda" else random_model(shape, seed)
    save_model(model, shape, folder)


def _training(
    place: torch.device, work: Work, share: bool, lora: LoraConfig | None, kernels: Literal["fused", "reference"]
) -> TrainingConfig:
    on_gpu = place.type == "cuda"
    return TrainingConfig(
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        # A rate at which the second step's batch is still within reason.
        optimizer=OptimizerConfig(learning_rate=1e-7),
        micro_batch_tokens=work.episodes * (work.prompt + work.completion),
        share_prefixes=share,
        lora=lora,
        kernels=kernels,
    )


def _pass(backend: Backend, batch: Batch, episodes: int) -> tuple[int, torch.Tensor]:
    """(rows that enter the model, gradient of its log-probs' weighted sum as one vector), group after group."""
    rows: list[int] = []

    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            rows.append(args[0].numel())

    parameters = backend.parameters().values()
    for parameter in parameters:
        # There from the beginning, as an optimizer has it: kernels add to it.
        parameter.grad = torch.zeros_like(parameter)
    sequences = training_sequences(batch)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        for first in range(0, len(sequences), episodes):
            packed = pack(sequences[first : first + episodes])
            logprobs_n, _ = backend.token_logprobs(packed)
            (logprobs_n * torch.from_numpy(packed.advantages_n).to(logprobs_n)).sum().backward()
    finally:
        hook.remove()
    found = [p.grad.flatten() for p in parameters if p.grad is not None]
    return sum(rows), torch.cat(found)

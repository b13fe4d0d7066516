"""Whole training steps of a packed batch: how much of the device's arithmetic they use, beside `transformers`.

Model FLOPs are 6 · N for each token of full training and 4 · N where an adapter is trained, N being the model's
parameters; what attention takes, and what is computed again, counts for nothing. The head counts for all tokens,
though ours runs over those that are trained alone; `transformers` with its own loss computes it for all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.bench.batches import random_batch, random_tokens
from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.models import ModelConfig, parameter_count, save_model
from headrace.records import Batch
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig
from headrace.training.trainer import LocalTrainer

PEAK_FLOPS = 990e12
"""Of an H200 in bfloat16, as its data sheet has it."""


@dataclass(frozen=True)
class Work:
    sequences: int = 16
    """Of a micro-batch."""
    prompt: int = 256
    completion: int = 768
    micro_batches: int = 8
    steps: int = 4
    """Timed, after two that are not."""

    @property
    def tokens(self) -> int:
        """That go through the model in a step."""
        return self.micro_batches * self.sequences * (self.prompt + self.completion - 1)


TINY = Work(sequences=2, prompt=8, completion=8, micro_batches=2, steps=20)
LORA = {"8b": LoraConfig(rank=32)}
"""Shapes whose optimizer's state would not fit beside their weights."""


def measure(
    shape: str, device: str, *, work: Work | None = None, peer: bool = True, **settings: Any
) -> dict[str, Any]:
    """A row. `settings` are further fields of the trainer's configuration."""
    place, config = drive.device_of(device), config_of(shape)
    work = work or (Work() if place.type == "cuda" else TINY)
    lora = LORA.get(shape)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch)
        save_model(random_weights(config, place), config, folder)
        drive.free_memory()
        row = _ours(folder, config, place, work, lora, settings)
        drive.free_memory()
        theirs = _transformers(folder, config, place, work) if peer and lora is None else {}
        drive.free_memory()
    row = {"part": "step", "shape": shape, "trains": "all" if lora is None else f"LoRA, rank {lora.rank}", **row}
    if theirs:
        row |= {f"transformers_{name}": value for name, value in theirs.items()}
        row["over_transformers"] = theirs["step_ms"] / row["step_ms"]
    return drive.kept(row)


def _ours(
    folder: Path,
    model: ModelConfig,
    place: torch.device,
    work: Work,
    lora: LoraConfig | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    config = TrainingConfig(
        device="cuda" if place.type == "cuda" else "cpu",
        dtype="bfloat16",
        optimizer=OptimizerConfig(learning_rate=1e-7),
        micro_batch_tokens=work.tokens // work.micro_batches,
        share_prefixes=False,
        lora=lora,
        **settings,
    )
    trainer, batch = LocalTrainer(config, model=folder), _batch(work, model.vocab_size)

    def step(number: int) -> None:
        trainer.train(msgspec.structs.replace(batch, step=number + 1, version=number))

    return _timed(step, work, place, (6 if lora is None else 4) * parameter_count(model))


def _transformers(folder: Path, model: ModelConfig, place: torch.device, work: Work) -> dict[str, Any]:
    """The same tokens through the library's own model, eagerly, with its own loss."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)
    peer = loaded.to(place)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-7, fused=True)
    dice = torch.Generator().manual_seed(0)
    shape = work.sequences, work.prompt + work.completion - 1
    tokens = torch.randint(0, model.vocab_size, shape, generator=dice).to(place)
    labels = tokens.clone()
    labels[:, : work.prompt] = -100

    def step(number: int) -> None:
        for _ in range(work.micro_batches):
            (peer(input_ids=tokens, labels=labels, use_cache=False).loss / work.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step, work, place, 6 * parameter_count(model))


def _timed(step: Callable[[int], None], work: Work, place: torch.device, flops_per_token: int) -> dict[str, Any]:
    on_gpu = place.type == "cuda"

    def settled() -> float:
        if on_gpu:
            torch.cuda.synchronize(place)
        return time.perf_counter()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    for number in range(2):
        step(number)
    begun = settled()
    for number in range(2, 2 + work.steps):
        step(number)
    seconds = (settled() - begun) / work.steps
    flops = flops_per_token * work.tokens / seconds
    return {
        "tokens": work.tokens,
        "step_ms": 1e3 * seconds,
        "tok_s": work.tokens / seconds,
        "tflops": flops / 1e12,
        "mfu": flops / PEAK_FLOPS if on_gpu else None,
        "peak_gib": torch.cuda.max_memory_allocated(place) / 2**30 if on_gpu else None,
    }


def _batch(work: Work, vocabulary: int) -> Batch:
    """Groups of one episode: no two sequences begin alike."""
    dice = np.random.default_rng(0)
    count = work.micro_batches * work.sequences
    prompts = [random_tokens(dice, vocabulary, work.prompt) for _ in range(count)]
    return random_batch(dice, vocabulary, [[(prompt, work.completion)] for prompt in prompts])

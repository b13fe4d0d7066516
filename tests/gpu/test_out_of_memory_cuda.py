"""Another process takes the card's memory away: the trainer's step and the engine's turns go on without it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import finish, request
from training_builders import random_batch

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, random_model, save_model
from headrace.training.config import TrainingConfig
from headrace.training.trainer import LocalTrainer

pytestmark = pytest.mark.gpu

BALLOON = """
import sys, torch
left = int(sys.argv[1])
held = []
for piece in (2**30, 2**26, 2**21):
    while torch.cuda.mem_get_info()[0] > left + piece:
        held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
print("full", flush=True)
sys.stdin.read()
"""
# 3 GiB of float32 logits for 16,384 trained tokens.
SHAPE = ModelConfig(
    family="qwen3",
    vocab_size=50_000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    qk_norm=True,
    tie_embeddings=True,
)


@contextmanager
def balloon(left: int) -> Iterator[None]:
    """A process that holds all of the card's free memory but `left` bytes."""
    torch.cuda.empty_cache()
    command = [sys.executable, "-c", BALLOON, str(left)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
    time.sleep(0.5)  # the driver takes its memory back


def long_batch() -> Any:
    """Some 12,000 trained tokens."""
    return random_batch(3, episodes=2000, group_size=4, vocab=SHAPE.vocab_size)


def test_a_training_step_beside_a_balloon_is_the_step_without_it(tmp_path: Path) -> None:
    save_model(random_model(SHAPE, 0), SHAPE, tmp_path)
    config = TrainingConfig(device="cuda", dtype="bfloat16")
    alone, squeezed = LocalTrainer(config, model=tmp_path), LocalTrainer(config, model=tmp_path)
    events: list[Any] = []
    squeezed.on_event = lambda kind, fields: events.append((kind, fields))
    batch = long_batch()
    expected = alone.train(batch).metrics
    del alone
    with balloon(2**30):
        found = squeezed.train(batch).metrics
    assert events
    assert events[-1][1]["micro_batch_tokens"] < 16_384
    for name in ("loss", "grad_norm", "entropy", "kl"):
        assert found[name] == pytest.approx(expected[name], rel=0.02, abs=1e-3), name


def test_an_engine_beside_a_balloon_gives_cache_back_and_goes_on() -> None:
    config = NativeEngineConfig(
        device="cuda", dtype="float32", max_context=2048, max_running=64, cache_tokens=2**20, prefill_tokens=65_536
    )
    engine = NativeEngine(random_model(SHAPE, 0, device="cuda"), config, version=0)
    events: list[Any] = []
    engine.on_event = lambda kind, fields: events.append((kind, fields))
    for number in range(64):
        engine.add(request(number, [(7 * i + number) % SHAPE.vocab_size for i in range(1500)], 12))
    with balloon(64 * 2**20):
        turns = finish(engine)
    assert len(turns) == 64
    assert events
    assert engine.pages_total * 64 < 2**20
    assert {len(turn.tokens) for turn in turns.values()} == {12}

"""Training on a GPU: kernels with a backward pass, teachers, several updates, and exactness through a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_builders import batch_of, random_batch, tiny_model

from headrace.bench.batches import random_batch as bench_batch
from headrace.bench.batches import random_tokens
from headrace.records import Batch
from headrace.training.backends.native import NativeBackend
from headrace.training.config import (
    DistillationConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    TrainingConfig,
)
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4000, "initializer_range": 0.05,
    "max_position_embeddings": 512,
}  # fmt: skip


def named(batch: Batch, version: int = 0) -> Batch:
    episodes = [e.with_(id=f"e{i}") for i, e in enumerate(batch.episodes)]
    return batch_of(episodes, batch.advantages.tolist(), version=version, group_size=4)


def trainer(folder: Path, **settings: Any) -> LocalTrainer:
    config = TrainingConfig(device="cuda", optimizer=OptimizerConfig(learning_rate=1e-3), **settings)
    return LocalTrainer(config, model=folder)


def gradients(folder: Path, packed, **settings: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from headrace.models import TrainedOps

    ops = TrainedOps() if settings.pop("fused", False) else None
    backend = NativeBackend(folder, device="cuda", ops=ops, **settings)
    logprobs, entropy = backend.token_logprobs(packed)
    ((logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum() + 0.1 * entropy.sum()).backward()
    return logprobs.detach(), {name: p.grad for name, p in backend.parameters().items()}  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_fused_kernels_train_as_the_reference_does(tmp_path: Path, dtype: torch.dtype, lora) -> None:
    """Each way's distance from float32 is what counts in bfloat16: the two round at other places."""
    folder = tiny_model(tmp_path, "qwen3", **SHAPE)
    packed = pack(training_sequences(named(random_batch(0, episodes=64, vocab=4000))))
    exact, of_exact = gradients(folder, packed, lora=lora)
    found, of_found = gradients(folder, packed, lora=lora, dtype=dtype, fused=True)
    plain, of_plain = gradients(folder, packed, lora=lora, dtype=dtype)

    def away(one: dict[str, torch.Tensor]) -> float:
        parts = [(one[name] - exact).norm() / (exact.norm() + 1e-12) for name, exact in of_exact.items()]
        return float(torch.stack(parts).mean())

    if dtype == torch.float32:
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
        assert away(of_found) < 1e-3
    else:
        assert (found - exact).abs().mean() < 1.5 * (plain - exact).abs().mean() + 1e-3
        assert away(of_found) < 1.5 * away(of_plain) + 1e-3


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_teachers_references_and_several_updates_run_there(tmp_path: Path, kernels: str, dtype: str) -> None:
    mine, other = (
        tiny_model(tmp_path / "mine", "qwen3", **SHAPE),
        tiny_model(tmp_path / "other", "qwen3", 3, **SHAPE),
    )
    owner = trainer(
        mine,
        kernels=kernels,
        dtype=dtype,
        epochs=2,
        minibatches=2,
        recompute=True,
        reference=ReferenceConfig(coefficient=0.01),
        distillation=DistillationConfig(teacher=str(other), rewards=True),
    )
    found = [owner.train(named(random_batch(0, vocab=4000), version)).metrics for version in range(6)]
    assert found[0]["updates"] == 4
    assert found[-1]["teacher_divergence"] < found[0]["teacher_divergence"]
    assert all(np.isfinite(list(one.values())).all() for one in found)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_prompt_gives_the_same_gradients_there(tmp_path: Path, dtype: torch.dtype, fused: bool) -> None:
    """Eight completions of 256 tokens behind a prompt of 2,048, by layers as wide as those of 0.6 B parameters."""
    wide = {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 4096, "initializer_range": 0.02,
    }  # fmt: skip
    folder = tiny_model(tmp_path, "qwen3", **SHAPE | wide)
    dice = np.random.default_rng(0)
    packed = pack(training_sequences(bench_batch(dice, 4000, [[(random_tokens(dice, 4000, 2048), 256)] * 8])))
    exact = gradients(folder, packed, share_prefixes=False)[1]
    shared, whole = (
        gradients(folder, packed, share_prefixes=share, dtype=dtype, fused=fused)[1] for share in (True, False)
    )
    for name, gradient in exact.items():
        away, usual = (float((one[name] - gradient).norm() / gradient.norm()) for one in (shared, whole))
        print(f"{name}: {away:.2e} from float32, {usual:.2e} unshared")
        assert away < (1e-4 if dtype == torch.float32 else 1.5 * usual + 1e-3), name


def test_exactness_survives_fifty_steps(tmp_path: Path) -> None:
    """At lag 0 the trainer's log-probs are the engine's, bit for bit, in every step."""

    def run(*words: str) -> None:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr

    run("examples/quickstart/prepare.py", str(tmp_path / "model"))
    sets = (
        f"model.path={tmp_path / 'model'}", "training.steps=50", "buffer.max_staleness=0", "engine.numerics=exact",
        "training.numerics=exact", "engine.device=cuda", "training.device=cuda",
    )  # fmt: skip
    words = [word for one in sets for word in ("--set", one)]
    quickstart = "examples/quickstart/quickstart.toml"
    run("-m", "headrace", "train", quickstart, "--run", str(tmp_path / "run"), *words)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 50
    assert {line["staleness_max"] for line in lines} == {0}
    assert {line["mismatch_kl"] for line in lines} == {0.0}
    assert {line["kl"] for line in lines} == {0.0}
    assert lines[-1]["reward_mean"] > lines[0]["reward_mean"]

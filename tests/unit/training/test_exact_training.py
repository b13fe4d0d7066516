from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from training_builders import batch_of, episode, tiny_model, turn

from headrace.errors import ConfigError
from headrace.training.backends.base import open_backend
from headrace.training.backends.shared_prefix import MIN_SAVING, prefix_tree
from headrace.training.config import TrainingConfig
from headrace.training.packing import Packed, pack, training_sequences

EXACT = TrainingConfig(device="cpu", numerics="exact")


def group_batches() -> tuple[Packed, list[Packed]]:
    """(a group with one prompt, its episodes one by one)."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 32, 20).astype(np.int32)
    episodes = [
        episode(turn(prompt, draw.integers(0, 32, draw.integers(1, 30)).astype(np.int32), temperature=heat))
        for heat in (1.0, 0.7, 1.3, 1.0, 0.7, 1.3)
    ]
    together = pack(training_sequences(batch_of(episodes, [1.0] * len(episodes))))
    return together, [pack(training_sequences(batch_of([one], [1.0]))) for one in episodes]


def test_an_exact_trainer_gives_an_episode_of_a_group_the_bits_it_has_alone(tmp_path: Path) -> None:
    backend = open_backend(tiny_model(tmp_path, "qwen3"), EXACT)
    together, alone = group_batches()
    assert prefix_tree(together.tokens_t, together.lengths_s).saving > MIN_SAVING
    with torch.no_grad():
        expected = torch.cat([backend.token_logprobs(one)[0] for one in alone])
        assert torch.equal(backend.token_logprobs(together)[0], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_gradients_are_those_of_a_fast_one_within_rounding(tmp_path: Path, dtype: str) -> None:
    folder, packed, results = tiny_model(tmp_path, "qwen3"), group_batches()[0], []
    for numerics in ("fast", "exact"):
        config = TrainingConfig(device="cpu", dtype=dtype, numerics=numerics)  # type: ignore[arg-type]
        backend = open_backend(folder, config)
        logprobs, _ = backend.token_logprobs(packed)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        results.append({name: p.grad for name, p in backend.parameters().items()})
    for name, expected in results[0].items():
        assert expected is not None
        apart = float((results[1][name] - expected).norm() / expected.norm())  # type: ignore[operator]
        assert apart < (1e-5 if dtype == "float32" else 0.05), name


def test_layers_computed_again_have_the_very_gradients(tmp_path: Path) -> None:
    folder, packed, results = tiny_model(tmp_path, "qwen3"), group_batches()[0], []
    for recompute in (False, True):
        backend = open_backend(folder, msgspec.structs.replace(EXACT, recompute=recompute))
        backend.token_logprobs(packed)[0].sum().backward()
        results.append({name: p.grad for name, p in backend.parameters().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_exact_numerics_need_the_native_definition_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r'needs training\.backend = "native"'):
        TrainingConfig(numerics="exact", backend="transformers").check()

"""Two minutes of pressure: 2,000 requests at a time against a cache that holds about fifty."""

from __future__ import annotations

import os

import pytest
from pressure import Pressure

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, random_model

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    qk_norm=True,
    initializer_range=0.1,
)
SECONDS = float(os.environ.get("HEADRACE_PRESSURE_S", "120"))


@pytest.mark.timeout(900)
def test_two_minutes_of_pressure_change_no_bit_and_lose_no_page(capsys):
    import torch

    def make(cache_tokens):
        config = NativeEngineConfig(
            device="cuda",
            dtype="bfloat16",
            numerics="exact",
            max_running=256,
            max_context=512,
            cache_tokens=cache_tokens,
            prefill_tokens=2048,
        )
        return NativeEngine(random_model(MODEL, 0, dtype=torch.bfloat16, device="cuda"), config, version=0)

    pressure = Pressure(make, MODEL.vocab_size, prompt=(8, 100), tokens=(4, 200))
    # About 150 tokens a sequence.
    pressure.run(requests=2000, cache_tokens=50 * 150, at_least_s=SECONDS)
    with capsys.disabled():
        print(
            f"\nforks {pressure.forks}, cancelled {pressure.cancelled}, swaps {pressure.swaps}, "
            f"preempted {pressure.preempted}"
        )
    assert min(pressure.forks, pressure.cancelled, pressure.swaps, pressure.preempted) >= 50

"""Eight ways on from position 8,000 of a 10,000-token sequence: no second prefill, no copied page."""

from __future__ import annotations

import numpy as np
import pytest
from engine_builders import finish

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, random_model

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    qk_norm=True,
    initializer_range=0.1,
)
LENGTH, AT, WAYS, NEW = 10_000, 8_000, 8, 64


@pytest.mark.parametrize("held", [False, True])
def test_eight_forks_pass_only_their_new_tokens_and_copy_no_page(held):
    config = NativeEngineConfig(device="cuda", dtype="float32", max_context=10_240, max_running=16)
    engine = NativeEngine(random_model(MODEL, 0, device="cuda"), config, version=0)
    context = np.random.default_rng(0).integers(0, 1024, LENGTH - 200).astype(np.int32)
    limit = 200 if held else 400
    engine.add(SampleRequest(id=0, context=context, max_tokens=limit, seed=1, hold=held))
    turns = {}
    while engine.has_work if held else engine.tokens_sampled < 200:
        turns.update(engine.step())
    engine._settle()
    passed, copied = engine.tokens_passed, engine.pages_copied
    for i in range(1, WAYS + 1):
        empty = np.empty(0, np.int32)
        engine.add(SampleRequest(id=i, context=empty, max_tokens=NEW, seed=i, fork_of=0, fork_at=AT))
    if not held:
        engine.cancel(0)
    turns |= finish(engine)
    # A step that was begun before the last one's outcome was known adds at most one token.
    assert engine.tokens_passed - passed <= WAYS * (NEW + 1)
    assert engine.pages_copied == copied
    model = random_model(MODEL, 0, device="cuda")
    for i in range(1, WAYS + 1):
        assert turns[i].context.tolist() == context[:AT].tolist()
        assert len(turns[i].tokens) == NEW
        replayed = replay_logprobs(lambda version: model, turns[i].context, turns[i])
        assert np.abs(replayed - turns[i].logprobs).max() < 1e-3

"""32K-token completions and a context of 200K tokens at the 0.6B shape, in the memory that was predicted."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from headrace.bench.engine.shapes import config_of, random_weights
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import parameter_count

pytestmark = pytest.mark.gpu

LONG, SHORT, COMPLETION, COUNT = 200_000, 128, 32_768, 7


@pytest.mark.timeout(600)
def test_long_outputs_and_a_long_context_finish_within_the_predicted_memory(capsys):
    shape = config_of("0.6b")
    cache_tokens = LONG + 128 + COUNT * (SHORT + COMPLETION + 64)
    config = NativeEngineConfig(
        device="cuda",
        dtype="bfloat16",
        max_running=COUNT + 1,
        max_context=LONG + 128,
        cache_tokens=cache_tokens,
        prefill_tokens=8192,
        standby=False,
    )
    torch.cuda.init()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    engine = NativeEngine(random_weights(shape, torch.device("cuda")), config, version=0)
    dice = np.random.default_rng(0)
    context = dice.integers(0, shape.vocab_size, LONG).astype(np.int32)
    engine.add(SampleRequest(id=0, context=context, max_tokens=64, seed=0))
    for i in range(1, COUNT + 1):
        prompt = dice.integers(0, shape.vocab_size, SHORT).astype(np.int32)
        engine.add(SampleRequest(id=i, context=prompt, max_tokens=COMPLETION, seed=i))
    turns, times = {}, {}
    began = last = time.perf_counter()
    while engine.has_work:
        turns.update(engine.step())
        if engine.steps % 2048 == 0:
            now = time.perf_counter()
            times[engine.steps], last = (now - last) / 2048, now
    seconds = time.perf_counter() - began
    assert len(turns[0].tokens) == 64
    assert all(len(turns[i].tokens) == COMPLETION for i in range(1, COUNT + 1))
    assert all(np.isfinite(turn.logprobs).all() for turn in turns.values())
    cache_bytes = cache_tokens * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2
    predicted = cache_bytes + 2 * parameter_count(shape)
    used = free - torch.cuda.mem_get_info()[0]
    with capsys.disabled():
        print(f"\n{seconds:.0f} s; {used / 2**30:.1f} GiB used, {predicted / 2**30:.1f} GiB predicted")
        print({step: f"{1e3 * each:.2f} ms" for step, each in times.items()})
    # Beside cache and weights: activations of one step, graphs, the rotation's table and the sampler's buffers.
    assert predicted <= used <= predicted + 6 * 2**30

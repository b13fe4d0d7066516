"""Adapters on a GPU: by kernels and graphs, against PEFT's model there; swapped under load, and through sleep."""

from __future__ import annotations

import statistics
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from adapter_builders import A, B, fill_adapter, peft_model
from engine_builders import finish
from gpu_builders import SMALL

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest, ScoreRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, random_model
from headrace.records import Turn
from headrace.sync.base import AdapterSpec

pytestmark = pytest.mark.gpu

NAMES = (None, "a", "b")
SPECS = {"a": A, "b": B}
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (0.04, 0.5)}
"""Mean and largest difference of a log-prob. In bfloat16 a scale that is no power of two is rounded with what it
multiplies, which PEFT does elsewhere."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOST_MS = 1.0


class Served:
    """An engine with both adapters at version 1, and PEFT's models of every version that it was given."""

    def __init__(self, dtype: str, shape: ModelConfig = SMALL, **settings):
        self.kind, self.shape = getattr(torch, dtype), shape
        self.models = {}
        # Pages have 64 tokens there, so a sequence takes two.
        defaults = {"max_context": 96, "max_running": 64, "cache_tokens": 64 * 128 + 1024}
        defaults |= {"max_adapters": 2, "max_adapter_rank": 8}
        config = NativeEngineConfig(device="cuda", dtype=dtype, **{**defaults, **settings})
        base = random_model(shape, seed=1000, dtype=self.kind, device="cuda")
        self.engine = NativeEngine(base, config, version=0)
        self.models[None, 0] = random_model(shape, seed=1000, dtype=self.kind, device="cuda")
        for name in SPECS:
            self.write(name, 1)
            self.engine.swap_adapter(name, 1)

    def write(self, name: str, version: int) -> None:
        """Into the adapter's standby buffers."""
        spec = SPECS[name]
        self.models[name, version] = peft_model(spec, version, shape=self.shape, dtype=self.kind, device="cuda")
        fill_adapter(self.engine, spec, self.models[name, version])
        torch.cuda.synchronize()

    def add(self, count: int, tokens: int) -> None:
        dice = np.random.default_rng(count)
        for i in range(count):
            context = dice.integers(0, self.shape.vocab_size, dice.integers(4, 24)).astype(np.int32)
            wanted = SampleRequest(id=i, context=context, max_tokens=tokens, seed=i, adapter=NAMES[i % 3])
            self.engine.add(wanted)

    def apart(self, turns: dict[int, Turn]) -> np.ndarray:
        """Every token's difference from what its lineage's models give."""
        found = []
        for turn in turns.values():
            models = {version: model for (name, version), model in self.models.items() if name == turn.adapter}
            found.append(np.abs(replay_logprobs(models.__getitem__, turn.context, turn) - turn.logprobs))
        return np.concatenate(found)


def agrees(apart: np.ndarray, dtype: str) -> bool:
    mean, most = LIMITS[dtype]
    print(f"{dtype}: mean {apart.mean():.2g}, at most {apart.max():.2g} of {len(apart)}")
    return bool(apart.mean() < mean and apart.max() < most)


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_batch_gives_the_log_probs_of_pefts_models(dtype, kernels, head_dim):
    served = Served(dtype, replace(SMALL, head_dim=head_dim), kernels=kernels)
    served.add(192, 60)
    turns = finish(served.engine)
    assert sum(len(turn.tokens) for turn in turns.values()) == 192 * 60
    for name in NAMES:
        assert agrees(served.apart({i: turn for i, turn in turns.items() if turn.adapter == name}), dtype)
    # An adapter matters: its tokens are far from what the base gives.
    wrong = [replay_logprobs(lambda _: served.models[None, 0], turns[1].context, turns[1]) - turns[1].logprobs]
    assert np.abs(wrong).max() > 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_those_that_sampling_recorded(dtype):
    served = Served(dtype, prefill_tokens=50)
    served.add(24, 40)
    turns = finish(served.engine)
    for id, turn in turns.items():
        wanted = ScoreRequest(id=id, context=turn.context, tokens=turn.tokens, adapter=turn.adapter)
        served.engine.score(wanted)
    scored = finish(served.engine)
    apart = np.concatenate([np.abs(scored[id].logprobs - turn.logprobs) for id, turn in turns.items()])
    assert agrees(apart, dtype)


@pytest.mark.parametrize("interrupt", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_replay_through_swaps_of_one_adapter_and_others_do_not_notice(dtype, interrupt):
    undisturbed = Served(dtype)
    undisturbed.add(64, 60)
    expected = finish(undisturbed.engine)
    served = Served(dtype)
    served.add(64, 60)
    turns: dict[int, Turn] = {}
    steps = 0
    while served.engine.has_work:
        turns.update(served.engine.step())
        steps += 1
        if steps in (12, 24, 36):
            version = served.engine.adapters["a"] + 1
            served.write("a", version)
            assert served.engine.swap_adapter("a", version, interrupt).running == 21
    assert agrees(served.apart(turns), dtype)
    for id, turn in turns.items():
        if turn.adapter == "a":
            assert set(turn.versions.tolist()) == {1, 2, 3, 4}
        else:
            assert len(turn.lineage) == 1
            if interrupt == "keep":
                assert turn.tokens.tolist() == expected[id].tokens.tolist()


def test_an_adapters_swap_under_load_takes_far_less_than_a_step(capsys):
    shape = ModelConfig(
        family="qwen3",
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
    )
    config = NativeEngineConfig(
        device="cuda", dtype="bfloat16", max_context=512, max_running=64, max_adapters=2, max_adapter_rank=16
    )
    engine = NativeEngine(random_model(shape, 0, dtype=torch.bfloat16, device="cuda"), config, version=0)
    every = AdapterSpec(name="a", rank=16, alpha=16.0, targets=PROJECTIONS)
    names, pauses, gaps = ("a", "a", "b", None), [], []

    def write(name: str) -> None:
        for buffer in engine.adapter_standby(msgspec.structs.replace(every, name=name)).values():
            buffer.normal_(0, 0.02)
        torch.cuda.synchronize()

    for name in SPECS:
        write(name)
        engine.swap_adapter(name, 1)
    for i in range(64):
        engine.add(SampleRequest(id=i, context=np.arange(9), max_tokens=400, seed=i, adapter=names[i % 4]))
    for _ in range(20):
        engine.step()
    for version in range(2, 12):
        write("a")
        for _ in range(10):
            engine.step()
        engine.device_gaps.clear()
        pauses.append(engine.swap_adapter("a", version, "keep").pause_s)
        for _ in range(5):
            engine.step()
        gaps.append(max(engine.device_gaps))
    assert engine.running == 64
    host, device = (1e3 * statistics.median(times) for times in (pauses, gaps))
    with capsys.disabled():
        print(f"\nhost pause {host:.3f} ms, at most {1e3 * max(pauses):.3f}; device stood still {device:.3f} ms")
    assert host < MOST_MS
    for id in range(64):
        turn = engine.cut(id)
        assert turn is not None
        assert len(set(turn.versions.tolist())) == (11 if names[id % 4] == "a" else 1)


@pytest.mark.parametrize("keep", [True, False])
def test_graphs_stay_valid_through_sleep_with_adapters(keep):
    served = Served("float32")
    served.add(48, 60)
    turns: dict[int, Turn] = {}
    for _ in range(20):
        turns.update(served.engine.step())
    before = torch.cuda.mem_get_info()[0]
    served.engine.sleep(keep_weights=keep)
    assert not served.engine._served.adapters._block.resident
    assert torch.cuda.mem_get_info()[0] > before
    if not keep:
        for name, buffer in served.engine.standby.items():
            buffer.copy_(dict(served.models[None, 0].named_parameters())[name])
        for name in SPECS:
            served.write(name, 1)
        torch.cuda.synchronize()
        served.engine.swap(0)
        for name in SPECS:
            served.engine.swap_adapter(name, 1)
    served.engine.wake()
    turns |= finish(served.engine)
    assert len(turns) == 48
    assert {event.cause for turn in turns.values() for event in turn.lineage} == {"start", "sleep"}
    assert agrees(served.apart(turns), "float32")

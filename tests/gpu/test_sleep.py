"""Sleep and wake on CUDA: memory really leaves, comes back at the same addresses, and graphs replay over it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_builders import all_free, finish
from gpu_builders import SMALL

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native import memory as memory_module
from headrace.engine.native.memory import Block
from headrace.engine.native.weights import Weights
from headrace.errors import HeadraceError
from headrace.models import CausalLM, ModelConfig, random_model
from headrace.records import Sampling, Turn

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MIB = 2**20
# 100 MiB of weights and 8 KiB of cache a token, in bfloat16
LARGER = ModelConfig(
    family="qwen3",
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    qk_norm=True,
)


@pytest.fixture(autouse=True, scope="module")
def kernels_loaded() -> None:
    """Their code takes memory at their first launch, which is not to be counted."""
    few = (torch.arange(1024, device="cuda") % 251).to(torch.uint8)
    few.fill_(3)
    assert int(few.sum()) == 3 * 1024


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def model_of(version: int, config: ModelConfig = SMALL, dtype: torch.dtype = torch.float32) -> CausalLM:
    return random_model(config, version, dtype=dtype, device="cuda")


def small_engine(**settings: object) -> NativeEngine:
    config = NativeEngineConfig(
        device="cuda", dtype="float32", max_context=128, max_running=32, prefill_tokens=256, **settings
    )
    return NativeEngine(model_of(0), config, version=0)


def larger_engine(standby: bool = True) -> NativeEngine:
    config = NativeEngineConfig(
        device="cuda", dtype="bfloat16", max_context=256, max_running=16, cache_tokens=65_536, standby=standby
    )
    return NativeEngine(model_of(0, LARGER, torch.bfloat16), config, version=0)


def wanted(count: int) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    return [
        SampleRequest(
            id=i,
            context=rng.integers(0, 512, rng.integers(4, 24)).astype(np.int32),
            max_tokens=60,
            seed=i,
            sampling=Sampling(top_p=0.9) if i % 4 == 3 else Sampling(),
        )
        for i in range(count)
    ]


def publish(engine: NativeEngine, version: int) -> None:
    """From a thread of its own, as a receiver does."""
    new = dict(model_of(version).named_parameters())

    def fill() -> None:
        for name, buffer in engine.standby.items():
            buffer.copy_(new[name].detach())
        torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    engine.swap(version)


def drive(engine: NativeEngine, naps: dict[int, tuple[bool, int | None]]) -> dict[int, Turn]:
    """Naps by step: whether weights are kept, and the version published meanwhile."""
    for one in wanted(64):
        engine.add(one)
    turns: dict[int, Turn] = {}
    step = 0
    while engine.has_work:
        if step in naps:
            keep_weights, version = naps[step]
            engine.sleep(keep_weights=keep_weights)
            assert (engine.running, engine.pages_free) == (0, engine.pages_total)
            if version is not None:
                publish(engine, version)
            engine.wake()
        turns.update(engine.step())
        step += 1
    assert len(turns) == 64
    return turns


def worst_replay(turns: dict[int, Turn], versions: int) -> float:
    models = [model_of(number) for number in range(versions)]
    return max(
        float(np.abs(replay_logprobs(models.__getitem__, turn.context, turn) - turn.logprobs).max())
        for turn in turns.values()
    )


def addresses(engine: NativeEngine) -> list[int]:
    cache = [tensor.data_ptr() for layer in range(SMALL.num_layers) for tensor in engine._kv.layer(layer)]
    live = [parameter.data_ptr() for parameter in engine._model.parameters()]
    return [*cache, *live, *(buffer.data_ptr() for buffer in engine.standby.values())]


# ── Blocks ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("piece", [2**30, 64 * MIB])
def test_a_block_gives_its_memory_back_and_has_it_again_at_the_same_address(monkeypatch, piece):
    monkeypatch.setattr(memory_module, "PIECE_BYTES", piece)
    size = 500 * MIB + 12
    before = free_bytes()
    block = Block(size, CUDA)
    assert abs(before - free_bytes()) < 8 * MIB
    block.restore()
    assert abs(before - free_bytes() - size) < 8 * MIB
    tensor = block.bytes
    assert (tensor.shape, tensor.dtype, tensor.device) == ((size,), torch.uint8, torch.device("cuda", 0))
    tensor.copy_(torch.arange(size, device="cuda") % 251)
    assert int(tensor[-1]) == (size - 1) % 251
    block.release()
    assert not block.resident
    assert abs(before - free_bytes()) < 8 * MIB
    block.restore()
    tensor.fill_(3)
    assert block.bytes.data_ptr() == tensor.data_ptr()
    assert int(tensor.sum(dtype=torch.int64)) == 3 * size


def test_a_block_lives_as_long_as_the_last_tensor_over_it():
    before = free_bytes()
    block = Block(256 * MIB, CUDA)
    block.restore()
    tensor = block.bytes[128 * MIB :]
    tensor.fill_(5)
    del block
    assert abs(before - free_bytes() - 256 * MIB) < 8 * MIB
    assert int(tensor.min()) == 5
    del tensor
    assert abs(before - free_bytes()) < 8 * MIB


def test_a_graph_replays_over_memory_that_left_and_came_back():
    block = Block(64 * MIB, CUDA)
    block.restore()
    numbers = block.bytes.view(torch.float32)
    numbers.fill_(1.0)
    out = torch.empty_like(numbers)
    torch.add(numbers, 1.0, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(numbers, 3.0, out=out)
    block.release()
    block.restore()
    numbers.copy_(torch.arange(len(numbers), device="cuda") % 1000)
    graph.replay()
    assert torch.equal(out, 3.0 * numbers)


def test_where_the_device_has_too_little_nothing_is_taken():
    block = Block(4096 * MIB, CUDA)
    hog = torch.empty(free_bytes() - 3072 * MIB, dtype=torch.uint8, device="cuda")
    free = free_bytes()
    with pytest.raises(HeadraceError, match=r"of 4\.00 GiB missing.*GiB free"):
        block.restore()
    assert abs(free_bytes() - free) < 8 * MIB
    del hog
    # Torch keeps what was freed; the block takes it.
    block.restore()
    assert block.resident


def test_parameters_move_in_with_little_memory_to_spare(monkeypatch):
    monkeypatch.setattr(memory_module, "PIECE_BYTES", 32 * MIB)
    model, expected = model_of(0, LARGER), model_of(0, LARGER)
    expected_values = {name: parameter.detach().cpu() for name, parameter in expected.named_parameters()}
    del expected
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 180 * MIB
    hog = torch.empty(free_bytes() - 110 * MIB, dtype=torch.uint8, device="cuda")
    weights = Weights(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().cpu(), expected_values[name]), name
    del hog, weights


# ── The engine ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("keep_weights", [True, False])
def test_log_probs_replay_and_nearly_all_tokens_are_those_of_an_undisturbed_run(keep_weights, kernels):
    undisturbed = drive(small_engine(kernels=kernels), {})
    engine = small_engine(kernels=kernels)
    version = None if keep_weights else 0
    before = addresses(engine)
    turns = drive(engine, dict.fromkeys((2, 20, 21, 60), (keep_weights, version)))
    assert addresses(engine) == before
    assert sum(event.cause == "sleep" for turn in turns.values() for event in turn.lineage) > 60
    assert worst_replay(turns, 1) < 1e-3
    same = [turn.tokens.tolist() == undisturbed[id].tokens.tolist() for id, turn in turns.items()]
    # Rounding differs between a token passed alone and in a chunk; where a draw falls on an edge it shows.
    assert np.mean(same) > 0.9
    assert all_free(engine)


def test_with_exact_numerics_a_nap_changes_no_bit():
    undisturbed = drive(small_engine(numerics="exact"), {})
    turns = drive(small_engine(numerics="exact"), {5: (True, None), 40: (False, 0)})
    for id, turn in turns.items():
        assert turn.tokens.tolist() == undisturbed[id].tokens.tolist()
        assert np.array_equal(turn.logprobs, undisturbed[id].logprobs)


def test_graphs_of_both_sets_of_weights_are_replayed_after_waking_and_not_captured_again():
    engine = small_engine()
    turns = drive(engine, {10: (True, None)})
    captured = dict(engine._runner._graphs)
    assert {side for side, *_ in captured} == {0, 1}
    again = drive(engine, {5: (True, 1), 25: (False, 2), 45: (True, 3)})
    assert all(engine._runner._graphs[key] is graph for key, graph in captured.items())
    assert {int(v) for turn in again.values() for v in turn.versions} == {0, 1, 2, 3}
    assert max(worst_replay(turns, 1), worst_replay(again, 4)) < 1e-3


@pytest.mark.parametrize("keep_weights", [True, False])
def test_the_memory_of_cache_and_weights_is_really_given_back(keep_weights):
    engine = larger_engine()
    weights = sum(parameter.nbytes for parameter in engine._model.parameters())
    cache = sum(tensor.nbytes for layer in range(LARGER.num_layers) for tensor in engine._kv.layer(layer))
    assert cache > 500 * MIB
    awake = free_bytes()
    engine.sleep(keep_weights=keep_weights)
    asleep = free_bytes()
    assert abs(asleep - awake - cache - 2 * weights) < 32 * MIB
    if not keep_weights:
        for name, buffer in engine.standby.items():
            buffer.copy_(dict(model_of(0, LARGER, torch.bfloat16).named_parameters())[name].detach())
        # The new version goes where it is served: one set is back, the other is not needed.
        assert abs(asleep - free_bytes() - weights) < 32 * MIB
        engine.swap(1)
    engine.wake()
    assert abs(asleep - free_bytes() - cache - weights) < 32 * MIB


def test_what_finds_no_memory_sleeps_on_until_there_is_some():
    engine = larger_engine(standby=False)
    engine.add(SampleRequest(id=0, context=np.arange(9), max_tokens=20, seed=1))
    for _ in range(5):
        engine.step()
    engine.sleep()
    hog = torch.empty(free_bytes() - 300 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(HeadraceError, match="let the trainer free its memory"):
        engine.wake()
    assert engine.asleep
    del hog
    engine.wake()
    turns = finish(engine)
    assert len(turns[0].tokens) == 20
    assert [event.cause for event in turns[0].lineage] == ["start", "sleep"]

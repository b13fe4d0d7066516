"""Small models of several versions, requests, and loops that drive a NativeEngine in tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import Interrupt, SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import CausalLM, ModelConfig, PackedContext, random_model
from headrace.records import Sampling, Turn

VOCAB = 32
TOLERANCE = 1e-4
"""Of a log-prob in float32, against one computed in another batch or order."""
# Weights large enough that the distributions are far from uniform and every version's is another.
MODEL = ModelConfig(
    family="qwen2",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    initializer_range=0.3,
)


@cache
def version_of(number: int) -> CausalLM:
    """The model that the tests publish as this version. Never handed to an engine itself."""
    return random_model(MODEL, seed=1000 + number)


def make_engine(
    version: int = 0, *, config: dict[str, Any] | None = None, device: str = "cpu", **options: Any
) -> NativeEngine:
    settings = {"max_running": 64, "max_context": 96, "page_size": 4, **(config or {})}
    model = random_model(MODEL, seed=1000 + version, device=device)
    return NativeEngine(model, NativeEngineConfig(**settings), version=version, **options)


def publish(engine: NativeEngine, version: int, kv: Interrupt) -> None:
    fill_standby(engine, version)
    engine.swap(version, kv)


def fill_standby(engine: NativeEngine, version: int) -> None:
    weights = dict(version_of(version).named_parameters())
    assert engine.standby.keys() == weights.keys()
    for name, buffer in engine.standby.items():
        buffer.copy_(weights[name].detach())


def request(id: int, context: Any = (1, 2, 3), max_tokens: int = 8, **fields: Any) -> SampleRequest:
    return SampleRequest(
        id=id, context=np.asarray(context), max_tokens=max_tokens, **{"seed": 77 * id + 5, **fields}
    )


def requests(count: int, seed: int, *, group: int = 4, tokens: tuple[int, int] = (20, 60)) -> list[SampleRequest]:
    """Groups of requests with one prompt each, of 3 to 30 tokens; the sampling differs within a group."""
    rng = np.random.default_rng(seed)
    made = []
    for first in range(0, count, group):
        context = rng.integers(0, VOCAB, rng.integers(3, 31))
        for i in range(first, min(first + group, count)):
            made.append(request(i, context, int(rng.integers(*tokens))))
    return made


TRUNCATING = (
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_k=12, top_p=0.95, min_p=0.05),
    Sampling(),
)


def with_samplings(made: list[SampleRequest]) -> list[SampleRequest]:
    return [
        request(r.id, r.context, r.max_tokens, sampling=TRUNCATING[i % len(TRUNCATING)]) for i, r in enumerate(made)
    ]


def drive(
    engine: NativeEngine, wanted: list[SampleRequest], between: Callable[[int], None] = lambda step: None
) -> dict[int, Turn]:
    """Add everything, then `finish`; every request has its turn."""
    for one in wanted:
        engine.add(one)
    turns = finish(engine, between)
    assert turns.keys() == {one.id for one in wanted}
    return turns


def finish(engine: NativeEngine, between: Callable[[int], None] = lambda step: None) -> dict[int, Turn]:
    """Step until nothing is left; `between` runs before every step. What ended meanwhile."""
    turns: dict[int, Turn] = {}
    step = 0
    while engine.has_work:
        between(step)
        turns.update(engine.step())
        step += 1
        assert step < 20_000, "the engine makes no progress"
    return turns


def all_free(engine: NativeEngine) -> bool:
    """Whether no page was lost, once all that is held for forks or kept for requests to come is let go."""
    for number in list(engine._scheduler.held):
        engine.release(number)
    engine.drop_prefixes()
    return engine.pages_free == engine.pages_total


def events(turn: Turn) -> list[tuple[int, int, str, str]]:
    """Its lineage, as (position, version, before, cause)."""
    return [(event.position, event.version, event.before, event.cause) for event in turn.lineage]


def worst_replay(turns: dict[int, Turn]) -> float:
    """Largest difference between a recorded log-prob and the one replayed from the record alone."""
    return max(
        float(np.abs(replay_logprobs(version_of, turn.context, turn) - turn.logprobs).max())
        for turn in turns.values()
    )


@torch.no_grad()
def plain_logprobs(model: CausalLM, turn: Turn) -> np.ndarray:
    """(T, V) log-softmax of the logits before each sampled token: one pass over the sequence, no cache."""
    sequence = torch.from_numpy(np.concatenate([turn.context, turn.tokens]).astype(np.int64))
    packed = PackedContext([len(sequence)])
    hidden = model(sequence, packed.positions, packed)[len(turn.context) - 1 : -1]
    return torch.log_softmax(model.logits(hidden) / (turn.sampling.temperature or 1.0), -1).numpy()

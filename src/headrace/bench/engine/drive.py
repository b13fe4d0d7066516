"""An engine under measurement: made, filled with requests that do not end, stepped, emptied."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.bench.engine.shapes import config_of, random_weights
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.errors import ConfigError, HeadraceError

WARMUP_STEPS = 16
"""Untimed steps after a fill: graphs are captured and caches are warm."""
FILL_STEPS = 256
"""Most tokens that a request may sample while others are still being prefilled."""
SPARE_TOKENS = 192
"""Room in the KV cache for each sequence beyond what it is meant to hold: a part of a page, and what the first to
be prefilled are ahead."""

_ids = itertools.count()


def say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed at once: a run that is cut short has still told what it measured."""
    say(json.dumps(row))
    return row


def device_of(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("a device is auto, cpu or cuda", name)
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def make_engine(
    shape: str,
    device: torch.device,
    *,
    running: int,
    context: int,
    cache_tokens: int,
    seed: int = 0,
    **settings: Any,
) -> NativeEngine:
    """An engine over random weights; `settings` are further fields of its configuration."""
    model = random_weights(config_of(shape), device, seed)
    config = NativeEngineConfig(
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="bfloat16",
        max_running=running,
        max_context=context,
        cache_tokens=max(cache_tokens, context),
        **settings,
    )
    return NativeEngine(model, config, version=0)


def free_memory() -> None:
    """Call it once nothing refers to an engine any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def random_prompts(rng: np.random.Generator, vocabulary: int, count: int, length: int) -> list[np.ndarray]:
    """Different from their first token on, so that no two share a prefix."""
    tokens = rng.integers(0, vocabulary, (count, length), dtype=np.int32)
    tokens[:, 0] = rng.choice(vocabulary, count, replace=False)
    return list(tokens)


def add(engine: NativeEngine, prompts: Iterable[np.ndarray], max_tokens: Iterable[int]) -> list[int]:
    """Queue a request for each prompt, with no stop tokens. Returns their ids, which are never used again."""
    ids = []
    for prompt, limit in zip(prompts, max_tokens, strict=True):
        number = next(_ids)
        engine.add(SampleRequest(id=number, context=prompt, max_tokens=limit, seed=number))
        ids.append(number)
    return ids


def fill(engine: NativeEngine, prompts: Sequence[np.ndarray], max_tokens: int) -> list[int]:
    """Add the prompts and step until all of them decode."""
    ids = add(engine, prompts, itertools.repeat(max_tokens, len(prompts)))
    step_until_decoding(engine, len(ids))
    return ids


def step_until_decoding(engine: NativeEngine, sequences: int) -> None:
    """Until a step prefilled nothing while so many sequences ran."""
    while True:
        before = engine.tokens_prefilled
        step(engine)
        if engine.running == sequences and engine.tokens_prefilled == before:
            return


def step(engine: NativeEngine) -> None:
    ended = engine.step()
    if ended:
        raise HeadraceError("no request ends while steps are timed", len(ended), "give the KV cache more room")


def seconds_per_step(engine: NativeEngine, steps: int, warmup: int = WARMUP_STEPS) -> float:
    """Wall clock, with all that `step` does, over steps in which every running sequence gains one token."""
    for _ in range(warmup):
        step(engine)
    engine.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step(engine)
    engine.synchronize()
    return (time.perf_counter() - began) / steps


def finish(engine: NativeEngine) -> int:
    """Step until every request has ended. Returns how many tokens they sampled."""
    tokens = 0
    while engine.has_work:
        tokens += sum(len(turn.tokens) for _, turn in engine.step())
    engine.synchronize()
    return tokens


def cut(engine: NativeEngine, ids: Iterable[int]) -> float:
    """End these requests. Returns how many positions their last steps attended to, on average."""
    turns = [engine.cut(number) for number in ids]
    return float(np.mean([len(turn.context) + len(turn.tokens) - 1 for turn in turns if turn is not None]))

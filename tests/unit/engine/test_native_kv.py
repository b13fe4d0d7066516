"""The cache's memory: copies of pages, and what others left beyond a sequence's end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_builders import (
    MODEL,
    TOLERANCE,
    all_free,
    drive,
    finish,
    make_engine,
    publish,
    request,
    requests,
    worst_replay,
)
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.engine.base import ScoreRequest
from headrace.engine.native import NativeEngine, kv
from headrace.engine.native.attention import DecodeContext, SuffixContext
from headrace.engine.native.kv import FLOAT8, KvCache

CPU = torch.device("cpu")
PAGE_BYTES = KvCache.bytes_per_token(MODEL, torch.float32) * 4
"""Of all layers."""


class Calls(TorchDispatchMode):
    """Names of the operations, and the largest tensor that any but a view returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] == "index_select":
            self.largest = max(self.largest, out.nbytes)
        return out


# ── Copies ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", [torch.float32, FLOAT8])
@pytest.mark.parametrize("pages", [1, 2, 3, 1000])
def test_pages_are_copied_with_a_temporary_of_bounded_size(monkeypatch, stored, pages):
    size = stored.itemsize * PAGE_BYTES // 4
    monkeypatch.setattr(kv, "MOST_COPIED_BYTES", pages * size)
    cache = KvCache(MODEL, 24, 4, torch.float32, CPU, stored)
    cache._raw.copy_(torch.arange(cache._raw.numel()).view_as(cache._raw) % 251)
    before = cache._raw.clone()
    sources, targets = [3, 9, 3, 20, 11, 5, 3], [0, 2, 23, 4, 7, 6, 1]
    with Calls() as calls:
        cache.copy(sources, targets)
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, :, :, target] = before[:, :, :, source]
    assert torch.equal(cache._raw, expected)
    assert calls.largest == min(pages, 7) * size
    assert calls.names.count("index_copy_") == -(-7 // pages)


def test_a_page_that_is_larger_than_the_bound_is_copied_by_itself(monkeypatch):
    monkeypatch.setattr(kv, "MOST_COPIED_BYTES", 1)
    cache = KvCache(MODEL, 6, 4, torch.float32, CPU)
    cache._raw.normal_()
    before = cache._raw.clone()
    cache.copy([1, 2], [4, 5])
    assert torch.equal(cache._raw[:, :, :, [4, 5]], before[:, :, :, [1, 2]])


def test_no_page_is_written_by_a_copy_that_is_read_by_it_too():
    """The contract of `KvCache.copy`, kept by a scheduler under pressure."""
    engine = make_engine(config={"cache_tokens": 300, "max_running": 24, "prefill_tokens": 48})
    copied = 0
    copy = engine._kv.copy

    def checked(sources: list[int], targets: list[int]) -> None:
        nonlocal copied
        assert len({*sources, *targets}) == len(set(sources)) + len(targets)
        copied += len(targets)
        copy(sources, targets)

    engine._kv.copy = checked
    running: list[int] = []

    def fork_now_and_then(step: int) -> None:
        running[:] = [
            s.request.id for s in engine._sequences.values() if s.slot is not None and s.request.id < 1000
        ]
        if step % 3 == 0 and running and step < 300:
            engine.add(
                request(1000 + step, [], 9, fork_of=running[step % len(running)], fork_at=3, hold=step % 2 > 0)
            )

    for one in requests(80, seed=1, group=8):
        engine.add(one)
    turns = finish(engine, fork_now_and_then)
    assert copied > 50
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


# ── What others left ─────────────────────────────────────────────────────────────────────────────────────


def poison(engine: NativeEngine, value: float = float("nan")) -> None:
    """Let every page that nobody has hold what is no number."""
    free = torch.from_numpy(np.flatnonzero(engine._scheduler.pool._references == 0))
    engine._kv._data.view(engine._kv.stored)[:, :, :, free] = torch.tensor(value).to(engine._kv.stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("prefill_tokens", [7, 512])
def test_what_a_free_page_holds_does_not_matter_to_who_gets_it(value, prefill_tokens):
    config = {"cache_tokens": 400, "prefill_tokens": prefill_tokens, "max_running": 24}
    engine = make_engine(config=config)

    def disturb(step: int) -> None:
        poison(engine, value)
        if step % 29 == 28:
            publish(engine, engine.version + 1, "keep" if engine.version % 2 else "recompute")

    turns = drive(engine, requests(40, seed=2), disturb)
    assert any(event.cause == "preempt" for turn in turns.values() for event in turn.lineage)
    assert worst_replay(turns) < TOLERANCE


@pytest.mark.parametrize("config", [{"dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"numerics": "exact"}])
def test_it_does_not_matter_in_any_kind_of_cache(config):
    def turns(value: float | None) -> dict[int, list[float]]:
        engine = make_engine(config={"prefill_tokens": 16, "max_running": 16, **config})
        wanted = requests(24, seed=4)
        ended = drive(engine, wanted, lambda step: None if value is None else poison(engine, value))
        return {i: turn.logprobs.tolist() for i, turn in ended.items()}

    assert turns(float("nan")) == turns(None)


def test_a_fork_does_not_see_what_its_source_wrote_further_on_the_page_they_share():
    engine = make_engine(config={"page_size": 8})
    engine.add(request(0, range(11), 9, hold=True))
    turns = finish(engine)
    # Its third page: tokens 16 to 18, of which the fork shares one.
    page = engine._scheduler.held[0].shared.pages[2]
    engine._kv._data[:, :, :, page, 1:] = float("nan")
    engine.add(request(1, [], 6, fork_of=0, fork_at=17))
    engine.add(request(2, [4, 5], 6, fork_of=0, fork_at=17))
    engine.drop_prefixes()
    turns |= finish(engine)
    assert worst_replay({i: turns[i] for i in (1, 2)}) < TOLERANCE


def test_a_request_to_score_does_not_see_it_either():
    engine = make_engine(config={"prefill_tokens": 6})
    turn = drive(engine, [request(0, range(9), 8)])[0]
    engine.drop_prefixes()
    poison(engine)
    engine.score(ScoreRequest(id=1, context=turn.context, tokens=turn.tokens))
    scored = finish(engine, lambda step: poison(engine))[1]
    np.testing.assert_allclose(scored.logprobs, turn.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["decode", "suffix"])
def test_attention_over_poisoned_pages_is_attention_over_zeros(dtype, kind):
    rng = np.random.default_rng(0)
    lengths = np.array([1, 4, 5, 7, 8, 19, 20, 30])
    tables = rng.permutation(64).reshape(8, 8)
    q, k, v = (
        torch.randn(8, heads, 8, generator=torch.Generator().manual_seed(1)).to(dtype) for heads in (4, 2, 2)
    )

    def attended(value: float) -> torch.Tensor:
        cache = KvCache(MODEL, 64, 4, dtype, CPU)
        cache._data.fill_(value)
        for table, length in zip(tables, lengths, strict=True):
            own = torch.randn(2, 2, 2, 32, 8, generator=torch.Generator().manual_seed(int(length))).to(dtype)
            for place in range(length - 1):
                cache._data[:, :, :, table[place // 4], place % 4] = own[:, :, :, place]
        if kind == "decode":
            context = DecodeContext(cache, tables, lengths - 1, np.ones(8, bool))
        else:
            own_pages = [table[: -(-length // 4)] for table, length in zip(tables, lengths, strict=True)]
            context = SuffixContext(cache, own_pages, (lengths - 1).tolist(), [1] * 8)
        return context.attend(1, q, k, v)

    expected = attended(0.0)
    assert torch.isfinite(expected).all()
    assert torch.equal(attended(float("nan")), expected)

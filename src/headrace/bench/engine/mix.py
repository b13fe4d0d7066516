"""The request mix: groups that share a prompt, completions of very different lengths, all there at once.

Measured time is set against the ideal one: the same requests through this engine's own measured steps, each as
full as the remaining requests permit, plus the prefill of every prompt once. What their ratio lacks to 1 is the
scheduler's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.bench.engine import drive
from headrace.bench.engine.ideal import Sized, StepModel, ideal_decode_s
from headrace.bench.engine.shapes import config_of
from headrace.engine.native import NativeEngine


@dataclass(frozen=True)
class Mix:
    prompts: int = 64
    group: int = 8
    """Completions of a prompt."""
    prompt_tokens: int = 512
    median: int = 256
    sigma: float = 1.0
    """Completions' lengths are log-normal with these, up to `cap`."""
    cap: int = 8192
    max_running: int = 256
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    """Batch sizes whose steps are timed, as far as they are within `max_running`."""
    steps: int = 24
    """Timed steps at each of them."""
    near: int = 256
    far: int = 1024
    farthest: int = 4096
    """Contexts at which steps are timed: the near one and another, `farthest` for batches up to `few`."""
    few: int = 32
    saving_groups: int = 16
    saving_prompt: int = 1024
    saving_rounds: int = 2

    @property
    def max_context(self) -> int:
        return max(self.prompt_tokens + self.cap, self.farthest + self.room, self.saving_prompt + 1)

    @property
    def room(self) -> int:
        """Tokens that a request under a timed step may sample."""
        return drive.FILL_STEPS + len(self.batches) * (drive.WARMUP_STEPS + self.steps)

    @property
    def cache_tokens(self) -> int:
        running = self.max_running * (max(self.far, self.prompt_tokens + 2 * self.median) + self.room)
        return max(running, self.few * (self.farthest + self.room), self.max_context)


TINY = Mix(
    prompts=6, group=2, prompt_tokens=32, median=16, cap=64, max_running=4, batches=(1, 2, 4), steps=8,
    near=16, far=64, farthest=128, few=2, saving_groups=2, saving_prompt=48, saving_rounds=1,
)  # fmt: skip


def measure(
    shape: str, device: torch.device, size: Mix, *, seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures): the steps' times, what a shared prompt saves, and the mix beside its ideal."""
    engine = drive.make_engine(
        shape,
        device,
        running=size.max_running,
        context=size.max_context,
        cache_tokens=size.cache_tokens,
        seed=seed,
        standby=False,
        **settings,
    )
    rng = np.random.default_rng(seed)
    vocabulary = config_of(shape).vocab_size
    drive.say(f"mix {shape}: steps of several sizes …")
    timed = time_steps(engine, rng, vocabulary, size)
    rows = [
        drive.kept(
            {"part": "step model", "shape": shape, "batch": batch, "context": context, "ms_per_step": 1e3 * seconds}
        )
        for batch, points in timed.items()
        for context, seconds in points
    ]
    drive.say(f"mix {shape}: shared prompts …")
    saving = group_prefill_saving(engine, rng, vocabulary, size)
    rows.append(drive.kept({"part": "shared prompts", "shape": shape, **saving}))
    drive.say(f"mix {shape}: {size.prompts} x {size.group} requests …")
    mixed = run_mix(engine, rng, vocabulary, size, StepModel.fit(timed))
    rows.append(drive.kept({"part": "mix", "shape": shape, **mixed}))
    figures = {
        f"mix_efficiency_{shape}": mixed["efficiency"],
        f"mix_tok_s_{shape}": mixed["tok_s"],
        "group_prefill_saving": saving["saving"],
    }
    return rows, figures


def time_steps(
    engine: NativeEngine, rng: np.random.Generator, vocabulary: int, size: Mix
) -> dict[int, list[tuple[float, float]]]:
    """For each batch size (mean context, seconds of a step) at two contexts.

    The engine is filled once for each context; then requests are cut away from one batch size to the next.
    """
    batches = sorted({batch for batch in size.batches if batch < size.max_running} | {size.max_running})
    many, few = [b for b in batches if b > size.few], [b for b in batches if b <= size.few]
    timed: dict[int, list[tuple[float, float]]] = {batch: [] for batch in batches}
    for context, group in ((size.near, batches), (size.far, many), (size.farthest, few)):
        if not group:
            continue
        ids = drive.fill(engine, drive.random_prompts(rng, vocabulary, group[-1], context), size.room)
        for batch, smaller in zip(reversed(group), [*reversed(group[:-1]), 0], strict=True):
            seconds = drive.seconds_per_step(engine, size.steps)
            # Evenly spread, so that those cut have the context of all: the first to be prefilled are ahead.
            staying = [ids[i * batch // smaller] for i in range(smaller)]
            end = drive.cut(engine, set(ids) - set(staying))
            timed[batch].append((end - (size.steps - 1) / 2, seconds))
            ids = staying
    return timed


def group_prefill_saving(
    engine: NativeEngine, rng: np.random.Generator, vocabulary: int, size: Mix
) -> dict[str, Any]:
    """Seconds until every request of several groups has its first token: each its own prompt, or one per group."""
    requests = size.saving_groups * size.group

    def seconds(prompts: list[np.ndarray]) -> float:
        return _prefill_s(engine, [prompt for prompt in prompts for _ in range(requests // len(prompts))])

    best = {}
    for name, count in (("distinct", requests), ("shared", size.saving_groups)):
        rounds = range(1 + size.saving_rounds)
        times = [seconds(drive.random_prompts(rng, vocabulary, count, size.saving_prompt)) for _ in rounds]
        best[name] = min(times[1:])
    return {
        "groups": size.saving_groups,
        "group": size.group,
        "prompt_tokens": size.saving_prompt,
        "distinct_s": best["distinct"],
        "shared_s": best["shared"],
        "saving": best["distinct"] / best["shared"],
    }


def run_mix(
    engine: NativeEngine, rng: np.random.Generator, vocabulary: int, size: Mix, model: StepModel
) -> dict[str, Any]:
    """All requests added at the beginning, then steps until the last has ended."""
    warm = drive.random_prompts(rng, vocabulary, size.prompts, size.prompt_tokens)
    prefill_s = _prefill_s(engine, warm) / (size.prompts * size.prompt_tokens)
    prompts = drive.random_prompts(rng, vocabulary, size.prompts, size.prompt_tokens)
    lengths = completion_lengths(rng, size)
    began, prefilled = time.perf_counter(), engine.tokens_prefilled
    drive.add(engine, [prompt for prompt in prompts for _ in range(size.group)], lengths)
    tokens = drive.finish(engine)
    measured = time.perf_counter() - began
    requests = [Sized(size.prompt_tokens, length) for length in lengths]
    decode_s, steps = ideal_decode_s(requests, size.max_running, model)
    ideal = decode_s + prefill_s * size.prompts * size.prompt_tokens
    return {
        "requests": len(requests),
        "max_running": size.max_running,
        "tokens": tokens,
        "longest": max(lengths),
        "prefilled": engine.tokens_prefilled - prefilled,
        "seconds": measured,
        "tok_s": tokens / measured,
        "ideal_steps": steps,
        "ideal_prefill_s": ideal - decode_s,
        "ideal_s": ideal,
        "efficiency": ideal / measured,
    }


def completion_lengths(rng: np.random.Generator, size: Mix) -> list[int]:
    drawn = size.median * rng.lognormal(0.0, size.sigma, size.prompts * size.group)
    return np.clip(np.round(drawn), 1, size.cap).astype(int).tolist()


def _prefill_s(engine: NativeEngine, prompts: Sequence[np.ndarray]) -> float:
    """Until every prompt has sampled one token."""
    engine.synchronize()
    began = time.perf_counter()
    drive.add(engine, prompts, [1] * len(prompts))
    drive.finish(engine)
    return time.perf_counter() - began

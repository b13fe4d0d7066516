"""New weights under load: how long generation pauses, and what it loses while versions keep coming."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of
from headrace.engine.native import NativeEngine

PROMPT_AT_LEAST = 16
LATE_STEPS = 2
"""Steps after a swap in which its pause can show: results may come one step late."""


@dataclass(frozen=True)
class Swaps:
    sequences: int = 256
    context: int = 512
    swaps: int = 10
    gap: int = 8
    """Steps between two swaps whose pauses are measured."""
    seconds: float = 6.0
    """Of generation while versions keep coming, and of it undisturbed."""
    every_s: float = 1.0
    """Between two versions."""
    adapter_bytes: float = 175e6

    @property
    def pause_steps(self) -> int:
        return drive.WARMUP_STEPS + self.swaps * (LATE_STEPS + self.gap)

    @property
    def most_steps(self) -> int:
        """Under a mean context of `context`, with some prompt left."""
        return 2 * (self.context - PROMPT_AT_LEAST)


TINY = Swaps(sequences=8, context=128, swaps=3, gap=4, seconds=0.3, every_s=0.05, adapter_bytes=8e3)


def measure(
    shape: str, device: torch.device, size: Swaps, *, seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures): pauses of whole and adapter-sized swaps, throughput under swaps, and a recomputed cache."""
    longest = 2 * size.context + drive.FILL_STEPS + 2 * drive.WARMUP_STEPS
    engine = drive.make_engine(
        shape,
        device,
        running=size.sequences,
        context=longest,
        cache_tokens=size.sequences * (2 * size.context + drive.SPARE_TOKENS),
        seed=seed,
        **settings,
    )
    rng = np.random.default_rng(seed)
    vocabulary = config_of(shape).vocab_size
    source = {name: buffer.clone() for name, buffer in engine.standby.items()}

    def fill(steps: int) -> list[int]:
        prompt = max(PROMPT_AT_LEAST, size.context - steps // 2)
        prompts = drive.random_prompts(rng, vocabulary, size.sequences, prompt)
        return drive.fill(engine, prompts, longest - prompt)

    drive.say(f"swap {shape}: pauses …")
    ids = fill(2 * size.gap + 2 * size.pause_steps)
    # Each of the two sets of weights is served once before anything is timed: graphs may be captured for each.
    for _ in range(2):
        engine.swap(engine.version + 1, "keep")
        for _ in range(size.gap):
            drive.step(engine)
    rows = []
    pauses = {}
    for kind, only in (("all", None), ("adapter", adapter_names(source, size.adapter_bytes))):
        found = measure_pauses(engine, source, size, only)
        measured = not math.isnan(found["device_pause_ms_max"])
        pauses[kind] = found["device_pause_ms_max" if measured else "host_pause_ms_max"]
        rows.append(drive.kept({"part": "swap", "shape": shape, "weights": kind, **found}))
    recomputed = measure_recompute(engine, source, size)
    rows.append(drive.kept({"part": "recompute", "shape": shape, "sequences": size.sequences, **recomputed}))
    step_s = drive.seconds_per_step(engine, size.gap)
    drive.cut(engine, ids)

    steps = max(1, min(size.most_steps, round(size.seconds / step_s)))
    drive.say(f"swap {shape}: a version every {size.every_s:g} s …")
    ids = fill(steps)
    undisturbed = size.sequences / drive.seconds_per_step(engine, steps, warmup=LATE_STEPS)
    drive.cut(engine, ids)
    ids = fill(steps)
    disturbed = steps_under_swaps(engine, source, device, steps, size.every_s)
    drive.cut(engine, ids)
    disturbed["tok_s"] = size.sequences * steps / disturbed["seconds"]
    frac = disturbed["tok_s"] / undisturbed
    rows.append(
        drive.kept(
            {
                "part": "swapping",
                "shape": shape,
                "steps": steps,
                "tok_s_undisturbed": undisturbed,
                **disturbed,
                "throughput_frac": frac,
            }
        )
    )
    figures = {
        f"swap_pause_ms_{shape}": pauses["all"],
        "swap_pause_ms_adapter": pauses["adapter"],
        "swap_throughput_frac": frac,
    }
    return rows, figures


def adapter_names(weights: Mapping[str, Tensor], wanted_bytes: float) -> list[str]:
    """Value and key projections, layer after layer, until they hold about so many bytes."""
    names, held = [], 0
    for name, weight in weights.items():
        if name.endswith(("v_proj.weight", "k_proj.weight")) and held < wanted_bytes:
            names.append(name)
            held += weight.nbytes
    return names


def copy_into_standby(
    engine: NativeEngine, source: Mapping[str, Tensor], only: Collection[str] | None = None
) -> None:
    """On the current stream, for which it waits, as a swap wants it."""
    for name, buffer in engine.standby.items():
        if only is None or name in only:
            buffer.copy_(source[name], non_blocking=True)
    if buffer.is_cuda:
        torch.cuda.current_stream().synchronize()


def measure_pauses(
    engine: NativeEngine, source: Mapping[str, Tensor], size: Swaps, only: list[str] | None
) -> dict[str, Any]:
    """Swaps between steps, each followed by some undisturbed ones.

    How long the device stood still before a pass, at most, from the swap on (the pause, where there is a device);
    how long the host was busy with the swap, most of it beside the pass under way; and by wall clock how much later
    than usual the steps after the swap returned.
    """
    for _ in range(drive.WARMUP_STEPS):
        drive.step(engine)
    reported, idle, late, usual = [], [], [], []
    for _ in range(size.swaps):
        copy_into_standby(engine, source, only)
        engine.synchronize()
        for _ in range(LATE_STEPS):
            drive.step(engine)
        returned = [time.perf_counter()]
        engine.device_gaps.clear()
        reported.append(engine.swap(engine.version + 1, "keep", only=only).pause_s)
        for _ in range(size.gap):
            drive.step(engine)
            returned.append(time.perf_counter())
        idle.append(max(engine.device_gaps, default=math.nan))
        spent = np.diff(returned)
        late.append(float(spent[:LATE_STEPS].sum()))
        usual += spent[LATE_STEPS:].tolist()
    engine.synchronize()
    median = statistics.median(usual)
    excess = [1e3 * (one - LATE_STEPS * median) for one in late]
    held = sum(source[name].nbytes for name in (source if only is None else only))
    return {
        "mb": held / 1e6,
        "swaps": size.swaps,
        "device_pause_ms_max": 1e3 * max(idle),
        "host_pause_ms_max": 1e3 * max(reported),
        "host_pause_ms_median": 1e3 * statistics.median(reported),
        "late_ms_max": max(excess),
        "late_ms_median": statistics.median(excess),
        "step_ms": 1e3 * median,
    }


def measure_recompute(engine: NativeEngine, source: Mapping[str, Tensor], size: Swaps) -> dict[str, Any]:
    """A swap that rebuilds every cache: until a step decodes all sequences again."""
    copy_into_standby(engine, source)
    engine.synchronize()
    prefilled = engine.tokens_prefilled
    began = time.perf_counter()
    report = engine.swap(engine.version + 1, "recompute")
    drive.step_until_decoding(engine, size.sequences)
    engine.synchronize()
    seconds = time.perf_counter() - began
    return {
        "pause_ms": 1e3 * report.pause_s,
        "seconds_until_all_decode": seconds,
        "tokens_prefilled": engine.tokens_prefilled - prefilled,
    }


def steps_under_swaps(
    engine: NativeEngine, source: Mapping[str, Tensor], device: torch.device, steps: int, every_s: float
) -> dict[str, Any]:
    """Steps with whole swaps at that interval, the standby buffers written beside them by a thread."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    pauses: list[float] = []
    for _ in range(LATE_STEPS):
        drive.step(engine)
    engine.synchronize()
    with ThreadPoolExecutor(1) as receiver:
        received: Future[None] | None = None
        began = due = time.perf_counter()
        for _ in range(steps):
            if time.perf_counter() >= due and (received is None or received.done()):
                if received is not None:
                    received.result()
                    pauses.append(engine.swap(engine.version + 1, "keep").pause_s)
                received = receiver.submit(_receive, engine, source, stream)
                due += every_s
            drive.step(engine)
        engine.synchronize()
        seconds = time.perf_counter() - began
    return {"swaps": len(pauses), "pause_ms_max": 1e3 * max(pauses, default=0.0), "seconds": seconds}


def _receive(engine: NativeEngine, source: Mapping[str, Tensor], stream: torch.cuda.Stream | None) -> None:
    """What the receiving end of a transport does, on a stream of its own."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        copy_into_standby(engine, source)

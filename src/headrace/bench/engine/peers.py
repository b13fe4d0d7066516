"""transformers on the same shape and weights: `generate` with a dynamic cache, with a static one and compiled, and
its continuous batching. Each in a process of its own, with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from headrace.bench.engine import decode, drive

MODES = {"dynamic": "dynamic", "compiled": "compiled", "continuous": "cb"}
"""Each with the name its figure carries."""


class Job(msgspec.Struct):
    mode: str
    """One of MODES."""
    shape: str
    device: str
    sequences: int
    context: int
    """Mean over the timed tokens."""
    tokens: int
    """Timed ones of each sequence."""
    seed: int = 0


def measure(
    shape: str,
    device: torch.device,
    *,
    ours_tok_s: float | None = None,
    modes: Sequence[str] = tuple(MODES),
    tokens: int = 64,
    limit_s: float = 300.0,
    seed: int = 0,
    **settings: Any,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures). `ours_tok_s` is at the shape's headline point, measured here if not given.

    A mode that raises or takes too long has a row that says so, and no figure. Hold no GPU memory meanwhile.
    """
    point = decode.HEADLINE[shape]
    if ours_tok_s is None:
        [ours] = decode.measure(shape, device, points=[point], seed=seed, **settings)
        ours_tok_s = ours["tok_s"]
        drive.free_memory()
    rows, figures = [], {}
    for mode in modes:
        drive.say(f"transformers, {mode}, {shape} {point} …")
        job = Job(mode, shape, device.type, point.sequences, point.context, tokens, seed)
        answer = ask(job, limit_s)
        row = {"part": "peers", "shape": shape, "point": str(point), "peer": f"transformers {mode}", **answer}
        if "tok_s" in answer:
            row["ours_tok_s"] = ours_tok_s
            row["ours_over_theirs"] = figures[f"over_transformers_{MODES[mode]}_{shape}"] = (
                ours_tok_s / answer["tok_s"]
            )
        rows.append(drive.kept(row))
    return rows, figures


def ask(job: Job, limit_s: float) -> dict[str, Any]:
    """What the peer's process answers: its tok_s, or an error."""
    command = [sys.executable, "-m", "headrace.bench.engine.transformers_peer", msgspec.json.encode(job).decode()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:g} s"}
    if not done.stdout:
        return {"error": f"the process ended with {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer

"""What `headrace bench` measures, by name. Imports nothing: `headrace --help` reads it."""

from __future__ import annotations

BENCHMARKS = {
    "loop": "headrace.bench.loop:run",
    "engine": "headrace.bench.engine:run",
    "sync": "headrace.bench.sync:run",
    "mask": "headrace.bench.mask:run",
    "train": "headrace.bench.train:run",
    "e2e": "headrace.bench.e2e:run",
}
"""Each is a function of keyword options that returns bench, hardware, commit, rows and figures."""

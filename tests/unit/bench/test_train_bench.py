"""bench train: a small group, and what it says of it."""

from __future__ import annotations

import pytest

from headrace.bench.train import prefix, run
from headrace.cli.bench import BENCHMARKS
from headrace.errors import ConfigError


def test_a_shared_prompt_is_computed_once_with_the_same_gradient() -> None:
    row = prefix.measure("cpu", work=prefix.Work(groups=2, episodes=4, prompt=96, completion=8), rounds=1)
    assert row["tokens_unshared"] == 2 * 4 * 103
    assert row["tokens_shared"] == 2 * (96 + 4 * 7)
    assert row["token_saving"] == (4 * 103) / (96 + 4 * 7)
    assert row["gradient_difference"] < 1e-5
    assert row["speedup"] == row["step_ms_unshared"] / row["step_ms_shared"]


def test_its_figures_are_the_rows(monkeypatch) -> None:
    monkeypatch.setattr(prefix, "Work", lambda: TINY)
    found = run(device="cpu", rounds=1)
    assert BENCHMARKS["train"] == "headrace.bench.train:run"
    step, group = found["rows"]
    assert found["figures"] == {
        "over_transformers_eager_tiny": step["over_transformers"],
        "prefix_tree_speedup": group["speedup"],
        "prefix_tree_token_saving": group["token_saving"],
    }
    assert step["tokens"] == 2 * 2 * 15
    assert step["mfu"] is None, "there is no data sheet for a CPU"
    assert step["over_transformers"] == step["transformers_step_ms"] / step["step_ms"]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: step, prefix"):
        run(parts="stpe")


TINY = prefix.Work(episodes=2, prompt=32, completion=4)

"""bench sync: its arithmetic by hand, and each part end to end at a size that a CPU runs in seconds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from headrace.bench import sync
from headrace.bench.engine.shapes import SHAPES
from headrace.bench.sync import adapter, delta, lesson, memory, steps
from headrace.cli.bench import BENCHMARKS
from headrace.errors import ConfigError
from headrace.records import Task
from headrace.scoring.base import Attempt, AttemptTurn

# ── The task ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reward_is_the_share_of_words_of_the_prompts_family() -> None:
    task = Task(id="0", prompt="w16 w23", data={"family": 2})
    turn = AttemptTurn(prompt="", text="", tokens=[16, 23, 24, 15], stop="length")
    assert lesson.score(task, Attempt(turns=[turn])) == 0.5


def test_every_word_of_a_prompt_is_of_the_family_it_names() -> None:
    for task in lesson.tasks(20, seed=3):
        words = [int(word.removeprefix("w")) for word in str(task.prompt).split()]
        assert len(words) == 12
        assert {word // 8 for word in words} == {task.data["family"]}


# ── Bytes by shapes ──────────────────────────────────────────────────────────────────────────────────────


def test_the_bytes_of_an_8b_adapter_are_those_computed_by_hand() -> None:
    shapes = adapter.adapter_shapes(SHAPES["8b"], rank=32)
    attention = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096)
    mlp = 3 * (4096 + 12288)
    assert sum(2 * a * b for a, b in shapes.values()) == 36 * 2 * 32 * (attention + mlp) == 174_587_904
    assert shapes["base_model.model.model.layers.35.mlp.down_proj.lora_A.weight"] == (32, 12288)
    assert shapes["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"] == (1024, 32)


# ── Parts, end to end ────────────────────────────────────────────────────────────────────────────────────


def test_shared_memory_is_set_beside_memcpy() -> None:
    [row], figures = memory.measure("tiny")
    assert row["gb"] == pytest.approx(2e-9 * sum(w.numel() for w in _weights()), rel=0.01)
    assert figures == {"shm_over_memcpy": pytest.approx(row["transfer_gb_s"] / row["memcpy_gb_s"])}
    assert 0 < row["whole_over_memcpy"] < row["transfer_over_memcpy"]


def test_the_deltas_of_a_run_are_a_little_more_than_their_entropy() -> None:
    [run, coding], figures = delta.measure("tiny", delta.TINY)
    # Of the steps 3 to 5; a version that could not begin to be sent gives way to the next one.
    assert 1 <= run["versions"] <= 3
    # Such a small delta has some hundred bytes, and a frame's header is a good part of it.
    assert 1 < figures["delta_over_entropy"] == run["over_entropy"] < 2
    assert figures["delta_frac"] == run["delta_frac"] < run["changed_frac"]
    assert coding["changed_frac"] == run["changed_frac"]
    assert 0 < coding["delta_frac"] < 2 * run["delta_frac"]


def test_a_run_with_an_adapter_publishes_the_adapters_bytes_and_no_more() -> None:
    [by_shape, run], figures = adapter.measure_bytes("8b")
    assert by_shape["stream_bytes"] == 174_587_904
    assert figures == {"adapter_frac": pytest.approx(174_587_904 / 16_381_470_720)}
    # Rank 8 on seven projections of two layers of hidden size 32: q, k, v, o; gate, up; down.
    features = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 96)
    assert run["stream_bytes"] == 2 * 2 * 8 * features
    assert run["stream_over_tensors"] == 1


def test_an_adapter_is_served_under_load_and_its_time_is_what_exceeds_two_steps() -> None:
    [row], figures = adapter.measure_live("tiny", "cpu", adapter.TINY_LOAD)
    assert row["beyond_two_steps_ms"] == pytest.approx(row["total_ms"] - 2 * row["decode_step_ms"])
    stages = ("announce", "transfer", "seal", "verify", "swap")
    assert 0 < sum(row[f"{stage}_ms"] for stage in stages) < row["total_ms_max"]
    assert figures == {"adapter_live_ms": row["beyond_two_steps_ms"], "adapter_pause_ms": row["host_pause_ms"]}
    assert 0 < row["host_pause_ms"] < row["total_ms_max"]


@pytest.mark.parametrize("work", [steps.TINY, steps.TINY_ON_GPU], ids=lambda work: work.shape)
def test_steps_are_timed_with_a_publication_after_each_and_without(work: steps.Work) -> None:
    [row], figures = steps.measure(work, "cpu")
    assert row["tokens_in_batch"] == 2 * 4 * 25
    assert row["steps_of_each"] == 2 * 3
    assert figures == {"step_time_ratio_cpu": row["ratio"]}
    assert row["ratio"] > 0
    assert row["sync_ms"] > row["pause_ms_max"] > 0


def test_steps_with_a_publication_are_compared_with_those_beside_them() -> None:
    # The machine is slower during the second pair of blocks, and something else disturbs a step of the third.
    pairs = [
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1]),
        ([4.0, 4.0, 4.0], [4.8, 4.8, 4.8]),
        ([1.0, 1.0, 9.0], [1.3, 1.3, 1.3]),
    ]
    assert steps.compared(pairs) == {
        "step_ms_without": 1000.0,
        "step_ms_with": 1300.0,
        "ratio": pytest.approx(1.2),
        "ratio_of_medians": pytest.approx(1.3),
    }


# ── The frame ────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_run_one_after_another_and_those_without_their_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure", lambda shape, seed: ([{"part": "memory"}], {f"seed_{seed}": 1.0}))
    found = sync.run(parts="ipc,memory", shape="tiny", device="cpu", seed=7)
    assert found["rows"] == [{"part": "memory"}, {"part": "left out", "needs a GPU": "ipc"}]
    assert found["figures"] == {"seed_7_tiny": 1.0}
    assert sync.run(parts="memory", device="cpu", seed=7)["figures"] == {"seed_7": 1.0}
    assert found["bench"] == "sync"


def test_parts_and_shapes_that_are_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: memory, collective, delta, adapter, steps, ipc"):
        sync.run(parts="speed")
    with pytest.raises(ConfigError, match=r"known: 0\.6b, 8b, 32b, tiny"):
        sync.run(parts="memory", shape="7b")


def test_the_benchmark_is_known_to_the_command_line_and_to_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BENCHMARKS["sync"] == "headrace.bench.sync:run"
    folder = Path(__file__).parent.parent.parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("tables_of_sync", folder / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.COMMANDS["sync"] == "headrace bench sync --json"


def test_workers_that_import_the_task_import_no_torch() -> None:
    import subprocess

    code = "import sys, headrace.bench.sync.lesson; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def _weights() -> list[torch.Tensor]:
    from headrace.bench.engine.shapes import random_weights

    return list(random_weights(SHAPES["tiny"], torch.device("cpu")).parameters())

"""bench engine: its arithmetic by hand, and each part end to end on a shape that a CPU can run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from headrace.bench import hardware
from headrace.bench.engine import agreement, fp8, mix, run, swap
from headrace.bench.engine.ideal import Sized, StepModel, ideal_decode_s
from headrace.bench.engine.limit import kv_bytes, limit_s, weight_bytes
from headrace.bench.engine.peers import Job
from headrace.bench.engine.shapes import SHAPES, random_weights
from headrace.bench.engine.transformers_peer import _model, rate_between
from headrace.cli.bench import BENCHMARKS
from headrace.errors import ConfigError
from headrace.models import PackedContext

ROOT = Path(__file__).parent.parent.parent.parent
CPU = torch.device("cpu")

# ── The limit ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_bytes_of_an_8b_step_are_those_computed_by_hand() -> None:
    attention = 4096 * 4096 + 2 * 1024 * 4096 + 4096 * 4096
    layer = attention + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    head_and_norm = 151936 * 4096 + 4096
    assert weight_bytes(SHAPES["8b"]) == 2 * (36 * layer + head_and_norm) == 15_136_811_008
    assert kv_bytes(SHAPES["8b"], 1) == 2 * 36 * 8 * 128 * 2 == 147_456
    seconds = limit_s(SHAPES["8b"], 256, 512, 4.4e12)
    assert seconds == pytest.approx((15_136_811_008 + 256 * 512 * 147_456) / 4.4e12)


def test_a_tied_head_is_read_once_and_an_embedding_of_its_own_is_not() -> None:
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert weight_bytes(SHAPES["0.6b"]) == 2 * (28 * layer + 151936 * 1024 + 1024)


def test_the_read_kernel_reads_every_word() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    code = (
        "import torch; from headrace.bench.engine.read_kernel import read_all\n"
        f"words = torch.arange(64, dtype=torch.int32, device={device!r})\n"
        "print(read_all(words, 8, 4, 1).tolist())"
    )
    # Triton's interpreter must be chosen before Triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "0" if device == "cuda" else "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout) == [sum(range(32)), sum(range(32, 64))], done.stderr


# ── The ideal ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_model_goes_through_what_was_measured_and_between_it() -> None:
    model = StepModel.fit({1: [(10, 0.011), (20, 0.012)], 3: [(10, 0.016), (20, 0.022)]})
    assert model(1, 10) == pytest.approx(0.011)
    assert model(3, 60) == pytest.approx(0.022)
    # Halfway: base (0.010 + 0.010) / 2, and 0.15 ms a token.
    assert model(2, 40) == pytest.approx(0.010 + 40 * 0.00015)


def test_the_ideal_time_is_the_sum_of_steps_as_full_as_the_requests_permit() -> None:
    model = StepModel((1, 2), (1.0, 3.0), (0.1, 0.1))
    requests = [Sized(prompt=4, tokens=3), Sized(prompt=4, tokens=1), Sized(prompt=6, tokens=2), Sized(2, 3)]
    # The second needs no step. 1: first and third (5 + 7 tokens). 2: first and fourth (6 + 3). 3: fourth (4).
    expected = (3.0 + 1.2) + (3.0 + 0.9) + (1.0 + 0.4)
    assert ideal_decode_s(requests, 2, model) == (pytest.approx(expected), 3)


def test_lengths_of_the_mix_have_the_median_and_the_cap_that_were_asked_for() -> None:
    lengths = mix.completion_lengths(np.random.default_rng(0), mix.Mix(prompts=4096))
    assert np.median(lengths) == pytest.approx(256, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(1.0, rel=0.02)
    assert max(lengths) == 8192


# ── Parts, end to end ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def measured() -> dict:
    return run(parts="decode,mix,swap", shapes="tiny")


def test_decode_is_timed_at_the_context_it_names_and_set_beside_the_limit(measured: dict) -> None:
    rows = [row for row in measured["rows"] if row["part"] == "decode"]
    assert [row["point"] for row in rows] == ["4x160", "8x160"]
    for row, sequences in zip(rows, (4, 8), strict=True):
        assert row["context_mean"] == pytest.approx(160, abs=1)
        assert row["tok_s"] == pytest.approx(1e3 * sequences / row["ms_per_step"])
        assert row["limit_frac"] == pytest.approx(row["limit_ms"] / row["ms_per_step"])
        assert 0 < row["limit_frac"] < 1
    assert measured["figures"]["decode_limit_frac_tiny_8x160"] == rows[1]["limit_frac"]
    assert measured["figures"]["tok_s_tiny"] == rows[1]["tok_s"]


def test_the_mix_samples_every_token_once_and_prefills_a_shared_prompt_once(measured: dict) -> None:
    [row] = [row for row in measured["rows"] if row["part"] == "mix"]
    assert row["requests"] == 12
    assert row["tokens"] / row["seconds"] == pytest.approx(row["tok_s"])
    assert row["prefilled"] == 6 * 32
    assert row["longest"] - 1 <= row["ideal_steps"] < row["tokens"]
    assert measured["figures"]["mix_efficiency_tiny"] == row["ideal_s"] / row["seconds"]
    [shared] = [row for row in measured["rows"] if row["part"] == "shared prompts"]
    assert measured["figures"]["group_prefill_saving_tiny"] == shared["distinct_s"] / shared["shared_s"]


def test_steps_are_timed_at_each_batch_size_and_two_contexts(measured: dict) -> None:
    rows = [row for row in measured["rows"] if row["part"] == "step model"]
    assert [row["batch"] for row in rows] == [1, 1, 2, 2, 4, 4]
    assert all(row["ms_per_step"] > 0 for row in rows)
    contexts = [row["context"] for row in rows]
    assert all(far > near + 30 for near, far in zip(contexts[::2], contexts[1::2], strict=True))


def test_swaps_are_counted_and_the_recomputed_tokens_are_those_in_the_cache(measured: dict) -> None:
    whole, adapter = [row for row in measured["rows"] if row["part"] == "swap"]
    assert whole["mb"] == pytest.approx(sum(w.nbytes for w in _tiny().parameters()) / 1e6)
    assert adapter["mb"] == pytest.approx(2 * (32 * 64 * 2) / 1e6)
    assert measured["figures"]["swap_pause_ms_tiny"] == whole["host_pause_ms_max"] > 0
    assert measured["figures"]["swap_pause_ms_adapter_tiny"] == adapter["host_pause_ms_max"] > 0
    [recompute] = [row for row in measured["rows"] if row["part"] == "recompute"]
    # Prompts of 90; two tokens of the fill, 8 of the rehearsal, then twice 16 steps and 3 swaps with 6 steps each.
    assert recompute["tokens_prefilled"] == pytest.approx(8 * (90 + 2 + 8 + 2 * (16 + 3 * 6)), abs=16)
    [swapping] = [row for row in measured["rows"] if row["part"] == "swapping"]
    assert swapping["swaps"] >= 2
    assert measured["figures"]["swap_throughput_frac_tiny"] == pytest.approx(
        swapping["tok_s"] / swapping["tok_s_undisturbed"]
    )


def test_an_adapter_is_the_first_key_and_value_projections_that_reach_its_size() -> None:
    weights = dict(_tiny().named_parameters())
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kv"]
    assert swap.adapter_names(weights, 8192) == names
    assert swap.adapter_names(weights, 4097) == names


def test_log_probs_are_compared_at_an_entropy_within_bounds_and_a_changed_weight_shows() -> None:
    turns, logprobs, entropy = agreement.sample_sharp(
        "tiny", CPU, agreement.TINY, agreement.trainer_ops("fast"), 0, {}
    )
    assert 0.5 <= entropy <= 2
    sampled = np.concatenate([turn.logprobs for turn in turns])
    assert len(sampled) == 8 * 32
    assert np.abs(sampled - logprobs).mean() < 0.05
    other, _ = agreement.recompute(_tiny(), turns, CPU)
    assert np.abs(sampled - other).mean() > 1


def test_an_8b_step_in_fp8_reads_the_bytes_computed_by_hand() -> None:
    layer = 4096 * 4096 + 2 * 1024 * 4096 + 4096 * 4096 + 3 * 4096 * 12288
    scales = 4 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)
    shape, tokens = SHAPES["8b"], 1000
    whole = weight_bytes(shape) + kv_bytes(shape, tokens)
    assert fp8.step_bytes(shape, tokens) == whole
    assert fp8.step_bytes(shape, tokens, kv_dtype="fp8") == whole - 147_456_000 / 2
    assert fp8.step_bytes(shape, tokens, weight_dtype="fp8") == whole - 36 * (layer - scales)


@pytest.fixture(scope="module")
def measured_fp8() -> dict:
    return run(parts="fp8", shapes="tiny")


def test_fp8_is_set_beside_the_plain_step_and_its_own_limit(measured_fp8: dict) -> None:
    plain, *rows = [row for row in measured_fp8["rows"] if row["part"] == "fp8"]
    assert [row["kind"] for row in rows] == ["fp8_kv", "fp8_weights", "fp8_both"]
    assert [row["limit_ms"] < plain["limit_ms"] for row in rows] == [True] * 3
    for row in rows:
        speedup = plain["ms_per_step"] / row["ms_per_step"]
        assert measured_fp8["figures"][f"{row['kind']}_speedup_tiny"] == row["speedup"] == pytest.approx(speedup)
        assert row["limit_frac"] == pytest.approx(row["limit_ms"] / row["ms_per_step"])


def test_one_trained_model_is_asked_under_every_kind_of_fp8(measured_fp8: dict) -> None:
    rows = [row for row in measured_fp8["rows"] if row["part"] == "agreement"]
    assert [row["numerics"] for row in rows] == ["fp8_kv", "fp8_weights", "fp8_both"]
    for row in rows:
        assert row["tokens"] == 8 * 32
        # Far more than bfloat16's rounding, far less than another model's.
        assert 1e-4 < row["mean_diff"] < 0.1
        assert measured_fp8["figures"][f"{row['numerics']}_logprob_mean_diff_tiny"] == row["mean_diff"]
        assert measured_fp8["figures"][f"{row['numerics']}_logprob_max_diff_tiny"] == row["max_diff"]


def test_parts_and_shapes_that_are_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: decode, mix, swap, peers, agreement, fp8"):
        run(parts="speed", shapes="tiny")
    with pytest.raises(ConfigError, match=r"known: 0\.6b, 8b, 32b, tiny"):
        run(parts="decode", shapes="7b")


# ── Peers and tables ─────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_the_peer_has_the_same_weights() -> None:
    ours, theirs = _tiny(), _model(Job("dynamic", "tiny", "cpu", 1, 96, 32))
    tokens = torch.arange(20)
    packed = PackedContext([20])
    wanted = ours.logits(ours(tokens, packed.positions, packed)).float()
    found = theirs(tokens[None]).logits[0].float()
    assert wanted.std() > 0.1
    assert (wanted - found).abs().max() < 0.02


def test_a_peers_rate_is_taken_while_all_of_its_sequences_decode() -> None:
    stamps = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.5, 2.0, 3.0, 4.0])]
    assert rate_between(stamps) == (pytest.approx(4 / 1.5), False)
    assert rate_between([np.array([0.0, 1.0]), np.array([2.0, 4.0])]) == (pytest.approx(3 / 4), True)


def test_rows_of_different_parts_become_tables_with_columns_of_their_own() -> None:
    rows = [{"part": "a", "x": 1}, {"part": "a", "x": 2, "why": "no"}, {"part": "b", "y": 0.5}]
    expected = "**a**\n\n| x | why |\n|---|---|\n| 1 | – |\n| 2 | no |\n\n**b**\n\n| y |\n|---|\n| 0.5 |"
    assert "\n".join(_tables().table(rows)) == expected
    assert _tables().table([{"x": 1}]) == ["| x |", "|---|", "| 1 |"]


def test_the_picture_shows_each_point_once_and_peers_below_theirs() -> None:
    decode = {"part": "decode", "shape": "tiny", "point": "8x160", "limit_frac": 0.5, "tok_s": 1000.0}
    peers = [{"part": "peers", "shape": "tiny", "point": "8x160", "peer": f"peer {i}"} for i in range(2)]
    peers[0]["tok_s"] = 100.0
    chart = _tables().chart
    shown = chart.bars([decode, {**decode, "shape": "large"}, *peers, {**decode, "tok_s": 9.0}])
    assert [(bar.label, round(bar.share, 3)) for bar in shown] == [
        ("TINY, 8 × 160", 0.5),
        ("peer 0", 0.05),
        ("LARGE, 8 × 160", 0.5),
    ]
    assert chart.svg([decode, *peers]).count("<rect") == 4


def test_the_benchmark_is_known_and_says_what_it_ran_on() -> None:
    assert BENCHMARKS["engine"] == "headrace.bench.engine:run"
    assert _tables().COMMANDS["engine"] == "headrace bench engine --json"
    assert hardware()["torch"] == torch.__version__


def _tiny() -> torch.nn.Module:
    return random_weights(SHAPES["tiny"], CPU)


def _tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    return module

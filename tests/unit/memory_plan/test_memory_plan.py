"""The memory plan by value: what each process needs, what is chosen, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from plan_builders import GIB, H200, LAPTOP, SHAPES, amounts, config

from headrace.errors import ConfigError
from headrace.memory_plan import Machine, Models, make_plan
from headrace.memory_plan.choose import available
from headrace.memory_plan.table import as_json, beside, plan_lines
from headrace.models.config import ModelConfig
from headrace.sync.config import SyncConfig
from headrace.training.config import DistillationConfig, ReferenceConfig

SMALL = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
# Embedding and head 2 · 64,000; a layer: q and o 4,096 each, k and v 2,048 each, three of the MLP 8,192 each, two
# norms of 64; the last norm 64.
SMALL_PARAMETERS = 2 * 64_000 + 2 * (2 * 4_096 + 2 * 2_048 + 3 * 8_192 + 2 * 64) + 64
# Rank 4 on seven projections: 4 · (rows + columns) of each.
SMALL_ADAPTER = 2 * 4 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (64 + 128))


def plan(given=None, shape="1.7b", machine=H200, **models):
    return make_plan(
        given or config(), Models(SHAPES[shape] if isinstance(shape, str) else shape, **models), machine
    )


def test_a_trainer_of_all_weights_holds_masters_casts_gradients_and_moments() -> None:
    found = amounts(plan(config(context=64), SMALL), "trainer")
    assert SMALL_PARAMETERS == 202_048
    assert found["parameters"] == 4 * SMALL_PARAMETERS
    assert found["casts"] == 2 * SMALL_PARAMETERS
    assert found["gradients"] == 4 * SMALL_PARAMETERS
    assert found["optimizer"] == 8 * SMALL_PARAMETERS
    assert "frozen weights" not in found


def test_a_trainer_of_an_adapter_holds_the_frozen_weights_once() -> None:
    found = amounts(plan(config(context=64, lora=4), SMALL), "trainer")
    assert found["frozen weights"] == 2 * SMALL_PARAMETERS
    assert found["parameters"] == 4 * SMALL_ADAPTER
    assert found["optimizer"] == 8 * SMALL_ADAPTER


def test_in_float32_parameters_are_their_own_casts() -> None:
    found = amounts(plan(config(context=64, dtype="float32"), SMALL, LAPTOP), "trainer", "host")
    assert "casts" not in found
    assert found["parameters"] + found["gradients"] + found["optimizer"] == 16 * SMALL_PARAMETERS


def test_activations_of_fused_passes_are_what_layers_save() -> None:
    """0.6B: (4·1024 + 3·2048 + 3·1024 + 3·3072) · 2 bytes + 16 · 4 in each of 28 layers, and 4·1024 · 2 beside."""
    found = amounts(plan(shape="0.6b"), "trainer")
    assert found["activations"] == 16_384 * (28 * (22_528 * 2 + 64) + 8_192)
    assert found["logits and their gradient"] == 16_384 * 151_936 * 6
    # Measured on an H200 with three of four tokens trained: 39.9 GiB (benchmarks/results/train-h200.json).
    kept = sum(found[what] for what in ("parameters", "casts", "gradients", "optimizer", "activations"))
    assert (kept + 0.75 * found["logits and their gradient"]) / GIB == pytest.approx(39.9, rel=0.02)


def test_with_recomputation_layers_keep_their_inputs_and_one_all_of_its_own() -> None:
    found = amounts(plan(config(training={"recompute": True}), "0.6b"), "trainer")
    assert found["activations"] == 16_384 * (28 * 2 * 1024 * 2 + 22_528 * 2 + 64 + 8_192)


def test_logits_beyond_a_twelfth_of_the_device_are_computed_by_pieces() -> None:
    settings = config(context=65_536, training={"micro_batch_tokens": 65_536})
    most = H200.device_total // 12 // (4 * 151_936) * 151_936 * 6
    assert amounts(plan(settings, "0.6b"), "trainer")["logits and their gradient"] == most


def test_an_engine_has_two_sets_of_weights_and_a_page_more_than_its_cache() -> None:
    found = plan(config(context=64, engine={"cache_tokens": 640}), SMALL)
    engine = amounts(found, "engine-0")
    assert engine["weights"] == engine["standby weights"] == 2 * SMALL_PARAMETERS
    # 2 (keys, values) · 2 layers · 2 heads · 16 · 2 bytes, for ten pages of 64 and one that is nobody's
    assert engine["KV cache"] == 11 * 64 * 2 * 2 * 2 * 16 * 2
    eight_bits = plan(
        config(context=64, engine={"cache_tokens": 640, "kv_dtype": "fp8", "weight_dtype": "fp8"}), SMALL
    )
    assert 2 * amounts(eight_bits, "engine-0")["KV cache"] == engine["KV cache"]
    # Rows of two layers: q 64, k and v 32 each, o 64, gate and up 128 each, down 64, a float32 scale each.
    matrices, rows = 2 * (2 * 4_096 + 2 * 2_048 + 3 * 8_192), 2 * 512
    assert amounts(eight_bits, "engine-0")["fp8 copy"] == matrices + 4 * rows


def test_where_only_an_adapter_arrives_there_is_no_second_set() -> None:
    found = plan(config(lora=32), "8b")
    assert found.problem is None
    assert found.config.engine.standby is False
    assert "standby weights" not in amounts(found, "engine-0")
    assert amounts(found, "engine-0")["weights"] == 2 * 8_190_735_360
    asked = plan(config(lora=4, context=64, engine={"standby": True}), SMALL)
    assert amounts(asked, "engine-0")["standby weights"] == 2 * SMALL_PARAMETERS


def test_policies_beside_the_trained_one_are_counted() -> None:
    own = config(context=64, training={"reference": ReferenceConfig()})
    assert amounts(plan(own, SMALL), "trainer")["reference policy"] == 2 * SMALL_PARAMETERS
    adapted = config(context=64, lora=4, training={"reference": ReferenceConfig()})
    assert "reference policy" not in amounts(plan(adapted, SMALL), "trainer")
    other = config(context=64, training={"distillation": DistillationConfig(teacher="large")})
    assert amounts(plan(other, SMALL, teacher_parameters=10**9), "trainer")["teacher"] == 2 * 10**9
    itself = config(context=64, training={"distillation": DistillationConfig(rewards=True)})
    assert amounts(plan(itself, SMALL), "trainer")["teacher"] == 2 * 2 * SMALL_PARAMETERS


def test_images_on_their_way_lie_where_their_transport_has_them() -> None:
    shared = plan(config(context=64), SMALL)
    assert amounts(shared, "weight sync", "host")["image on its way"] == 2 * SMALL_PARAMETERS
    on_card = plan(config(context=64, sync=SyncConfig(transport="cuda_ipc")), SMALL)
    assert amounts(on_card, "trainer")["image on its way"] == 2 * SMALL_PARAMETERS
    changes = plan(config(context=64, sync=SyncConfig(payload="delta")), SMALL)
    assert amounts(changes, "trainer")["last published image"] == 2 * SMALL_PARAMETERS


def test_checkpoints_are_float32_weights_and_moments_and_one_more_than_is_kept() -> None:
    found = amounts(plan(config(context=64, training={"steps": 200}), SMALL), "trainer", "disk")
    assert found["checkpoints"] == 3 * 12 * SMALL_PARAMETERS
    few = amounts(plan(config(context=64, training={"steps": 50}), SMALL), "trainer", "disk")
    assert few["checkpoints"] == 12 * SMALL_PARAMETERS
    assert found["exported models"] == 4 * SMALL_PARAMETERS
    staged = amounts(plan(config(context=64), SMALL), "trainer", "host")
    assert staged["checkpoint or exported model"] == 8 * SMALL_PARAMETERS
    adapted = amounts(plan(config(context=64, lora=4), SMALL), "trainer", "host")
    assert adapted["checkpoint or exported model"] == 4 * SMALL_PARAMETERS


# ── Choosing ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("shape", "lora"), [("0.6b", 0), ("1.7b", 0), ("4b", 0), ("8b", 32), ("14b", 32)])
@pytest.mark.parametrize("context", [2048, 16_384, 32_768])
def test_models_that_fit_by_hand_fit_with_nothing_set(shape: str, lora: int, context: int) -> None:
    found = plan(config(lora=lora, context=context), shape)
    assert found.problem is None
    assert found.used("device") <= available(H200, "device")
    assert found.config.placement == "side_by_side"
    assert found.config.engine.cache_tokens >= context
    assert make_plan(found.config, Models(SHAPES[shape]), H200).config == found.config


def test_the_cache_gets_what_is_left_and_no_more_than_can_be_used() -> None:
    whole = plan(shape="0.6b")
    assert whole.config.engine.cache_tokens == 256 * 2048
    tight = plan(shape="1.7b")
    assert 256 * 2048 / 4 < tight.config.engine.cache_tokens < 256 * 2048
    page = 64 * 114_688
    assert 0 <= available(H200, "device") - tight.used("device") < page


def test_long_sequences_are_recomputed_where_they_would_not_fit_otherwise() -> None:
    assert plan(config(context=16_384), "4b").config.training.recompute is True
    assert plan(config(context=32_768, lora=32), "8b").config.training.recompute is True
    assert plan(config(context=2048), "1.7b").config.training.recompute is False
    assert plan(config(context=2048), "4b").config.training.micro_batch_tokens == 4096


def test_turns_are_taken_only_where_side_by_side_cannot_be() -> None:
    half = Machine(
        host_bytes=500 * GIB, disk_bytes=2000 * GIB, device_bytes=41 * GIB, device_total=41 * GIB, device_name="A"
    )
    settings = config(training={"recompute": True, "micro_batch_tokens": 2048})
    found = plan(settings, "1.7b", half)
    assert (found.problem, found.config.placement) == (None, "turns")
    forced = msgspec.structs.replace(settings, placement="side_by_side")
    refused = plan(forced, "1.7b", half)
    assert refused.problem is not None
    assert refused.remedy == 'with placement = "turns" it fits'


def test_what_is_set_stays() -> None:
    given = config(
        training={"micro_batch_tokens": 3000, "recompute": False},
        engine={"standby": True, "cache_tokens": 4096},
        placement="turns",
    )
    found = plan(given, "0.6b")
    assert found.config == given
    assert found.chosen == {}


def test_a_cpu_counts_its_host_memory_and_keeps_a_cache_of_a_gibibyte() -> None:
    found = plan(config(dtype="float32"), "0.6b", Machine(host_bytes=200 * GIB, disk_bytes=100 * GIB))
    assert found.problem is None
    assert amounts(found, "engine-0", "device") == {}
    assert found.config.engine.cache_tokens == GIB // (2 * 28 * 1024 * 4) // 16 * 16


def test_an_evaluator_is_an_engine_more() -> None:
    alone, both = plan(config(), "1.7b"), plan(config(evaluates=True), "1.7b")
    assert amounts(both, "engine-eval") == amounts(both, "engine-0")
    assert both.config.engine.cache_tokens < alone.config.engine.cache_tokens


# ── Refusing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_fit_is_refused_with_the_arithmetic_and_a_change_that_does() -> None:
    refused = plan(config(), "8b")
    with pytest.raises(ConfigError) as told:
        refused.check()
    text = str(told.value)
    assert "NVIDIA H200" in text
    assert "optimizer 61.0, parameters 30.5, gradients 30.5" in text
    assert told.value.remedy == "with training.lora.rank = 32, an adapter in place of all weights, it fits"
    assert plan(config(lora=32), "8b").problem is None


@pytest.mark.parametrize("gib", [1, 3, 6])
def test_a_small_machine_is_told_what_would_do(gib: int) -> None:
    machine = Machine(host_bytes=gib * GIB, disk_bytes=100 * GIB)
    refused = plan(config(dtype="float32"), "0.6b", machine)
    assert "host memory" in (refused.problem or "")
    assert refused.remedy


def test_a_full_disk_is_told_before_anything_starts() -> None:
    machine = Machine(
        host_bytes=500 * GIB, disk_bytes=GIB, device_bytes=H200.device_bytes, device_total=H200.device_total
    )
    refused = plan(config(), "0.6b", machine)
    assert "the disk" in (refused.problem or "")
    assert "checkpoints" in (refused.problem or "")


def test_the_lines_say_who_needs_what_and_what_was_chosen() -> None:
    lines = plan_lines(plan(shape="1.7b"))
    assert lines[0].startswith("memory plan, GiB: device 135.0 of 135.0, host ")
    assert any(line.startswith("  trainer      device ") and "activations 30.9" in line for line in lines)
    assert lines[-1].startswith("  chosen: ")
    assert "training.recompute = false" in lines[-1]
    told = as_json(plan(shape="1.7b"))
    assert told["fits"] is True
    assert sum(need["bytes"] for need in told["needs"] if need["where"] == "device") == told["used_bytes"]["device"]


def test_what_was_measured_stands_beside_what_was_planned() -> None:
    found = plan(shape="0.6b")
    both = beside(found, {"trainer": {"device": 5}})
    assert both["trainer"]["planned"]["device"] == found.of("trainer", "device") - 700 * 2**20
    assert both["trainer"]["measured"] == {"device": 5}
    assert both["engine-0"]["measured"] == {}

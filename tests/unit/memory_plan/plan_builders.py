"""Configurations, shapes and machines for tests of the memory plan."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.config.run import EvaluationConfig, ModelConfig, RunConfig
from headrace.engine.config import NativeEngineConfig
from headrace.memory_plan import Machine, Need, Plan
from headrace.models.config import ModelConfig as Shape
from headrace.rollout.config import EnvironmentConfig, JsonlTasks
from headrace.training.config import LoraConfig, TrainingConfig

GIB = 1 << 30
H200 = Machine(
    host_bytes=500 * GIB,
    disk_bytes=2000 * GIB,
    device_bytes=int(139.2 * GIB),
    device_total=int(139.8 * GIB),
    device_name="NVIDIA H200",
)
LAPTOP = Machine(host_bytes=16 * GIB, disk_bytes=100 * GIB)


def qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool, vocabulary: int = 151_936) -> Shape:
    return Shape(
        family="qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        tie_embeddings=tied,
    )


SHAPES = {
    "0.6b": qwen3(1024, 3072, 28, 16, tied=True),
    "1.7b": qwen3(2048, 6144, 28, 16, tied=True),
    "4b": qwen3(2560, 9728, 36, 32, tied=True),
    "8b": qwen3(4096, 12288, 36, 32, tied=False),
    "14b": qwen3(5120, 17408, 40, 40, tied=False),
}


def config(
    *,
    lora: int = 0,
    context: int = 2048,
    dtype: str = "bfloat16",
    training: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    evaluates: bool = False,
    **changes: Any,
) -> RunConfig:
    """16 groups of 8, everything else open."""
    tasks = JsonlTasks(path="tasks.jsonl")
    found = RunConfig(
        model=ModelConfig(path="model"),
        tasks=tasks,
        environment=EnvironmentConfig(max_tokens=context // 2),
        engine=NativeEngineConfig(**{"dtype": dtype, "max_context": context, **(engine or {})}),
        training=TrainingConfig(
            **{
                "dtype": dtype,
                "groups_per_batch": 16,
                "group_size": 8,
                "lora": LoraConfig(rank=lora) if lora else None,
                **(training or {}),
            }
        ),
        evaluation=EvaluationConfig(tasks=tasks if evaluates else None),
    )
    return msgspec.structs.replace(found, **changes)


def amounts(plan: Plan, who: str, where: str = "device") -> dict[str, int]:
    needs: list[Need] = [need for need in plan.needs if (need.who, need.where) == (who, where)]
    return {need.what: need.bytes for need in needs}

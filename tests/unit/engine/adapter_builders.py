"""Two adapters of several versions, an engine that serves them, and the same by PEFT."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import engine_builders
import msgspec
import numpy as np
import peft
import torch
from engine_builders import MODEL
from torch import Tensor

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import Interrupt, SwapReport
from headrace.engine.native import NativeEngine
from headrace.models import CausalLM, ModelConfig, random_model
from headrace.records import Turn
from headrace.sync.base import AdapterSpec

A = AdapterSpec(name="a", rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
B = AdapterSpec(name="b", rank=8, alpha=10.0, targets=("self_attn.k_proj", "o_proj", "gate_proj", "up_proj"))
SPECS = {"a": A, "b": B}


def peft_model(
    spec: AdapterSpec,
    version: int,
    *,
    base: int = 0,
    shape: ModelConfig = MODEL,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> CausalLM:
    """The base model of that version with PEFT's layers: what defines this version of the adapter."""
    model = random_model(shape, seed=1000 + base, dtype=dtype, device=device)
    lora = peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets))
    peft.inject_adapter_in_model(lora, model)
    dice = torch.Generator().manual_seed(100 * version + len(spec.name) + ord(spec.name[0]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                new = shape.initializer_range * torch.randn(parameter.shape, generator=dice)
                parameter.data = new.to(device, dtype)
    return model.requires_grad_(False)


@cache
def model_of(name: str | None, version: int, base: int) -> CausalLM:
    return engine_builders.version_of(base) if name is None else peft_model(SPECS[name], version, base=base)


def adapter_weights(model: CausalLM) -> dict[str, Tensor]:
    """By the names that PEFT saves them under."""
    state = peft.get_peft_model_state_dict(model)
    return {f"base_model.model.{name}": tensor for name, tensor in state.items()}


def fill_adapter(engine: NativeEngine, spec: AdapterSpec, model: CausalLM) -> None:
    weights = adapter_weights(model)
    standby = engine.adapter_standby(spec)
    assert standby.keys() == weights.keys()
    for name, buffer in standby.items():
        assert buffer.shape == weights[name].shape
        assert buffer.is_contiguous()
        buffer.copy_(weights[name])


def publish_adapter(engine: NativeEngine, name: str, version: int, interrupt: Interrupt = "keep") -> SwapReport:
    fill_adapter(engine, SPECS[name], model_of(name, version, 0))
    return engine.swap_adapter(name, version, interrupt)


def make_engine(*, resident: Iterable[str] = ("a", "b"), config: dict[str, Any] | None = None, **options: Any):
    """With these adapters at version 1, the base at 0."""
    config = {"max_adapters": 2, "max_adapter_rank": 8, **(config or {})}
    engine = engine_builders.make_engine(config=config, **options)
    for name in resident:
        publish_adapter(engine, name, 1)
    return engine


def replayed(turn: Turn) -> np.ndarray:
    """Its log-probs from its record and the models it names."""
    pairs = sorted({(event.version, event.base) for event in turn.lineage})
    # A turn's tokens name the adapter's version alone, so each pair of versions is given a number of its own.
    numbers = [pairs.index((event.version, event.base)) for event in turn.lineage]
    lineage = [
        msgspec.structs.replace(event, version=number) for event, number in zip(turn.lineage, numbers, strict=True)
    ]
    positions = [event.position for event in turn.lineage]
    passed = len(turn.context) - 1 + np.arange(len(turn.tokens))
    places = np.searchsorted(positions, passed, side="right") - 1
    assert turn.versions.tolist() == [turn.lineage[place].version for place in places]
    versions = np.array(numbers, np.int32)[places]
    relabelled = msgspec.structs.replace(turn, lineage=tuple(lineage), versions=versions)

    def model(number: int) -> CausalLM:
        version, base = pairs[number]
        return model_of(turn.adapter, version, version if base is None else base)

    return replay_logprobs(model, turn.context, relabelled)


def worst_replay(turns: dict[int, Turn]) -> float:
    """Largest difference between a recorded log-prob and the one that PEFT's model gives for the record."""
    return max(float(np.abs(replayed(turn) - turn.logprobs).max()) for turn in turns.values() if len(turn.tokens))

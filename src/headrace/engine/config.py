"""Configuration of the engine. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError


class NativeEngineConfig(Config, tag="native", tag_field="type"):
    """The embedded engine: continuous batching over a paged KV cache."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs. `auto` takes CUDA when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights and KV cache. `auto`: bfloat16 on a GPU that computes in it, float32 elsewhere."""
    kv_dtype: Literal["same", "fp8"] = "same"
    """`fp8`: keys and values are kept in 8 bits (E4M3, no scales), so that the cache holds twice the tokens of
    bfloat16. On CUDA for cards of compute capability 8.9 or above; on the CPU emulated."""
    weight_dtype: Literal["same", "fp8"] = "same"
    """`fp8`: the layers' projections compute in 8 bits (E4M3) with a scale for each row of a weight and for each
    token, from a copy that is made anew at every swap. On CUDA as `kv_dtype`; on the CPU emulated."""
    max_running: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Sequences decoded together."""
    max_context: Annotated[int, Meta(ge=2, le=16777216)] = 2048
    """Longest sequence, prompt and completion together, in tokens."""
    page_size: Annotated[int, Meta(ge=1)] | None = None
    """Tokens in one page of the KV cache. None: 16 on the CPU, 64 on CUDA."""
    cache_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Size of the KV cache, in tokens. None: room for `max_running` sequences of `max_context`, up to 1 GiB on the
    CPU and on CUDA what the memory plan has left; without a run, four fifths of the free memory there."""
    prefill_tokens: Annotated[int, Meta(ge=1)] = 4096
    """Most prompt tokens in one step, beside one token for each sequence that runs."""
    kernels: Literal["fused", "reference"] = "fused"
    """On CUDA: Triton kernels and CUDA graphs, or plain PyTorch. Elsewhere always plain PyTorch."""
    numerics: Literal["fast", "exact"] = "fast"
    """`exact`: a token and its log-prob depend on its own sequence alone, bit for bit, whatever the batch, and the
    trainer recomputes the same bits where it has the same weights."""
    max_adapters: Annotated[int, Meta(ge=0)] = 0
    """LoRA adapters that can be resident at once, each request choosing one or none. 0: none can be loaded."""
    max_adapter_rank: Annotated[int, Meta(ge=1)] = 64
    """Largest rank of an adapter. Each place for one takes that much of every projection's time and memory."""
    standby: bool | None = None
    """Have the second set of weights, into which the next version arrives, and its CUDA graphs from the start.
    False: with the first version that arrives, whose swap then takes longer. None: unless only adapters arrive."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads. None: half of the cores, or all of them when generation and training take turns; of eight cores
    or more an eighth is left for all else."""
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Engine processes."""

    def check(self) -> None:
        if self.cache_tokens is not None and self.cache_tokens < self.max_context:
            raise ConfigError(
                "engine.cache_tokens holds at least one sequence of engine.max_context",
                f"{self.cache_tokens} < {self.max_context}",
                "raise engine.cache_tokens or lower engine.max_context",
            )
        for key in ("kv_dtype", "weight_dtype"):
            if self.numerics == "exact" and getattr(self, key) == "fp8":
                raise ConfigError(
                    f'engine.numerics = "exact" needs engine.{key} = "same"',
                    "fp8",
                    f'leave engine.{key} out, or set engine.numerics = "fast"',
                )
        for key, needed in (("numerics", "fast"), ("weight_dtype", "same")):
            if self.max_adapters and getattr(self, key) != needed:
                raise ConfigError(
                    f'engine.max_adapters above 0 needs engine.{key} = "{needed}"',
                    getattr(self, key),
                    f"leave engine.{key} out, or set engine.max_adapters = 0",
                )


EngineConfig = NativeEngineConfig

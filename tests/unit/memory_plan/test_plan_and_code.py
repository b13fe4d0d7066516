"""The plan's numbers against the code they stand for: what autograd saves, and constants kept in two places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plan_builders import LAPTOP, amounts, config

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.graphs import buckets
from headrace.engine.native.kv import DEFAULT_CACHE_BYTES, DEFAULT_PAGE_SIZE, KvCache
from headrace.engine.native.served import ServedWeights
from headrace.memory_plan import Models, activations, engine, make_plan
from headrace.memory_plan.constants import CPU_CACHE_BYTES
from headrace.models import ModelConfig, PackedContext, logprobs, parameter_count, random_model, trained
from headrace.orchestration.machine import container_room

SHAPE = ModelConfig(
    family="qwen3",
    vocab_size=200,
    hidden_size=64,
    intermediate_size=160,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm=True,
    tie_embeddings=True,
)


def saved_bytes(model: torch.nn.Module, lengths: list[int]) -> int:
    """What a pass keeps for its backward pass, each memory once and without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage
        return tensor

    context = PackedContext(lengths)
    tokens = torch.arange(sum(lengths)) % SHAPE.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model(tokens, context.positions, context)
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_autograd_saves_what_the_plan_says(dtype: torch.dtype, qk_norm: bool) -> None:
    from dataclasses import replace

    shape = replace(SHAPE, qk_norm=qk_norm, family="qwen3" if qk_norm else "llama")
    model = random_model(shape, 0, dtype=dtype)
    lengths = [30, 31, 32, 33] * 4
    planned = activations.pass_bytes(shape, sum(lengths), dtype.itemsize, fused=False, recompute=False)
    assert saved_bytes(model, lengths) == pytest.approx(planned, rel=0.06)
    model.model.recompute = True
    kept = 2 * dtype.itemsize * shape.hidden_size * shape.num_layers * sum(lengths)
    beside = 4 * dtype.itemsize * shape.hidden_size * sum(lengths)
    assert kept <= saved_bytes(model, lengths) <= kept + beside


def test_an_engines_memory_is_what_the_plan_says() -> None:
    shape = SHAPE
    settings = NativeEngineConfig(
        device="cpu", dtype="float32", max_context=64, max_adapters=2, max_adapter_rank=8, cache_tokens=640
    )
    planned = make_plan(
        config(
            context=64,
            dtype="float32",
            engine={"max_adapters": 2, "max_adapter_rank": 8, "cache_tokens": 640, "device": "cpu"},
        ),
        Models(shape),
        LAPTOP,
    )
    found = amounts(planned, "engine-0", "host")
    model = random_model(shape, 0)
    served = ServedWeights(model, settings, 0, "engine")
    assert served.base.set_bytes == pytest.approx(found["weights"], rel=0.01)
    assert served.adapters is not None
    assert 2 * served.adapters.nbytes == pytest.approx(found["adapters"], rel=0.02)
    cache = KvCache.sized(shape, settings, torch.float32, torch.device("cpu"))
    gathered = cache._block.size // shape.num_layers
    assert cache._block.size + gathered == found["KV cache"]
    assert parameter_count(shape) * 4 == found["weights"]


def test_what_stands_in_the_code_stands_in_the_plan() -> None:
    assert activations.CHUNK_ELEMENTS == logprobs.CHUNK_ELEMENTS
    assert activations.LOGITS_SHARE == trained.LOGITS_SHARE
    assert {"host": DEFAULT_PAGE_SIZE["cpu"], "device": DEFAULT_PAGE_SIZE["cuda"]} == engine.PAGE_SIZE
    assert CPU_CACHE_BYTES == DEFAULT_CACHE_BYTES
    from plan_builders import H200

    for most in (1, 5, 64, 100, 256, 300, 1024, 3000):
        given = config(engine={"max_running": most, "standby": False}, lora=4)
        assert engine.graph_count(given, H200) == len(buckets(most))


def test_a_container_leaves_what_its_tightest_group_does(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    root = tmp_path / "root"
    for name, limit, used, cached in (("outer", "1000000", "700000", "100000"), ("outer/inner", "max", "5", "1")):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
        (folder / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\n")
    assert container_room(root, own) == 400_000
    (root / "outer/inner/memory.max").write_text("300")
    assert container_room(root, own) == 296
    assert container_room(root, tmp_path / "none") is None

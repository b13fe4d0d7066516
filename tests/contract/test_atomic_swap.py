"""Law 4 by the thousand: versions are swapped under load on each transport, and no pass sees two of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from native_process import VOCAB, fresh_model, native_process, version_of
from swaps_under_load import REPLAYED, RUNNING, TOLERANCE, check, swapped

from headrace.engine.base import SampleRequest
from headrace.errors import HeadraceError, SyncError
from headrace.models import CausalLM, PackedContext
from headrace.records import WeightVersion
from headrace.testing.serving import take_in

TRANSPORTS = ("in_process", "shared_memory", "files", "http", "collective")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("transport", "swaps"),
    [("shared_memory", 100), *(pytest.param(name, 1000, marks=pytest.mark.full) for name in TRANSPORTS)],
)
def test_no_pass_sees_two_versions(tmp_path: Path, record_property, transport: str, swaps: int):
    load = swapped(tmp_path, swaps, transport=transport)
    assert np.median(load.running[1:]) >= RUNNING / 2, "swaps came under load"
    found = check(load)
    for name, value in vars(found).items():
        record_property(name, value)
    assert (found.mixed, found.mixed_replayed) == (0, 0)
    assert found.versions >= swaps
    assert found.tokens > 10 * swaps
    assert found.replayed > REPLAYED


@pytest.mark.parametrize(
    "torn",
    [
        "one_tensor_one_pass_late",
        "one_by_one",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("half_one_pass_late", "one_left_out")),
    ],
)
def test_a_swap_that_is_not_atomic_is_caught(tmp_path: Path, record_property, torn: str):
    found = check(swapped(tmp_path, 40, entry=f"torn_swaps:{torn}"))
    for name, value in vars(found).items():
        record_property(name, value)
    assert found.mixed > 20


def test_an_engine_that_left_a_tensor_out_says_so_itself(tmp_path: Path):
    async def scenario() -> None:
        async with native_process(tmp_path, entry="torn_swaps:one_left_out") as process:
            with pytest.raises(HeadraceError, match=r"a version that was swapped in \(engine-0, the model\)"):
                await process.engine.fingerprint()
            for number in (1, 2):
                manifest, seal = await process.stage(WeightVersion(number=number, parent=number - 1, step=number))
                await take_in(process.engine, manifest, seal)
                found = await process.engine.fingerprint()
                differ = [
                    spec.name
                    for spec, sent, has in zip(manifest.tensors, seal.checksums, found.checksums, strict=True)
                    if sent != has
                ]
                assert (found.number, differ) == (number, ["model.layers.0.self_attn.k_proj.bias"])

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_version_in_another_dtype_than_is_served_is_refused_before_any_byte_moves(tmp_path: Path):
    remedy = (
        'published as float32 and served as bfloat16: open the sender with dtype = "bfloat16", or the engine with '
        'engine.dtype = "float32"'
    )

    async def scenario() -> None:
        async with native_process(tmp_path, dtype="bfloat16") as process:
            wanted = SampleRequest(id=1, context=np.arange(5, dtype=np.int32), max_tokens=20, seed=3)
            before = await process.engine.sample(wanted)
            manifest, _ = await process.stage(WeightVersion(number=1, parent=0, step=1))
            with pytest.raises(SyncError, match=remedy) as caught:
                await process.engine.announce(manifest)
            assert (caught.value.stage, caught.value.who) == ("announce", "engine-0")
            after = await process.engine.sample(msgspec.structs.replace(wanted, id=2))
            assert after.tokens.tolist() == before.tokens.tolist()
            assert after.versions.tolist() == before.versions.tolist()
            assert 1 not in after.versions

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_one_tensor_of_another_version_moves_nearly_every_token():
    """Not of the engine: of the model, by whose numbers mixes are seen."""
    dice = np.random.default_rng(0)
    tokens = torch.from_numpy(dice.integers(0, VOCAB, (200, 9)))
    lengths, positions = [9] * 200, torch.arange(9).repeat(200)

    def logprobs(model: CausalLM) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(tokens.flatten(), positions, PackedContext(lengths))
            # A sequence's first token sees itself alone, whatever queries and keys are. No request is that short.
            return model.logits(hidden).log_softmax(-1).view(200, 9, -1)[:, 2:]

    whole = logprobs(version_of(1))
    for name, other in version_of(2).named_parameters():
        mixed = fresh_model(1)
        mixed.get_parameter(name).copy_(other)
        seen = ((logprobs(mixed) - whole).abs() > 10 * TOLERANCE).float().mean()
        assert seen > 0.95, (name, float(seen))

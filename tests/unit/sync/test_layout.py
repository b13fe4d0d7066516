from __future__ import annotations

import pytest
import torch

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, joined_names, random_model
from headrace.records import WeightVersion
from headrace.sync.layout import lay_out, neighbours
from headrace.sync.payload.full import image_of, pack, place
from headrace.sync.placement import Placement
from headrace.sync.sender import Sender
from headrace.sync.transport.in_process import InProcessOutlet, Shelf
from headrace.testing.transport import weights

SHAPES = {
    family: ModelConfig(
        family=family,
        vocab_size=31,
        hidden_size=24,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    for family in ("llama", "qwen2", "qwen3")
}


def test_tensors_lie_on_boundaries_and_neighbours_without_a_gap() -> None:
    kinds = {"n": ("float32", (3,), 12), "b.k_proj.weight": ("bfloat16", (2, 5), 20)}
    kinds |= {"b.q_proj.weight": ("bfloat16", (4, 5), 40), "b.v_proj.weight": ("bfloat16", (2, 5), 20)}
    specs, nbytes = lay_out({**kinds, "z": ("int64", (), 8)})
    assert [(spec.name, spec.offset) for spec in specs] == [
        ("n", 0),
        ("b.q_proj.weight", 256),
        ("b.k_proj.weight", 296),
        ("b.v_proj.weight", 316),
        ("z", 512),
    ]
    assert nbytes == 520


def test_without_alignment_there_is_no_gap_and_every_element_lies_at_a_multiple_of_its_size() -> None:
    specs, nbytes = image_of(weights(0), None, align=1)
    assert nbytes == sum(spec.nbytes for spec in specs)
    assert all(spec.offset % getattr(torch, spec.dtype).itemsize == 0 for spec in specs)


@pytest.mark.parametrize("family", SHAPES)
def test_what_the_model_multiplies_together_lies_together(family: str) -> None:
    shape = SHAPES[family]
    kinds = {n: ("float32", tuple(p.shape), p.nbytes) for n, p in random_model(shape, 0).named_parameters()}
    for group in joined_names(shape):
        assert all(neighbours(name, kinds) == group for name in group)


@pytest.mark.parametrize("family", SHAPES)
def test_an_engines_buffers_lie_as_a_published_image_so_that_long_runs_are_copied(family: str) -> None:
    model = random_model(SHAPES[family], 0)
    published = {name: parameter.detach() for name, parameter in random_model(SHAPES[family], 1).named_parameters()}
    engine = NativeEngine(model, NativeEngineConfig(device="cpu", max_context=16, max_running=2), version=0)
    sender = Sender(InProcessOutlet(Shelf()), dtype=torch.float32)
    manifest, _ = sender.send(WeightVersion(number=1, parent=0, step=1), published)
    assert Placement(manifest.tensors, manifest.nbytes, engine.standby, "engine").block is not None


def test_an_image_cut_anywhere_between_elements_is_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.sync.payload import full

    tensors = weights(3, rows=40)
    specs, nbytes = image_of(tensors, torch.bfloat16)
    told: list[int] = []
    monkeypatch.setattr(full, "BUCKET_BYTES", 24)
    image = torch.full((nbytes,), 255, dtype=torch.uint8)
    pack(specs, tensors, image, told.append)
    assert told[-1] == nbytes
    assert len(told) == -(-nbytes // 24)
    for spec in specs:
        tensor = tensors[spec.name]
        assert torch.equal(place(spec, image), tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    covered = torch.zeros(nbytes, dtype=torch.bool)
    for spec in specs:
        covered[spec.offset : spec.offset + spec.nbytes] = True
    assert int(image[~covered].count_nonzero()) == 0

from __future__ import annotations

import pytest

from headrace.errors import SyncError
from headrace.sync.plan import Kind, Move, Shard, assemble, plan

BF16 = "bfloat16"


def kinds(**shapes: tuple[int, ...]) -> dict[str, Kind]:
    return {name.replace("__", "."): Kind(BF16, shape) for name, shape in shapes.items()}


def refusal(sources: dict[str, Kind], targets: dict[str, Kind]) -> str:
    with pytest.raises(SyncError) as caught:
        plan(sources, targets, "engine-3")
    assert (caught.value.stage, caught.value.who) == ("announce", "engine-3")
    return str(caught.value.args[2])


def test_parameters_of_the_same_names_are_moved_whole() -> None:
    both = kinds(a=(4, 2), b=(3,), c=())
    assert plan(both, both) == (Move("a", "a", 0, 4), Move("b", "b", 0, 3), Move("c", "c", 0, 1))


def test_fused_parameters_are_made_of_their_parts_in_order() -> None:
    sources = kinds(
        l__v_proj__weight=(2, 8),
        l__q_proj__weight=(6, 8),
        l__k_proj__weight=(2, 8),
        l__up_proj__bias=(5,),
        l__gate_proj__bias=(5,),
    )
    targets = kinds(l__qkv_proj__weight=(10, 8), l__gate_up_proj__bias=(10,))
    assert plan(sources, targets) == (
        Move("l.q_proj.weight", "l.qkv_proj.weight", 0, 6),
        Move("l.k_proj.weight", "l.qkv_proj.weight", 6, 8),
        Move("l.v_proj.weight", "l.qkv_proj.weight", 8, 10),
        Move("l.gate_proj.bias", "l.gate_up_proj.bias", 0, 5),
        Move("l.up_proj.bias", "l.gate_up_proj.bias", 5, 10),
    )


def test_a_head_that_is_tied_in_the_trainer_comes_from_the_embedding() -> None:
    sources = kinds(model__embed_tokens__weight=(9, 4))
    targets = kinds(model__embed_tokens__weight=(9, 4), lm_head__weight=(9, 4))
    assert plan(sources, targets) == (
        Move("model.embed_tokens.weight", "model.embed_tokens.weight", 0, 9),
        Move("model.embed_tokens.weight", "lm_head.weight", 0, 9),
    )


def test_a_head_of_its_own_cannot_go_to_an_engine_that_ties_it() -> None:
    sources = kinds(model__embed_tokens__weight=(9, 4), lm_head__weight=(9, 4))
    assert refusal(sources, kinds(model__embed_tokens__weight=(9, 4))).endswith("left over: lm_head.weight")


def test_every_fault_of_a_pairing_is_named_at_once() -> None:
    sources = kinds(a=(4, 2), extra=(1,), d=(2, 2))
    targets = {**kinds(a=(4, 3), missing=(1,)), "d": Kind("float32", (2, 2))}
    assert refusal(sources, targets) == (
        "what is published does not fit its parameters; missing: missing; left over: extra; "
        "mismatched: a is bfloat16[4, 2], a here bfloat16[4, 3], d is bfloat16[2, 2], d here float32[2, 2]; "
        'published as bfloat16 and served as float32: open the sender with dtype = "float32", or the engine with '
        'engine.dtype = "bfloat16"'
    )


def test_a_fused_parameter_that_lacks_a_part_or_has_other_rows_is_refused() -> None:
    qkv = kinds(l__qkv_proj__weight=(10, 8))
    assert "missing: l.qkv_proj.weight" in refusal(kinds(l__q_proj__weight=(6, 8), l__k_proj__weight=(2, 8)), qkv)
    parts = kinds(l__q_proj__weight=(6, 8), l__k_proj__weight=(2, 8), l__v_proj__weight=(1, 8))
    assert "l.qkv_proj.weight here bfloat16[10, 8]" in refusal(parts, qkv)


def test_an_adapter_that_binds_to_nothing_is_an_error() -> None:
    adapter = kinds(base_model__model__layers__9__q_proj__lora_A__weight=(4, 8))
    assert "left over: base_model" in refusal(adapter, {})


def test_shards_make_up_a_tensor_row_by_row() -> None:
    tensors = kinds(a=(5, 2), b=(2,))
    shards = [Shard("a", 1, 3, 5), Shard("b", 0, 0, 1), Shard("a", 0, 0, 3), Shard("b", 1, 1, 2)]
    assert assemble(tensors, shards) == {
        "a": (Shard("a", 0, 0, 3), Shard("a", 1, 3, 5)),
        "b": (Shard("b", 0, 0, 1), Shard("b", 1, 1, 2)),
    }


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([Shard("a", 0, 0, 2), Shard("a", 1, 3, 5)], "rows 2 to 3 of a are held by nobody"),
        ([Shard("a", 0, 0, 4), Shard("a", 1, 3, 5)], "rows 3 to 4 of a are held twice"),
        ([Shard("a", 0, 0, 4)], "rows 4 to 5 of a are held by nobody"),
        ([Shard("a", 0, 0, 5), Shard("z", 2, 0, 1)], "z on rank 2 is no tensor of the model"),
    ],
)
def test_shards_with_holes_overlaps_or_strangers_are_refused(shards: list[Shard], why: str) -> None:
    with pytest.raises(SyncError, match=why):
        assemble(kinds(a=(5, 2)), shards)

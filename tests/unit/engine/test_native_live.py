"""What passes read can be read by others, under the names it was published with."""

from __future__ import annotations

import adapter_builders
import engine_builders
import pytest
import torch
from adapter_builders import A, B, adapter_weights, peft_model, publish_adapter
from engine_builders import publish, version_of

from headrace.errors import HeadraceError, SyncError


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_live_is_the_version_that_was_swapped_in_and_not_what_is_in_standby():
    engine = engine_builders.make_engine()
    for number in (1, 2, 3):
        publish(engine, number, "keep")
        engine_builders.fill_standby(engine, number + 1)
        assert same(engine.live(), dict(version_of(number).named_parameters()))


def test_the_live_tensors_of_an_adapter_are_its_own_whatever_others_are_resident():
    engine = adapter_builders.make_engine()
    publish_adapter(engine, "a", 2, "keep")
    assert same(engine.live("a"), adapter_weights(peft_model(A, 2)))
    assert same(engine.live("b"), adapter_weights(peft_model(B, 1)))
    assert same(engine.live(), dict(engine_builders.version_of(0).named_parameters()))


def test_what_has_no_memory_cannot_be_read():
    engine = adapter_builders.make_engine()
    with pytest.raises(HeadraceError, match="adapter 'c' is read where it is resident"):
        engine.live("c")
    engine.sleep(keep_weights=True)
    for adapter in (None, "a"):
        with pytest.raises(HeadraceError, match="wake"):
            engine.live(adapter)
    engine.wake()
    assert same(engine.live("a"), adapter_weights(peft_model(A, 1)))
    with pytest.raises(SyncError, match="serves none"):
        engine_builders.make_engine().live("a")

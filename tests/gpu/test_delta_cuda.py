"""The delta payload with images on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.sync.payload import regions
from headrace.sync.payload.delta import Region, apply, delta_entropy, encode, frames

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("share", [0.0, 0.001, 0.025, 0.5, 1.0])
@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_frames_are_the_same_from_any_device_and_apply_on_any(unit, share, monkeypatch):
    monkeypatch.setattr(regions, "CHUNK_ELEMENTS", 300_000)
    dice = np.random.default_rng(unit)
    before = dice.integers(0, 256, 1_000_000 * unit, dtype=np.uint8).view(f"i{unit}")
    differences = np.where(dice.random(len(before)) < share, dice.integers(-3, 4, len(before)), 0)
    after = before + differences.astype(before.dtype)
    # Of the last chunk nothing is left as it was, so that it travels as it is.
    after[900_000:] = dice.integers(0, 256, 100_000 * unit, dtype=np.uint8).view(f"i{unit}")
    old, new = (torch.from_numpy(array.view(np.uint8)) for array in (before, after))
    whole = [Region(0, unit, len(before))]
    stream = encode(old, new, whole)
    assert encode(old.cuda(), new.cuda(), whole) == stream
    assert delta_entropy(old.cuda(), new.cuda(), whole) == delta_entropy(old, new, whole)
    target = old.cuda()
    for frame in frames(map(memoryview, stream)):
        apply(frame, frame.of(target))
    assert torch.equal(target.cpu(), new)

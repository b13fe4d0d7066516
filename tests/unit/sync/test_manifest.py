from __future__ import annotations

import msgspec
import pytest
import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion, decode, encode
from headrace.sync.base import Manifest
from headrace.sync.manifest import check_manifest, verify
from headrace.sync.payload import full

VERSION = WeightVersion(number=4, parent=3, step=4)


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    specs, nbytes = full.lay_out(tensors, None)
    written = full.write(specs, tensors, torch.empty(nbytes, dtype=torch.uint8))
    return Manifest(version=VERSION, payload="full", transport="in_process", tensors=written, nbytes=nbytes)


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


def announce_error(expected: object) -> str:
    with pytest.raises(SyncError) as caught:
        check_manifest(manifest_of(tensors()), expected, who="engine-0")  # type: ignore[arg-type]
    assert (caught.value.stage, caught.value.who) == ("announce", "engine-0")
    assert "version 4" in str(caught.value)
    return str(caught.value)


def test_a_manifest_that_fits_passes_given_tensors_or_their_descriptions() -> None:
    check_manifest(manifest_of(tensors()), tensors())
    check_manifest(manifest_of(tensors()), {"a": ("float32", (2, 3)), "b": ("bfloat16", (4,))})


def test_a_missing_tensor_is_caught_at_the_announcement() -> None:
    assert "missing: c" in announce_error({**tensors(), "c": torch.ones(1)})


def test_an_unexpected_tensor_is_caught_at_the_announcement() -> None:
    assert "unexpected: b" in announce_error({"a": torch.ones(2, 3)})


def test_a_wrong_shape_and_a_wrong_dtype_are_caught_at_the_announcement() -> None:
    message = announce_error({"a": torch.ones(3, 2), "b": torch.zeros(4)})
    assert "a is float32[2, 3], here float32[3, 2]" in message
    assert "b is bfloat16[4], here float32[4]" in message


def test_many_faults_are_counted_rather_than_listed() -> None:
    message = announce_error({**tensors(), **{f"x{i}": torch.ones(1) for i in range(9)}})
    assert "missing: x0, x1, x2, x3, x4 and 4 more" in message


def test_verify_accepts_equal_bytes_and_names_those_that_differ() -> None:
    manifest = manifest_of(tensors())
    verify(manifest, tensors())
    changed = tensors()
    changed["b"][1] = 1.0
    with pytest.raises(SyncError, match="differ for b"):
        verify(manifest, changed)
    with pytest.raises(SyncError, match="not here: b"):
        verify(manifest, {"a": torch.ones(2, 3)})


def test_checksums_of_all_64_bits_travel() -> None:
    manifest = manifest_of(tensors())
    (spec, *_) = manifest.tensors
    for checksum in (0, 2**63, 2**64 - 1):
        sent = msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(spec, checksum=checksum),))
        assert decode(encode(sent)).tensors[0].checksum == checksum

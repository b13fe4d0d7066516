"""Checking a manifest: does it fit the engine (announce), and has all of it arrived (verify)? No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.base import Manifest
from headrace.sync.digest import digests

if TYPE_CHECKING:
    import torch

_SHOWN = 5


def check_manifest(
    manifest: Manifest,
    expected: Mapping[str, torch.Tensor] | Mapping[str, tuple[str, tuple[int, ...]]],
    who: str = "engine",
) -> None:
    """Raise SyncError("announce", …) unless the manifest has exactly the tensors of `expected`: the engine's own,
    or their (dtype, shape), a dtype being named as in "bfloat16"."""
    wanted = {name: _spec(value) for name, value in expected.items()}
    found = {spec.name: (spec.dtype, tuple(spec.shape)) for spec in manifest.tensors}
    faults = []
    if len(found) != len(manifest.tensors):
        faults.append("a name comes twice")
    if missing := [name for name in wanted if name not in found]:
        faults.append(f"missing: {_some(missing)}")
    if unexpected := [name for name in found if name not in wanted]:
        faults.append(f"unexpected: {_some(unexpected)}")
    mismatched = [
        f"{name} is {_describe(found[name])}, here {_describe(spec)}"
        for name, spec in wanted.items()
        if name in found and found[name] != spec
    ]
    if mismatched:
        faults.append(f"mismatched: {_some(mismatched)}")
    if faults:
        raise SyncError("announce", who, f"version {manifest.version.number}: " + "; ".join(faults))


def verify(manifest: Manifest, tensors: Mapping[str, torch.Tensor], who: str = "engine") -> None:
    """Raise SyncError("verify", …) unless every tensor's bytes have the checksum the manifest gives."""
    names = [spec.name for spec in manifest.tensors]
    if absent := [name for name in names if name not in tensors]:
        raise SyncError("verify", who, f"version {manifest.version.number}: not here: {_some(absent)}")
    found = digests([tensors[name] for name in names])
    wrong = [spec.name for spec, digest in zip(manifest.tensors, found, strict=True) if spec.checksum != digest]
    if wrong:
        raise SyncError("verify", who, f"version {manifest.version.number}: checksums differ for {_some(wrong)}")


def _spec(value: torch.Tensor | tuple[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, tuple):
        return value[0], tuple(value[1])
    return str(value.dtype).removeprefix("torch."), tuple(value.shape)


def _describe(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]}{list(spec[1])}"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"

"""Layout conversion as data: which rows of which published tensor go to which rows of which engine parameter.

    published                       engine
    q_proj.weight   rows 0…Q   ──▶  qkv_proj.weight  rows 0…Q
    k_proj.weight   rows 0…K   ──▶  qkv_proj.weight  rows Q…Q+K        fused parameters
    v_proj.weight   rows 0…K   ──▶  qkv_proj.weight  rows Q+K…Q+2K
    embed_tokens.weight        ──▶  embed_tokens.weight, lm_head.weight  tied in the trainer, apart in the engine

A plan is made once for each pairing and checked for coverage: every row of every engine parameter is written
exactly once and no published tensor is left over, or the pairing is refused. Shards of a trainer's tensor along
the first dimension are published as one tensor; `assemble` checks that they make it up. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.errors import SyncError

_SHOWN = 5

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parts, along the first dimension, of the parameters that engines fuse."""
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Where a parameter comes from if nothing is published under its own name."""


class Kind(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


class Move(NamedTuple):
    """All rows of `source` go to rows `first` to `last` of `target`."""

    source: str
    target: str
    first: int
    last: int


class Shard(NamedTuple):
    """Rows `first` to `last` of a trainer's tensor, on one of its ranks."""

    name: str
    rank: int
    first: int
    last: int


def plan(sources: Mapping[str, Kind], targets: Mapping[str, Kind], who: str = "engine") -> tuple[Move, ...]:
    """The moves, in the order of the targets. Raises SyncError("announce", …) where the two do not fit."""
    moves: list[Move] = []
    missing: list[str] = []
    mismatched: list[str] = []
    dtypes: set[tuple[str, str]] = set()
    for name, kind in targets.items():
        parts = _parts(name, sources)
        if not parts:
            missing.append(name)
            continue
        first = 0
        for part in parts:
            source = sources[part]
            moves.append(Move(part, name, first, first + source.rows))
            first += source.rows
            if source.dtype != kind.dtype or source.shape[1:] != kind.shape[1:]:
                mismatched.append(f"{part} is {source}, {name} here {kind}")
            if source.dtype != kind.dtype:
                dtypes.add((source.dtype, kind.dtype))
        if first != kind.rows or len(sources[parts[0]].shape) != len(kind.shape):
            mismatched.append(f"{' + '.join(parts)} is {_sum(sources, parts)}, {name} here {kind}")
    used = {move.source for move in moves}
    faults = [
        f"{what}: {some(names)}"
        for what, names in (
            ("missing", missing),
            ("left over", [name for name in sources if name not in used]),
            ("mismatched", list(dict.fromkeys(mismatched))),
        )
        if names
    ]
    faults += [
        f'published as {published} and served as {served}: open the sender with dtype = "{served}", or the engine '
        f'with engine.dtype = "{published}"'
        for published, served in sorted(dtypes)
    ]
    if faults:
        raise SyncError("announce", who, "what is published does not fit its parameters; " + "; ".join(faults))
    return tuple(moves)


def assemble(tensors: Mapping[str, Kind], shards: Iterable[Shard]) -> dict[str, tuple[Shard, ...]]:
    """Each tensor's shards in the order of their rows. Raises SyncError("announce", …) unless they make up every
    tensor, each row once."""
    found: dict[str, list[Shard]] = {name: [] for name in tensors}
    faults: list[str] = []
    for shard in shards:
        if shard.name in found:
            found[shard.name].append(shard)
        else:
            faults.append(f"{shard.name} on rank {shard.rank} is no tensor of the model")
    for name, parts in found.items():
        parts.sort(key=lambda shard: (shard.first, shard.last))
        end = 0
        for shard in parts:
            if shard.first != end:
                what = "twice" if shard.first < end else "by nobody"
                rows = sorted((shard.first, end))
                faults.append(f"rows {rows[0]} to {rows[1]} of {name} are held {what}")
            end = max(end, shard.last)
        if end != tensors[name].rows:
            faults.append(f"rows {end} to {tensors[name].rows} of {name} are held by nobody")
    if faults:
        raise SyncError("announce", "trainer", "the shards do not make up the model: " + some(faults))
    return {name: tuple(parts) for name, parts in found.items()}


def some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _parts(target: str, sources: Mapping[str, Kind]) -> tuple[str, ...]:
    """The published tensors that a parameter is made of; empty where there are none."""
    if target in sources:
        return (target,)
    for fused, parts in FUSED.items():
        pieces = target.split(".")
        if fused in pieces:
            place = pieces.index(fused)
            names = tuple(".".join([*pieces[:place], part, *pieces[place + 1 :]]) for part in parts)
            return names if all(name in sources for name in names) else ()
    tied = TIED.get(target)
    return (tied,) if tied is not None and tied in sources else ()


def _sum(sources: Mapping[str, Kind], parts: Sequence[str]) -> str:
    return " + ".join(str(sources[part]) for part in parts)

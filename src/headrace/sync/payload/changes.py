"""Which elements differ between two versions of the weights, by how much, and adding that to the older one.

Elements are whole numbers of 1, 2, 4 or 8 bytes: the stored bits, whatever they mean. Sums and differences wrap
around, so old + (new - old) is new for all of them. For floating-point numbers of one sign the next number is
the next whole number, which makes the differences of one step small.

On the CPU this is NumPy alone: a torch operation in a thread of its own starts a second pool of OpenMP threads, and
that slows every other torch operation of the process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Large enough that calls cost little, small enough for a cache. A multiple of 8: the flags are also read in words.
_BLOCK = 1 << 19
# With fewer changes than one in so many, most words of eight flags are zero and passing over them pays.
_SPARSE = 16


class Changes(NamedTuple):
    """On the host, whatever device the weights are on."""

    gaps: NDArray[np.uint32]
    """Unchanged elements before the first changed one, then between each and the next."""
    differences: NDArray[Any]
    """new - old of the changed elements, in the unit's signed type."""


def whole_numbers(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """The bytes of a contiguous tensor as flat signed numbers of `unit` bytes, without a copy."""
    if not tensor.numel():
        # An empty tensor may have strides that no view of another type accepts.
        return tensor.new_empty(0, dtype=SIGNED[unit])
    return tensor.detach().view(-1).view(SIGNED[unit])


def find(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Both flat, on one device and of a signed integer type."""
    if old.device.type == "cpu":
        return _find_numpy(old.numpy(), new.numpy())
    return _find_torch(old, new)


def positions_of(gaps: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The index of each changed element. They increase strictly, whatever the gaps."""
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(len(gaps))
    return positions


def add(target: torch.Tensor, positions: NDArray[np.int64], differences: NDArray[Any]) -> None:
    """Add to the elements at `positions`, each of which comes once and is within `target`."""
    if target.device.type == "cpu":
        target.numpy()[positions] += differences
    else:
        _add_torch(target, positions, differences)


def replace(target: torch.Tensor, elements: torch.Tensor) -> None:
    """Copy `elements`, which are on the CPU."""
    if target.device.type == "cpu":
        np.copyto(target.numpy(), elements.numpy())
    else:
        target.copy_(elements)


def _find_torch(old: torch.Tensor, new: torch.Tensor) -> Changes:
    positions = (old != new).nonzero().view(-1)
    differences = new[positions] - old[positions]
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    return Changes(gaps.to(torch.int32).cpu().numpy().view(np.uint32), differences.cpu().numpy())


def _add_torch(target: torch.Tensor, positions: NDArray[np.int64], differences: NDArray[Any]) -> None:
    # A frame's positions fit 32 bits: half as many bytes to copy.
    where = torch.from_numpy(positions.astype(np.int32)).to(target.device).long()
    target[where] += torch.from_numpy(differences).to(target.device)


def _find_numpy(old: NDArray[Any], new: NDArray[Any]) -> Changes:
    flags = np.zeros(min(_BLOCK, -(-len(old) // 8) * 8), np.bool_)
    gaps, differences = [np.empty(0, np.uint32)], [old[:0]]
    unchanged, sparse = 0, True
    for start in range(0, len(old), _BLOCK):
        before, after = old[start : start + _BLOCK], new[start : start + _BLOCK]
        np.not_equal(before, after, out=flags[: len(before)])
        flags[len(before) :] = False
        changed = _where_few(flags) if sparse else np.flatnonzero(flags)
        # As the block before, so this one: counting first would cost more than a wrong guess now and then.
        sparse = len(changed) * _SPARSE < len(flags)
        if len(changed):
            differences.append(after[changed] - before[changed])
            gaps.append(_gaps(changed, unchanged))
            unchanged = -1 - int(changed[-1])
        unchanged += len(before)
    return Changes(np.concatenate(gaps), np.concatenate(differences))


def _gaps(positions: NDArray[np.int64], before_first: int) -> NDArray[np.uint32]:
    gaps = np.empty(len(positions), np.uint32)
    gaps[0] = before_first + positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    return gaps


def _where_few(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """np.flatnonzero for a multiple of eight flags of which few are set: passes over words in which none is."""
    words = flags.view(np.uint64)
    some = np.flatnonzero(words != 0)
    within = np.flatnonzero(words[some].view(np.bool_))
    found = some[within >> 3]
    found <<= 3
    within &= 7
    found += within
    return found

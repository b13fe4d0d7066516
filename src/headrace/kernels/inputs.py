"""What a captured step does first: fetch the tokens that were sampled last, and bring its page table up to date.

The reference is the docstring of `prepare`; the engine's runners are compared as a whole.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

BLOCK = 256


@triton.jit(do_not_specialize=["tokens", "updates"])
def _prepare(given, slots, last_token, out, tokens, places, pages, table, updates, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(given + i, i < tokens, 0)
    slot = tl.load(slots + i, i < tokens, 0)
    sampled = tl.load(last_token + slot, (i < tokens) & (token < 0), 0)
    tl.store(out + i, tl.where(token < 0, sampled, token), i < tokens)
    place = tl.load(places + i, i < updates, -1)
    page = tl.load(pages + i, i < updates, 0)
    tl.store(table + place, page, place >= 0)


def prepare(
    given: Tensor, slots: Tensor, last_token: Tensor, out: Tensor, places: Tensor, pages: Tensor, table: Tensor
) -> None:
    """out[t] = given[t], or last_token[slots[t]] where that is negative; table.flat[places[u]] = pages[u] where the
    place is not negative. All int32."""
    grid = (max(1, launch.blocks(max(len(given), len(places)), BLOCK)),)
    _prepare[grid](given, slots, last_token, out, len(given), places, pages, table, len(places), BLOCK=BLOCK)

"""The KV cache's tensors.

Shape letters: G key/value heads, N pages, S tokens of a page, D head size, T tokens, L tokens of a gathered
context (whole pages), B sequences.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.memory import Block
from headrace.engine.native.pages import pages_for
from headrace.models import ModelConfig, to_float8

DEFAULT_CACHE_BYTES = 2**30
CUDA_CACHE_SHARE = 0.8
"""Of the memory that is free once the weights are there."""
DEFAULT_PAGE_SIZE = {"cpu": 16, "cuda": 64}
FLOAT8 = torch.float8_e4m3fn
MOST_COPIED_BYTES = 2**28
"""At once, and so of the temporary that holds them."""


class KvCache:
    """Keys and values of every layer, (G, N, S, D) each: a head's page is one contiguous block.

    The last page belongs to nobody: what is not to be kept is written there. `dtype` is that of what is written and
    gathered; a cache that stores float8 rounds the one and widens the other.
    """

    def __init__(
        self,
        model: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ):
        self._model = model
        self.pages, self.page_size = pages, page_size
        self.heads, self.dim = model.num_kv_heads, model.head_dim
        self.dtype, self.device = dtype, device
        self.stored = stored or dtype
        shape = (model.num_layers, 2, self.heads, pages + 1, page_size, self.dim)
        self._block = Block(math.prod(shape) * self.stored.itemsize, device)
        self.restore()
        self._data = self._block.bytes.view(self.stored).view(shape)
        # Indexed copies are not implemented for float8: they move bytes.
        self._raw = self._data.view(torch.uint8) if self.stored == FLOAT8 else self._data
        self._pages = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self._raw]
        self._rows = [(layer[0].flatten(0, 2), layer[1].flatten(0, 2)) for layer in self._raw]
        self._head_page = np.arange(self.heads)[:, None] * (pages + 1)
        self._head_row = self._head_page * page_size
        self._work = self._no_work()

    @staticmethod
    def bytes_per_token(model: ModelConfig, stored: torch.dtype) -> int:
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * stored.itemsize

    @classmethod
    def sized(
        cls,
        model: ModelConfig,
        config: NativeEngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        reserve: int = 0,
    ) -> KvCache:
        """As the configuration says, or room for all sequences as far as memory goes beyond `reserve` bytes."""
        page_size = config.page_size or DEFAULT_PAGE_SIZE[device.type]
        stored = FLOAT8 if config.kv_dtype == "fp8" else dtype
        tokens = config.cache_tokens
        if tokens is None:
            spare = DEFAULT_CACHE_BYTES
            if device.type == "cuda":
                spare = int(max(0, torch.cuda.mem_get_info(device)[0] - reserve) * CUDA_CACHE_SHARE)
            affordable = spare // cls.bytes_per_token(model, stored)
            tokens = max(config.max_context, min(config.max_running * config.max_context, affordable))
        return cls(model, pages_for(tokens, page_size), page_size, dtype, device, stored)

    def smaller(self, pages: int) -> KvCache:
        """Another one with so many pages, in place of this one, whose memory was given back."""
        return KvCache(self._model, pages, self.page_size, self.dtype, self.device, self.stored)

    def release(self) -> None:
        """Give the memory back; what it held is lost. Nothing reads or writes the cache until `restore`."""
        self._block.release()
        self._work = self._no_work()

    def restore(self) -> None:
        """Have memory again, all zeros, at the same addresses."""
        if not self._block.resident:
            self._block.restore()
            if self.device.type == "cuda":
                # As on the host: what a fault reads is the same every time.
                self._block.bytes.zero_()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values), (G, N, S, D) each, as stored."""
        return self._data[layer][0], self._data[layer][1]

    @property
    def page_bytes(self) -> int:
        """Of one layer's keys, all heads, once gathered."""
        return self.heads * self.page_size * self.dim * self.dtype.itemsize

    def row_index(self, pages_t: np.ndarray, positions_t: np.ndarray, keep_t: np.ndarray | None = None) -> Tensor:
        """Where `write` puts tokens: the page that holds each and its position in its sequence.

        Those that `keep_t` excludes go to nobody's page.
        """
        if keep_t is not None:
            pages_t = np.where(keep_t, pages_t, self.pages)
        rows = pages_t * self.page_size + positions_t % self.page_size
        return self._to_device((rows + self._head_row).ravel())

    def page_index(self, pages_bp: np.ndarray) -> Tensor:
        """What `gather` reads: equally many pages for each sequence."""
        return self._to_device((pages_bp.ravel() + self._head_page).ravel())

    def write(self, layer: int, rows: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> None:
        keys, values = self._rows[layer]
        keys.index_copy_(0, rows, self._to_store(k_tgd.transpose(0, 1).reshape(-1, self.dim)))
        values.index_copy_(0, rows, self._to_store(v_tgd.transpose(0, 1).reshape(-1, self.dim)))

    def gather_keys(self, layer: int, index: Tensor, sequences: int, beyond: Tensor | None = None) -> Tensor:
        """(G, B, L, D), valid until the next gathering of keys.

        Beyond a sequence's end, pages hold whatever others left there, perhaps what is not a number; `beyond` are
        the rows of (G, B, L) that are to be zeros instead.
        """
        return self._gather(self._pages[layer][0], index, sequences, beyond, 0)

    def gather_values(self, layer: int, index: Tensor, sequences: int, beyond: Tensor | None = None) -> Tensor:
        return self._gather(self._pages[layer][1], index, sequences, beyond, 1)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages, all layers. No target is a source, or another's target; a source may have several."""
        pages = torch.tensor([sources, targets], device=self.device)
        at_once = max(1, MOST_COPIED_BYTES // (self._raw.nbytes // (self.pages + 1)))
        for read, written in zip(*(row.split(at_once) for row in pages), strict=True):
            self._raw.index_copy_(3, written, self._raw.index_select(3, read))

    def _to_store(self, x: Tensor) -> Tensor:
        return to_float8(x).view(torch.uint8) if self.stored == FLOAT8 else x

    def _gather(self, pages: Tensor, index: Tensor, sequences: int, beyond: Tensor | None, work: int) -> Tensor:
        # Buffers kept between calls: fresh ones of megabytes come from mmap, and faulting them in costs
        # several times the copy (measured: 256 sequences of 64 tokens, 1.3 ms a layer against 0.25 ms).
        wanted = len(index) * self.page_size * self.dim
        if self._work[work].numel() < wanted:
            self._work[work] = torch.empty(wanted, dtype=self.dtype, device=self.device)
        out = self._work[work][:wanted].view(-1, self.page_size, self.dim)
        if self.stored == FLOAT8:
            out.copy_(pages.index_select(0, index).view(FLOAT8))
        else:
            torch.index_select(pages, 0, index, out=out)
        if beyond is not None:
            out.view(-1, self.dim).index_fill_(0, beyond, 0.0)
        return out.view(self.heads, sequences, -1, self.dim)

    def _no_work(self) -> list[Tensor]:
        return [torch.empty(0, dtype=self.dtype, device=self.device) for _ in range(2)]

    def _to_device(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.device, non_blocking=True)

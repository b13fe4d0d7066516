"""The layers' projections in FP8, beside the live weights: what a pass reads where the configuration says so."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.memory import Block
from headrace.errors import ConfigError
from headrace.models import CausalLM, ModelConfig, QuantizedRows, joined_names, quantize_rows, side_by_side

FLOAT8 = torch.float8_e4m3fn
ALIGN_BYTES = 256
LEAST_CAPABILITY = (8, 9)
"""Of a card whose tensor cores and conversions know FP8."""
MULTIPLE = 16
"""What the sizes of a product in FP8 are multiples of."""


class _Product(NamedTuple):
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    rows: QuantizedRows


class QuantizedWeights:
    """One set of float8 copies, made from the live parameters whenever those change, at addresses that stay.

    Parameters of one product lie side by side (`Weights` put them there) and are quantised as one. Everything
    happens on the current stream, without waiting, so that whoever calls between two passes separates them. A
    parameter is known by its identity: where its data lies changes with every swap.
    """

    def __init__(self, model: CausalLM, *, fused: bool):
        """`fused`: by the Triton kernel."""
        self._fused = fused
        named = dict(model.named_parameters())
        products = {names: tuple(named[name] for name in names) for names in product_names(model.config)}
        sizes = [(sum(len(weight) for weight in weights), weights[0].shape[1]) for weights in products.values()]
        self._block = Block(sum(_bytes(*size) for size in sizes), model.head_weight.device)
        self._block.restore()
        self._products: list[_Product] = []
        self._places: dict[int, tuple[QuantizedRows, int, int]] = {}
        """By a parameter's identity: its product's rows, and which of them are its own: first and one past."""
        at = 0
        for (names, weights), size in zip(products.items(), sizes, strict=True):
            rows = _rows_at(self._block.bytes[at : at + _bytes(*size)], *size)
            self._products.append(_Product(names, weights, rows))
            first = 0
            for weight in weights:
                self._places[id(weight)] = rows, first, first + len(weight)
                first += len(weight)
            at += _bytes(*size)
        self.refresh()

    def rows_of(self, weights: tuple[Tensor, ...]) -> QuantizedRows | None:
        """Those of parameters that follow one another in a product; None for one that is not quantised."""
        if id(weights[0]) not in self._places:
            return None
        rows, first, _ = self._places[id(weights[0])]
        last = self._places[id(weights[-1])][2]
        return QuantizedRows(rows.values[first:last], rows.scales[first:last])

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Follow the live parameters, or those of these names: a launch for each product.

        Without memory there is nothing to do: `restore` follows all of them.
        """
        if not self._block.resident:
            return
        for product in self._products:
            if names is None or any(name in names for name in product.names):
                weight = side_by_side([parameter.data for parameter in product.parameters])
                assert weight is not None  # as Weights laid them
                self._quantize(weight, product.rows)

    def release(self) -> None:
        """Give the memory back, once the device has done what was begun."""
        self._block.release()

    def restore(self) -> None:
        """Have memory again, at the same addresses, and follow the live parameters, which are there already."""
        if not self._block.resident:
            self._block.restore()
            self.refresh()

    def _quantize(self, weight: Tensor, rows: QuantizedRows) -> None:
        if self._fused:
            from headrace.kernels.quantize import quantize_rows as quantize_into

            with torch.cuda.device_of(weight):
                quantize_into(weight, rows.values, rows.scales)
        else:
            for kept, new in zip(rows, quantize_rows(weight), strict=True):
                kept.copy_(new)


def product_names(config: ModelConfig) -> list[tuple[str, ...]]:
    """The weights that are quantised, product by product: those of q, k, v; o; gate, up; down."""
    joined = [names for names in joined_names(config) if names[0].endswith(".weight")]
    alone = [
        (f"model.layers.{layer}.{name}.weight",)
        for layer in range(config.num_layers)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    return [*joined, *alone]


def check_fp8(config: NativeEngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError where FP8 is asked for and the card, the dtype or the model's sizes do not allow it."""
    wanted = [f"engine.{key}" for key in ("kv_dtype", "weight_dtype") if getattr(config, key) == "fp8"]
    if device.type != "cuda" or not wanted:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f'on CUDA {" and ".join(wanted)} = "fp8" needs a card of compute capability 8.9 or above',
            f"{torch.cuda.get_device_name(device)}, {capability[0]}.{capability[1]}",
            f'set {" and ".join(wanted)} = "same"',
        )
    if config.weight_dtype != "fp8" or config.kernels != "fused":
        return
    if dtype != torch.bfloat16:
        raise ConfigError(
            'on CUDA engine.weight_dtype = "fp8" needs engine.dtype = "bfloat16"',
            str(dtype).removeprefix("torch."),
            'set engine.dtype = "bfloat16", or engine.weight_dtype = "same"',
        )
    sizes = (model.hidden_size, model.q_size, model.q_size + 2 * model.kv_size, model.intermediate_size)
    if any(size % MULTIPLE for size in sizes):
        raise ConfigError(
            f'engine.weight_dtype = "fp8" needs projections whose sizes are multiples of {MULTIPLE}',
            sizes,
            'set engine.weight_dtype = "same"',
        )


def _bytes(rows: int, width: int) -> int:
    return _aligned(4 * rows) + _aligned(rows * width)


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _rows_at(block: Tensor, rows: int, width: int) -> QuantizedRows:
    """The scales, then the values."""
    scales = block[: 4 * rows].view(torch.float32).view(rows, 1)
    first = _aligned(4 * rows)
    return QuantizedRows(block[first : first + rows * width].view(FLOAT8).view(rows, width), scales)

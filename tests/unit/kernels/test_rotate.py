from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels.rotate import rotate, rotate_and_write
from headrace.models.ops import ReferenceOps, Rotation

reference = ReferenceOps()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
SIZES = [(1, 1, 1, 32), (5, 4, 2, 64), (3, 14, 2, 80), (2, 32, 8, 128)]  # tokens, heads, groups, dim


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rotation_of(tokens: int, dim: int, dtype: torch.dtype, *, normed: bool) -> Rotation:
    angles = 7 * torch.rand(tokens, 1, dim // 2, generator=torch.Generator().manual_seed(9))
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    weights = [draw(dim, dtype=dtype, seed=seed) for seed in (7, 8)] if normed else [None, None]
    return Rotation(cos.to(DEVICE, dtype), sin.to(DEVICE, dtype), *weights, 1e-5)


def expected_of(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    if rotation.q_norm is not None and rotation.k_norm is not None:
        q = reference.rms_norm(q, rotation.q_norm, rotation.eps)
        k = reference.rms_norm(k, rotation.k_norm, rotation.eps)
    return reference.rope(q, k, rotation.cos, rotation.sin)


def projected(tokens: int, heads: int, groups: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as column views of one product."""
    joined = draw(tokens, (heads + 2 * groups) * dim, dtype=dtype)
    parts = joined.split([heads * dim, groups * dim, groups * dim], -1)
    q, k, v = (part.view(tokens, -1, dim) for part in parts)
    return q, k, v


def assert_same(found: Tensor, expected: Tensor, *, normed: bool) -> None:
    assert found.dtype == expected.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    elif not normed:
        assert torch.equal(found, expected)
    else:  # a float32 sum in another order may fall on the other side of a rounding
        step = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, atol=4 * step, rtol=4 * step)
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_queries_and_keys_turn_as_in_the_reference(sizes, normed, dtype):
    q, k, _ = projected(*sizes, dtype)
    rotation = rotation_of(sizes[0], sizes[-1], dtype, normed=normed)
    q_out, k_out = rotate(q, k, rotation)
    assert q_out.is_contiguous()
    assert k_out.is_contiguous()
    q_expected, k_expected = expected_of(q, k, rotation)
    assert_same(q_out, q_expected, normed=normed)
    assert_same(k_out, k_expected, normed=normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", SIZES)
def test_keys_and_values_are_written_to_their_rows_and_nowhere_else(sizes, index, dtype):
    tokens, _, groups, dim = sizes
    q, k, v = projected(*sizes, dtype)
    rotation = rotation_of(tokens, dim, dtype, normed=True)
    keys, values = (draw(groups, 3, 4, dim, dtype=dtype, seed=seed) for seed in (3, 4))
    rows = torch.tensor([7, 11, 0, 4, 5][:tokens], dtype=index, device=DEVICE)
    q_rotated, k_rotated = rotate(q, k, rotation)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys.view(groups, 12, dim)[:, rows.long()] = k_rotated.transpose(0, 1)
    expected_values.view(groups, 12, dim)[:, rows.long()] = v.transpose(0, 1)
    assert torch.equal(rotate_and_write(q, k, v, rotation, keys, values, rows), q_rotated)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


def test_a_negative_row_writes_nothing_and_still_turns_the_query():
    q, k, v = projected(3, 2, 2, 32, torch.float32)
    rotation = rotation_of(3, 32, torch.float32, normed=False)
    keys, values = (draw(2, 2, 4, 32, dtype=torch.float32, seed=seed) for seed in (3, 4))
    expected_keys, expected_values = keys.clone(), values.clone()
    rows = torch.tensor([-1, 2, -5], device=DEVICE)
    q_out = rotate_and_write(q, k, v, rotation, keys, values, rows)
    q_rotated, k_rotated = rotate(q, k, rotation)
    expected_keys[:, 0, 2], expected_values[:, 0, 2] = k_rotated[1], v[1]
    assert torch.equal(q_out, q_rotated)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


def test_a_cache_of_another_dtype_holds_the_values_cast():
    q, k, v = projected(2, 4, 2, 32, torch.float32)
    rotation = rotation_of(2, 32, torch.float32, normed=True)
    keys, values = (torch.zeros(2, 1, 4, 32, dtype=torch.float16, device=DEVICE) for _ in range(2))
    rotate_and_write(q, k, v, rotation, keys, values, torch.tensor([3, 1], device=DEVICE))
    k_rotated = rotate(q, k, rotation)[1]
    assert torch.equal(keys[:, 0, [3, 1]], k_rotated.half().transpose(0, 1))
    assert torch.equal(values[:, 0, [3, 1]], v.half().transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_equals_the_token_in_a_batch_bit_for_bit(dtype):
    q, k, _ = projected(9, 8, 2, 128, dtype)
    cos, sin, *norms = rotation_of(9, 128, dtype, normed=True)
    q_together, k_together = rotate(q, k, Rotation(cos, sin, *norms))
    for token in (0, 4, 8):
        one = slice(token, token + 1)
        q_alone, k_alone = rotate(q[one], k[one], Rotation(cos[one], sin[one], *norms))
        assert torch.equal(q_alone[0], q_together[token])
        assert torch.equal(k_alone[0], k_together[token])


def test_heads_that_lie_apart_are_refused():
    q, k, _ = projected(2, 4, 2, 32, torch.float32)
    rotation = rotation_of(2, 32, torch.float32, normed=False)
    with pytest.raises(ValueError, match="heads must lie together"):
        rotate(q[:, ::2], k, rotation)

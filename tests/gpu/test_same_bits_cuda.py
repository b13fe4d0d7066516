"""Bits that the kernels promise, asked of the kernels themselves.

The tests are those of tests/unit, which run in Triton's interpreter where there is no GPU. There some machines can
compare values only; here bits are compared.
"""

from __future__ import annotations

import pytest
import test_attention_kernels as attention
import test_exact as exact
import test_matmul as matmul

from interpreted import SameBits

pytestmark = pytest.mark.gpu

test_a_row_alone = matmul.test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit
test_a_projection_alone = matmul.test_a_projection_alone_equals_its_columns_of_a_joint_product_bit_for_bit
test_a_sequence_in_pieces = exact.test_the_kernels_give_a_sequence_in_pieces_the_same_bits
test_layers_side_by_side = exact.test_layers_side_by_side_are_one_product_with_the_same_bits
test_a_query = (
    attention.test_with_the_invariant_tile_a_query_gives_the_same_bits_alone_in_a_batch_in_a_chunk_and_packed
)


@pytest.fixture(autouse=True)
def nothing_but_bits_is_compared(same_bits: SameBits):
    yield
    assert same_bits.compared == "bits"

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training_builders import batch_of, episode, ints, tiny_model, turn

from headrace.models import Ops, TrainedOps
from headrace.training.backends import native, shared_prefix
from headrace.training.backends.shared_prefix import prefix_tree
from headrace.training.packing import pack, training_sequences


def test_equal_prefixes_are_one_node_wherever_the_sequences_stand() -> None:
    sequences = [[1, 2, 3, 4], [7, 8], [1, 2, 3, 5, 6], [1, 9], [7, 8]]
    tokens = np.array([token for sequence in sequences for token in sequence])
    tree = prefix_tree(tokens, np.array([len(sequence) for sequence in sequences]))
    prefixes = [tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))]
    for a, node_a in zip(prefixes, tree.nodes_t, strict=True):
        for b, node_b in zip(prefixes, tree.nodes_t, strict=True):
            assert (a == b) == (node_a == node_b)
    assert len(tree.tokens_u) == len(set(prefixes)) == 9
    assert [prefixes[t] for t in tree.tokens_u] == [
        prefixes[list(tree.nodes_t).index(node)] for node in range(len(tree.tokens_u))
    ]
    assert tree.saving == pytest.approx(1 - 9 / 15)


def test_a_prefix_of_another_sequence_and_negative_order_are_no_trouble() -> None:
    tree = prefix_tree(np.array([300, 1, 300, 2, 300, 1, 5]), np.array([2, 2, 3]))
    assert len(tree.tokens_u) == 4
    assert tree.nodes_t[0] == tree.nodes_t[2] == tree.nodes_t[4]
    assert tree.nodes_t[1] == tree.nodes_t[5]


@pytest.mark.parametrize("ops", [None, TrainedOps()], ids=["reference", "fused"])
@pytest.mark.parametrize(
    "way", [shared_prefix.SpreadContext, shared_prefix.BranchContext, shared_prefix.RaggedContext]
)
def test_sharing_changes_neither_log_probs_nor_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: type, ops: Ops | None
) -> None:
    least_pairs = 10**9 if way is shared_prefix.SpreadContext else -(10**9)
    monkeypatch.setattr(shared_prefix, "PAIRS_PER_CALL", least_pairs)
    monkeypatch.setattr(shared_prefix, "has_kernel", lambda *_: way is shared_prefix.RaggedContext)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 32, n).astype(np.int32) for n in (7, 4)]
    episodes = [
        episode(turn(prompts[i % 2], draw.integers(0, 3, draw.integers(1, 6)).astype(np.int32))) for i in range(16)
    ]
    episodes.append(
        episode(turn(ints(1), ints(2, 3)), turn(ints(4), ints(5), parent=0), turn(ints(6), ints(7), parent=0))
    )
    packed = pack(training_sequences(batch_of(episodes, [1.0] * 17)))
    tree = prefix_tree(packed.tokens_t, packed.lengths_s)
    assert tree.saving > 0.5
    lengths = packed.lengths_s.tolist()
    assert isinstance(shared_prefix.tree_context(tree, lengths, torch.device("cpu"), torch.float32, 8), way)
    results = []
    for least in (0.1, 2.0):
        monkeypatch.setattr(native, "MIN_SAVING", least)
        backend = native.NativeBackend(tiny_model(tmp_path, "qwen3"), ops=ops)
        logprobs, _ = backend.token_logprobs(packed)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        results.append((logprobs.detach(), {name: p.grad for name, p in backend.parameters().items()}))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-5)
    for name, gradient in results[0][1].items():
        np.testing.assert_allclose(gradient, results[1][1][name], atol=1e-4, err_msg=name)  # type: ignore[arg-type]


def test_a_long_prompt_is_attended_to_from_the_branches_alone() -> None:
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 32, 200)
    sequences = [np.concatenate([prompt, draw.integers(0, 32, 20 + i)]) for i in range(8)]
    tree = prefix_tree(np.concatenate(sequences), np.array([len(one) for one in sequences]))
    context = shared_prefix.tree_context(
        tree, [len(one) for one in sequences], torch.device("cpu"), torch.float32, 8
    )
    assert isinstance(context, shared_prefix.BranchContext)
    assert sorted({branch.shared for branch in tree.branches})[0] == 0
    assert sum(len(branch.path) - branch.shared for branch in tree.branches) == len(tree.tokens_u)

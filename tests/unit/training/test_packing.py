from __future__ import annotations

import time

import numpy as np
import pytest
from training_builders import batch_of, episode, ints, random_batch, turn

from headrace.errors import RecordError
from headrace.training.packing import Packed, micro_batches, pack, pack_micro_batches, partition, training_sequences


def packed_of(*episodes: object, advantages: list[float] | None = None) -> Packed:
    made = list(episodes)
    return pack(training_sequences(batch_of(made, advantages or [1.0] * len(made))))  # type: ignore[arg-type]


def test_single_turns_are_laid_end_to_end_without_their_last_tokens() -> None:
    first = episode(turn(ints(1, 2, 3), ints(4, 5), logprobs=np.array([-0.1, -0.2]), version=7))
    second = episode(turn(ints(6), ints(7, 8), logprobs=np.array([-0.3, -0.4]), version=np.array([7, 8])))
    packed = packed_of(first, second, advantages=[0.5, -1.5])
    assert packed.tokens_t.tolist() == [1, 2, 3, 4, 6, 7]
    assert packed.positions_t.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.lengths_s.tolist() == [4, 2]
    assert packed.trained_s.tolist() == [2, 2]
    assert packed.sources_n.tolist() == [2, 3, 4, 5]
    assert packed.targets_n.tolist() == [4, 5, 7, 8]
    np.testing.assert_array_equal(packed.behaviour_n, np.array([-0.1, -0.2, -0.3, -0.4], np.float32))
    assert packed.versions_n.tolist() == [7, 7, 7, 8]
    assert packed.advantages_n.tolist() == [0.5, 0.5, -1.5, -1.5]
    assert packed.temperatures_n.tolist() == [1, 1, 1, 1]
    assert packed.support is None


def test_a_chain_of_turns_is_one_sequence_in_which_only_sampled_tokens_are_trained() -> None:
    packed = packed_of(episode(turn(ints(1), ints(2, 3)), turn(ints(4, 5), ints(6), parent=0)))
    assert packed.tokens_t.tolist() == [1, 2, 3, 4, 5]
    assert packed.sources_n.tolist() == [0, 1, 4]
    assert packed.targets_n.tolist() == [2, 3, 6]
    assert packed.lengths_s.tolist() == [5]


def test_a_fork_gives_a_sequence_per_leaf_and_trains_every_sampled_token_once() -> None:
    forked = episode(
        turn(ints(1), ints(2)),
        turn(ints(3), ints(4, 5), parent=0),
        turn(ints(6), ints(7), parent=0),
        turn(ints(8), ints(9), parent=2),
    )
    packed = packed_of(forked)
    assert packed.tokens_t.tolist() == [1, 2, 3, 4, 1, 2, 6, 7, 8]
    assert packed.lengths_s.tolist() == [4, 5]
    assert packed.targets_n.tolist() == [2, 4, 5, 7, 9]
    assert packed.sources_n.tolist() == [0, 2, 3, 6, 8]
    assert packed.positions_t[packed.sources_n].tolist() == [0, 2, 3, 2, 4]


def test_turns_without_a_parent_are_sequences_of_their_own() -> None:
    packed = packed_of(episode(turn(ints(1), ints(2)), turn(ints(3), ints(4))))
    assert packed.lengths_s.tolist() == [1, 1]
    assert packed.targets_n.tolist() == [2, 4]


def test_other_policies_turns_are_only_context() -> None:
    mixed = episode(turn(ints(1), ints(2, 3), policy="critic"), turn(ints(4), ints(5), parent=0))
    packed = packed_of(mixed)
    assert packed.tokens_t.tolist() == [1, 2, 3, 4]
    assert packed.targets_n.tolist() == [5]


def test_what_follows_the_last_trained_token_is_left_out() -> None:
    packed = packed_of(episode(turn(ints(1), ints(2, 3)), turn(ints(4, 5), ints(), parent=0)))
    assert packed.tokens_t.tolist() == [1, 2]
    assert packed.targets_n.tolist() == [2, 3]


def test_episodes_without_a_sampled_token_contribute_nothing() -> None:
    empty = episode(turn(ints(1, 2), ints()), id="empty")
    failed = episode(id="failed")
    batch = batch_of([empty, failed, episode(turn(ints(1), ints(2)))], [1, 2, 3])
    (sequence,) = training_sequences(batch)
    assert (sequence.advantage, sequence.num_trained) == (3, 1)


def test_supports_are_joined_row_by_row_and_untruncated_tokens_have_an_empty_row() -> None:
    packed = packed_of(
        episode(turn(ints(1), ints(2, 3), support=[[2, 9], [3]])),
        episode(turn(ints(1), ints(4))),
        episode(turn(ints(1), ints(5), temperature=0.0, support=[[5]])),
    )
    assert packed.support is not None
    ids, offsets = packed.support
    assert ids.tolist() == [2, 9, 3, 5]
    assert offsets.tolist() == [0, 2, 3, 3, 4]
    assert packed.temperatures_n.tolist() == [1, 1, 1, 1]


def test_temperatures_are_kept_turn_by_turn() -> None:
    packed = packed_of(
        episode(turn(ints(1), ints(2, 3), temperature=0.5), turn(ints(4), ints(5), parent=0, temperature=2.0))
    )
    assert packed.temperatures_n.tolist() == [0.5, 0.5, 2.0]


def test_a_first_token_that_nothing_precedes_is_refused() -> None:
    with pytest.raises(RecordError, match="'lonely'"):
        packed_of(episode(turn(ints(), ints(1)), id="lonely"))


def test_truncated_sampling_without_a_support_is_refused() -> None:
    with pytest.raises(RecordError, match="support"):
        packed_of(episode(turn(ints(1), ints(2), temperature=0.0)))


def test_a_parent_that_comes_later_is_refused() -> None:
    with pytest.raises(RecordError, match="parent"):
        packed_of(episode(turn(ints(1), ints(2), parent=1), turn(ints(1), ints(2), parent=0)))


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_every_sequence_once_within_the_budget_and_balanced(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(1, 60, 100).tolist(), 500]
    bins = partition(lengths, 200)
    assert sorted(i for members in bins for i in members) == list(range(101))
    assert [100] in bins
    sizes = [sum(lengths[i] for i in members) for members in bins if members != [100]]
    assert max(sizes) <= 200
    assert max(sizes) - min(sizes) <= 60
    assert len(sizes) <= -(-sum(lengths[:-1]) // 200) + 1


def test_no_sequences_give_no_micro_batch() -> None:
    assert partition([], 10) == []
    assert list(pack_micro_batches([], 10)) == []


def test_a_groups_sequences_share_a_micro_batch_where_that_keeps_it_balanced() -> None:
    episodes = [episode(turn(ints(100 + i // 4, 1), ints(2, 3))) for i in range(32)]
    batches = list(pack_micro_batches(training_sequences(batch_of(episodes, [1.0] * 32)), 48))
    assert [len(packed.tokens_t) for packed in batches] == [48, 48]
    for packed in batches:
        _, counts = np.unique(packed.tokens_t[packed.positions_t == 0], return_counts=True)
        assert counts.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(("prompt", "budget", "passes"), [(20, 60, 2), (20, 66, 1), (50, 132, 1)])
def test_a_prompt_that_is_computed_once_counts_once(prompt: int, budget: int, passes: int) -> None:
    episodes = [episode(turn(ints(100 + i // 4, *range(prompt)), ints(2, 3, 4, 5))) for i in range(8)]
    sequences = training_sequences(batch_of(episodes, [1.0] * 8))
    assert [one.length for one in sequences] == [prompt + 4] * 8
    # A group has its prompt and three tokens of each sequence, of which the last is no input.
    found = micro_batches(sequences, budget, shared=True)
    assert len(found) == passes
    for members in found:
        assert len({i // 4 for i in members}) * 4 == len(members), "groups are whole"
    assert len(micro_batches(sequences, budget)) == 4


def test_cutting_a_batch_keeps_every_trained_token() -> None:
    sequences = training_sequences(random_batch(3, episodes=40))
    whole = pack(sequences)
    parts = list(pack_micro_batches(sequences, 50))
    assert len(parts) > 3
    assert sorted(np.concatenate([p.targets_n for p in parts])) == sorted(whole.targets_n)
    assert sorted(np.concatenate([p.behaviour_n for p in parts])) == sorted(whole.behaviour_n)


def test_packing_a_quickstart_batch_takes_milliseconds() -> None:
    draw = np.random.default_rng(0)
    episodes = [
        episode(turn(draw.integers(0, 48, 12).astype(np.int32), draw.integers(0, 48, 20).astype(np.int32)))
        for _ in range(256)
    ]
    batch = batch_of(episodes, [1.0] * 256)
    best = min(_timed(lambda: list(pack_micro_batches(training_sequences(batch), 16384))) for _ in range(5))
    assert best < 0.03


def _timed(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from engine_builders import (
    VOCAB,
    all_free,
    drive,
    events,
    fill_standby,
    finish,
    make_engine,
    publish,
    request,
    requests,
    version_of,
    with_samplings,
    worst_replay,
)

from headrace.engine.base import ScoreRequest
from headrace.engine.native.pages import pages_for
from headrace.errors import EpisodeFailure, HeadraceError, LawBroken, SyncError
from headrace.records import Sampling

# ── Batching and the cache ───────────────────────────────────────────────────────────────────────────────


def test_a_request_gives_the_same_tokens_alone_in_a_crowd_and_under_preemption():
    crowd = with_samplings(requests(28, seed=5))
    together = drive(make_engine(), crowd)
    squeezed = drive(make_engine(config={"cache_tokens": 160}), crowd)
    assert any(event.cause == "preempt" for turn in squeezed.values() for event in turn.lineage)
    for one in crowd[::6]:
        alone = drive(make_engine(), [one])[one.id]
        assert alone.tokens.tolist() == together[one.id].tokens.tolist() == squeezed[one.id].tokens.tolist()


def test_requests_with_one_seed_and_prompt_differ_only_by_their_seeds():
    turns = drive(make_engine(), [request(i, max_tokens=20, seed=i // 2) for i in range(6)])
    texts = [tuple(turns[i].tokens.tolist()) for i in range(6)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[4] == texts[5]
    assert len(set(texts)) == 3


def test_a_group_costs_one_prefill_and_shares_the_full_pages_of_its_prompt():
    engine = make_engine(config={"page_size": 4})
    for i in range(8):
        engine.add(request(i, range(10), 20))
    engine.step()
    # All eight first tokens come from the prompt's last logits.
    assert (engine.tokens_passed, engine.running, engine.waiting) == (10, 8, 0)
    assert engine.tokens_sampled == 8
    # Two full pages once, and the half-filled third for each sequence; a copy for all but the first.
    assert engine.pages_total - engine.pages_free == 2 + 8
    assert engine.pages_copied == 7
    # One that comes later passes the prompt's last token alone, for its logits.
    engine.add(request(8, range(10), 20))
    engine.step()
    assert (engine.tokens_prefilled, engine.tokens_passed) == (10, 10 + 9)
    assert engine.running == 9


def test_a_further_turn_passes_only_what_is_new():
    engine = make_engine(config={"page_size": 4})
    first = drive(engine, [request(0, range(10), 7)])[0]
    passed = engine.tokens_passed
    whole = [*range(10), *first.tokens.tolist()]
    second = drive(engine, [request(1, [*whole, 5, 6, 7], 1)])[1]
    # The last sampled token was never passed.
    assert engine.tokens_passed - passed == 1 + 3
    assert worst_replay({1: second}) < 1e-4


def test_prompts_are_cut_into_chunks_of_the_budget_beside_sequences_that_run():
    engine = make_engine(config={"prefill_tokens": 25})
    prompts = {i: (np.arange(length) + i) % VOCAB for i, length in enumerate([10, 12, 10, 40, 5])}
    for i, prompt in prompts.items():
        engine.add(request(i, prompt, 30))
    seen = []
    while engine.tokens_prefilled < 77:
        engine.step()
        seen.append((engine.tokens_prefilled, engine.tokens_sampled))
    # 10 + 12 + 3 of 10; then the rest and 18 of 40 beside two; then 22 and 3 of 5 beside three; then the rest
    assert seen == [(25, 2), (50, 5), (75, 9), (77, 14)]
    assert worst_replay(finish(engine)) < 1e-4


def test_no_more_than_max_running_sequences_run():
    engine = make_engine(config={"max_running": 3})
    most = 0

    def watch(step: int) -> None:
        nonlocal most
        most = max(most, engine.running)

    turns = drive(engine, requests(10, seed=1), watch)
    assert most == 3
    assert len(turns) == 10


@pytest.mark.parametrize("page_size", [1, 4, 7, 16])
@pytest.mark.parametrize("prompt", [1, 16, 30, 31])
def test_sequences_of_full_length_finish_in_a_cache_that_holds_one(page_size, prompt):
    engine = make_engine(config={"page_size": page_size, "cache_tokens": 32, "max_context": 32, "max_running": 4})
    assert engine.pages_total == pages_for(32, page_size)
    turns = drive(engine, [request(i, (np.arange(prompt) + i // 2) % VOCAB, 99) for i in range(4)])
    assert [len(turn.tokens) for turn in turns.values()] == [32 - prompt] * 4
    assert worst_replay(turns) < 1e-4
    assert all_free(engine)


def test_the_oldest_sequence_is_never_preempted():
    engine = make_engine(config={"cache_tokens": 120, "max_running": 16})
    turns = drive(engine, [request(i, np.arange(8) + i, 60) for i in range(12)])
    preempted = [id for id, turn in turns.items() if any(e.cause == "preempt" for e in turn.lineage)]
    assert preempted
    assert 0 not in preempted


def test_the_default_cache_holds_all_sequences_or_a_gibibyte():
    engine = make_engine(config={"max_running": 5, "max_context": 40, "page_size": 4})
    assert engine.pages_total == 50
    # 2 layers × keys and values × 2 heads × 8 × 4 bytes = 256 bytes a token
    engine = make_engine(config={"max_running": 10_000, "max_context": 2048, "page_size": 16})
    assert engine.pages_total == 2**30 // 256 // 16


# ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_token_ends_a_turn_and_is_its_last_token():
    free = drive(make_engine(), [request(0, max_tokens=40)])[0]
    assert free.stop == "length"
    assert len(free.tokens) == 40
    stop = int(free.tokens[12])
    first = free.tokens.tolist().index(stop)
    by_request = drive(make_engine(), [request(0, max_tokens=40, stop_tokens=(stop,))])[0]
    by_model = drive(make_engine(eos_tokens=(stop, 31)), [request(0, max_tokens=40, stop_tokens=(30, 29))])[0]
    assert by_request.stop == by_model.stop == "end"
    assert by_request.tokens.tolist() == free.tokens.tolist()[: first + 1]
    assert by_model.tokens[-1] in (stop, 31, 30, 29)
    assert not set(by_model.tokens[:-1].tolist()) & {stop, 31, 30, 29}


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it():
    free = drive(make_engine(), [request(0, max_tokens=60)])[0]
    text = letters(free.tokens.tolist())
    stop = text[20:23]
    turns = drive(
        make_engine(decode=letters),
        [
            request(0, max_tokens=60, stop_strings=("no such text", stop)),
            request(1, max_tokens=60, seed=5, stop_strings=("no such text",)),
        ],
    )
    assert (turns[0].stop, turns[0].stop_string) == ("stop_string", stop)
    assert letters(turns[0].tokens.tolist()) == text[: text.index(stop) + 3]
    assert turns[1].stop == "length"
    assert len(turns[1].tokens) == 60


def test_of_several_stop_strings_the_first_in_the_text_is_named_and_an_end_token_comes_before_all():
    free = drive(make_engine(), [request(0, max_tokens=60)])[0]
    text = letters(free.tokens.tolist())
    last, token = text[23], int(free.tokens[23])
    first = text.index(last)
    strings = (text[first], text[first - 1 : first + 1])
    both = drive(make_engine(decode=letters), [request(0, max_tokens=60, stop_strings=strings)])[0]
    assert (both.stop, both.stop_string) == ("stop_string", strings[1])
    assert len(both.tokens) == first + 1
    stops = {"stop_strings": strings, "stop_tokens": (int(free.tokens[first]),)}
    ended = drive(make_engine(decode=letters), [request(0, max_tokens=60, **stops)])[0]
    assert (ended.stop, ended.stop_string) == ("end", None)
    assert ended.tokens.tolist() == free.tokens.tolist()[: free.tokens.tolist().index(int(free.tokens[first])) + 1]
    assert token == int(free.tokens[23])


def test_max_tokens_is_clipped_to_what_fits_the_context():
    turn = drive(make_engine(config={"max_context": 20}), [request(0, range(15), 1000)])[0]
    assert turn.stop == "length"
    assert len(turn.tokens) == 5


def test_a_turn_carries_its_request():
    sampling = Sampling(temperature=0.8, top_k=9)
    turn = drive(make_engine(name="e3"), [request(4, [7, 8], 6, sampling=sampling, policy="judge", seed=99)])[4]
    assert (turn.engine, turn.policy, turn.seed, turn.sampling) == ("e3", "judge", 99, sampling)
    assert turn.context.tolist() == [7, 8]
    assert turn.context.dtype == turn.tokens.dtype == np.int32
    assert turn.logprobs.dtype == np.float32
    assert turn.versions.dtype == np.int32
    assert turn.support is not None
    assert np.diff(turn.support.offsets).tolist() == [9] * 6


def test_cut_returns_what_there_is_and_frees_the_pages():
    whole = drive(make_engine(), [request(0, range(9), 30)])[0]
    engine = make_engine(config={"max_running": 1})
    engine.add(request(0, range(9), 30))
    engine.add(request(1, range(9), 30))
    for _ in range(5):
        engine.step()
    running, waiting = engine.cut(0), engine.cut(1)
    assert running is not None
    assert running.stop == "cancelled"
    assert running.tokens.tolist() == whole.tokens.tolist()[:5]
    assert waiting is not None
    assert len(waiting.tokens) == 0
    assert waiting.stop == "cancelled"
    assert engine.cut(0) is None
    assert not engine.has_work
    assert all_free(engine)


def test_cancel_frees_the_pages_and_returns_nothing():
    engine = make_engine()
    for i in range(6):
        engine.add(request(i, range(9), 30))
    engine.step()
    engine.step()
    for i in (*range(5), 17):
        engine.cancel(i)
    assert (engine.running, engine.waiting) == (1, 0)
    assert finish(engine).keys() == {5}
    assert all_free(engine)


def test_a_step_without_work_does_nothing():
    engine = make_engine()
    assert engine.step() == []
    assert not engine.has_work
    assert engine.steps == engine.tokens_passed == 0


# ── Bad requests ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"context": []}, "bad_request", "non-empty"),
        ({"context": [0.5]}, "bad_request", "integers"),
        ({"context": [3, VOCAB]}, "bad_request", r"\[0, 32\) \(got \(3, 32\)\)"),
        ({"context": [-1]}, "bad_request", "tokens lie in"),
        ({"context": [1] * 96}, "prompt_too_long", "96 tokens"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"sampling": Sampling(temperature=-0.1)}, "bad_request", "temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "bad_request", "temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "bad_request", "temperature"),
        ({"sampling": Sampling(top_k=-1)}, "bad_request", "top_k"),
        ({"sampling": Sampling(top_p=0.0)}, "bad_request", "top_p"),
        ({"sampling": Sampling(top_p=1.1)}, "bad_request", "top_p"),
        ({"sampling": Sampling(top_p=math.nan)}, "bad_request", "top_p"),
        ({"sampling": Sampling(min_p=-0.1)}, "bad_request", "min_p"),
        ({"sampling": Sampling(min_p=1.5)}, "bad_request", "min_p"),
        ({"sampling": Sampling(min_p=math.nan)}, "bad_request", "min_p"),
        ({"sampling": Sampling(temperature=1e-39)}, "bad_request", "temperature"),
        ({"sampling": Sampling(temperature=1e39)}, "bad_request", "temperature"),
        ({"sampling": Sampling(top_k=2**31)}, "bad_request", "top_k"),
        ({"sampling": Sampling(top_p=1 - 1e-8)}, "bad_request", "float32"),
        ({"sampling": Sampling(top_p=1e-46)}, "bad_request", "top_p"),
        ({"sampling": Sampling(min_p=1e-46)}, "bad_request", "min_p"),
        ({"stop_tokens": (2**31,)}, "bad_request", "stop tokens"),
        ({"stop_tokens": (-1,)}, "bad_request", "stop tokens"),
        ({"stop_strings": ("x",)}, "bad_request", "tokenizer"),
        ({"stop_strings": ("\ud800",)}, "bad_request", "text"),
        ({"stop_strings": ("",)}, "bad_request", "not empty"),
        ({"id": 1}, "bad_request", "unique"),
    ],
)
def test_a_request_that_cannot_be_served_fails_with_its_reason_and_changes_nothing(fields, reason, detail):
    engine = make_engine()
    engine.add(request(1))
    with pytest.raises(EpisodeFailure, match=detail) as failure:
        engine.add(request(**{"id": 2, **fields}))
    assert failure.value.reason == reason
    assert engine.waiting == 1


def test_an_id_may_be_used_again_once_its_request_was_answered():
    engine = make_engine()
    assert len(drive(engine, [request(1, max_tokens=3)])[1].tokens) == 3
    assert len(drive(engine, [request(1, max_tokens=4)])[1].tokens) == 4


# ── Swaps ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_swap_serves_the_standby_weights_and_the_old_live_ones_become_the_standby():
    engine = make_engine()
    fill_standby(engine, 1)
    to_become_live = {name: buffer.data_ptr() for name, buffer in engine.standby.items()}
    report = engine.swap(1, "keep")
    assert (engine.version, report.version, report.running) == (1, 1, 0)
    assert report.pause_s >= 0
    for name, weight in version_of(0).named_parameters():
        assert torch.equal(engine.standby[name], weight)
    publish(engine, 2, "keep")
    assert {name: buffer.data_ptr() for name, buffer in engine.standby.items()} == to_become_live


def test_sequences_start_under_the_version_served_when_they_are_prefilled():
    engine = make_engine()
    engine.add(request(0, range(5), 3))
    publish(engine, 1, "keep")
    turn = finish(engine)[0]
    assert turn.versions.tolist() == [1, 1, 1]
    assert [(e.position, e.version, e.cause) for e in turn.lineage] == [(0, 1, "start")]


@pytest.mark.parametrize(("kv", "before"), [("keep", "kept"), ("recompute", "recomputed")])
def test_a_swap_is_recorded_at_the_number_of_positions_that_were_cached(kv, before):
    engine = make_engine()
    engine.add(request(0, range(5), 8))
    for _ in range(3):
        engine.step()
    # Three tokens are sampled; the third has not passed through the model yet.
    publish(engine, 7, kv)
    turn = finish(engine)[0]
    assert turn.versions.tolist() == [0, 0, 0, 7, 7, 7, 7, 7]
    assert events(turn) == [(0, 0, "kept", "start"), (7, 7, before, "swap")]


def test_swaps_without_a_pass_between_them_leave_the_last():
    engine = make_engine()
    engine.add(request(0, range(5), 4))
    engine.step()
    for version, kv in [(1, "keep"), (2, "keep"), (3, "recompute"), (4, "keep")]:
        publish(engine, version, kv)
    turn = finish(engine)[0]
    # At 3 its cache was given up; it was rebuilt under 4, the version served by then.
    assert [(e.position, e.version, e.before) for e in turn.lineage] == [(0, 0, "kept"), (5, 4, "recomputed")]
    assert turn.versions.tolist() == [0, 4, 4, 4]


def test_a_swap_with_recompute_prefills_a_shared_prompt_once():
    engine = make_engine()
    for i in range(8):
        engine.add(request(i, range(10), 20))
    for _ in range(4):
        engine.step()
    assert engine.tokens_prefilled == 10
    publish(engine, 1, "recompute")
    turns = finish(engine)
    # At most the prompt once and each one's own four tokens; some of those are the same.
    assert 20 < engine.tokens_prefilled <= 10 + 10 + 8 * 4
    assert worst_replay(turns) < 1e-4


def test_a_kept_prompt_is_not_used_across_a_swap():
    engine = make_engine()
    drive(engine, [request(0, range(10), 3)])
    publish(engine, 1, "keep")
    turns = drive(engine, [request(1, range(10), 3)])
    assert engine.tokens_prefilled == 20
    assert worst_replay(turns) < 1e-4


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_two_hundred_swaps_in_a_row_abort_nobody_and_every_token_has_its_version(kv):
    engine = make_engine(config={"max_context": 512, "prefill_tokens": 100_000})
    expected: dict[int, list[int]] = {i: [] for i in range(64)}
    for i in range(64):
        engine.add(request(i, [i % VOCAB, 3], 450, stop_tokens=()))
    version = 0
    while engine.has_work:
        sampled_before = {i: len(expected[i]) for i in expected}
        ended = engine.step()
        running = [s for s in engine._sequences.values() if s.slot is not None]
        counts = {s.request.id: int(engine._slots.sampled[s.slot]) for s in running}
        counts |= {id: len(turn.tokens) for id, turn in ended}
        for i, count in counts.items():
            expected[i] += [version] * (count - sampled_before[i])
        for id, turn in ended:
            assert turn.stop == "length"
            assert turn.versions.tolist() == expected[id]
        if version < 200 and engine.has_work and engine.running == 64:
            version += 1
            assert engine.swap(version, kv).running == 64
    assert version == 200
    assert all(len(versions) == 450 for versions in expected.values())
    assert all(max(versions) == 200 for versions in expected.values())


def test_a_swap_called_from_another_thread_within_a_pass_is_refused_and_changes_nothing():
    engine = make_engine()
    engine.add(request(0, range(5), 6))
    fill_standby(engine, 1)
    refused: list[BaseException] = []

    def try_to_swap() -> None:
        try:
            engine.swap(1, "keep")
        except LawBroken as error:
            refused.append(error)

    def in_the_middle(*_: object) -> None:
        thread = threading.Thread(target=try_to_swap)
        thread.start()
        thread.join()

    hook = engine._model.model.layers[1].register_forward_hook(in_the_middle)
    engine.step()
    hook.remove()
    assert len(refused) == 1
    assert "atomic swap" in str(refused[0])
    turn = finish(engine)[0]
    assert turn.versions.tolist() == [0] * 6
    assert worst_replay({0: turn}) < 1e-4


def test_a_version_that_changes_within_a_pass_breaks_the_law():
    engine = make_engine()
    engine.add(request(0))

    def change(*_: object) -> None:
        engine._served.versions[0] = 9

    engine._model.model.layers[0].register_forward_hook(change)
    with pytest.raises(LawBroken, match=r"\[0\] became \[9\]"):
        engine.step()


def test_another_thread_may_fill_the_standby_while_sequences_are_sampled():
    engine = make_engine()
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            for buffer in engine.standby.values():
                buffer.fill_(math.nan)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        turns = drive(engine, requests(16, seed=8))
    finally:
        stop.set()
        thread.join()
    assert worst_replay(turns) < 1e-4


def test_a_swap_that_fails_half_way_leaves_the_old_version_whole():
    engine = make_engine()
    fill_standby(engine, 1)
    last = list(engine.standby)[-1]
    engine.standby[last].resize_(3)
    with pytest.raises(SyncError, match="keeps serving its previous version"):
        engine.swap(1, "keep")
    assert engine.version == 0
    for (name, live), (_, expected) in zip(
        engine._model.named_parameters(), version_of(0).named_parameters(), strict=True
    ):
        assert torch.equal(live, expected), name


def test_a_version_is_not_served_twice_in_a_row():
    engine = make_engine(version=3)
    with pytest.raises(SyncError, match="version 3 is served already"):
        engine.swap(3, "keep")


def test_a_sequence_that_waits_preempted_during_a_swap_is_rebuilt_under_the_version_of_its_return():
    engine = make_engine(config={"cache_tokens": 60, "max_context": 60, "max_running": 4})
    for i in range(3):
        engine.add(request(i, np.arange(6) + i, 40))
    while not (engine.running and engine.waiting and engine.tokens_sampled > 20):
        engine.step()
    waiting = engine._scheduler.queue[0]
    assert waiting.lost is not None
    lost_at = waiting.lost.position
    publish(engine, 1, "keep")
    publish(engine, 2, "keep")
    turns = finish(engine)
    returned = turns[waiting.request.id]
    first = returned.lineage[1]
    assert (first.position, first.version, first.before, first.cause) == (lost_at, 2, "recomputed", "preempt")
    assert worst_replay(turns) < 1e-4


def test_weights_that_give_nan_end_the_step_with_the_requests_named():
    engine = make_engine()
    engine.add(request(41))
    engine.add(request(42, sampling=Sampling(temperature=0.0)))
    engine.step()
    for buffer in engine.standby.values():
        buffer.fill_(math.nan)
    engine.swap(1, "keep")
    with pytest.raises(HeadraceError, match=r"version 1.*requests \[41, 42\]"):
        engine.step()


def test_pages_that_nobody_uses_do_not_keep_the_last_sequence_from_growing():
    # Both compute the common beginning in one step; the second's tail then hangs on the first's pages.
    config = {"page_size": 4, "cache_tokens": 40, "max_context": 40, "max_running": 4}
    wanted = [request(0, [*range(8), 20], 3), request(1, [*range(8), 21], 31)]
    turns = drive(make_engine(config=config), wanted)
    assert [len(turns[i].tokens) for i in range(2)] == [3, 31]
    assert worst_replay(turns) < 1e-4


def test_a_step_that_fails_is_the_last_one(monkeypatch):
    engine = make_engine()
    engine.add(request(0, range(20)))

    def broken(plan):
        raise ArithmeticError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "begin", broken)
        with pytest.raises(ArithmeticError):
            engine.step()
    # Its keys and values were never computed.
    with pytest.raises(HeadraceError, match="runs to its end") as refused:
        engine.step()
    assert "ArithmeticError: no more" in str(refused.value.value)


def test_scores_are_numbers_or_an_error():
    engine = make_engine()
    for buffer in engine.standby.values():
        buffer.fill_(float("nan"))
    engine.swap(1, "keep")
    engine.score(ScoreRequest(id=3, context=np.array([1, 2]), tokens=np.array([3, 4])))
    with pytest.raises(HeadraceError, match="logits are numbers") as broken:
        finish(engine)
    assert "[3]" in str(broken.value.value)


def test_once_logits_were_broken_the_engine_goes_on_with_nothing():
    engine = make_engine()
    engine.add(request(0))
    engine.step()
    for buffer in engine.standby.values():
        buffer.fill_(float("nan"))
    engine.swap(1, "keep")
    for _ in range(2):
        with pytest.raises(HeadraceError, match="logits are numbers"):
            engine.step()

"""What swaps do to what runs, what was cut and goes on, and requests to score: on the engine's core."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_builders import (
    TOLERANCE,
    TRUNCATING,
    VOCAB,
    all_free,
    drive,
    events,
    fill_standby,
    finish,
    make_engine,
    plain_logprobs,
    publish,
    request,
    requests,
    version_of,
    with_samplings,
    worst_replay,
)

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest
from headrace.engine.native import NativeEngine
from headrace.engine.native.plan import Plan
from headrace.engine.native.reference import ReferenceRunner
from headrace.errors import EpisodeFailure, SyncError
from headrace.records import Sampling, Turn

SMALL = {"page_size": 4, "cache_tokens": 60, "max_context": 60, "max_running": 4}


def preempting() -> NativeEngine:
    """An engine with running sequences, and one that has sampled, was preempted and waits."""
    engine = make_engine(config=SMALL)
    for i in range(3):
        engine.add(request(i, np.arange(6) + i, 40))
    while not (engine.running and engine.waiting and engine.tokens_sampled > 20):
        engine.step()
    assert len(engine._scheduler.queue[0].tokens) > 0
    return engine


# ── Going on from a turn that was begun ──────────────────────────────────────────────────────────────────


def test_turns_that_were_cut_go_on_with_the_tokens_they_would_have_had():
    asked = with_samplings(requests(40, seed=5))
    whole = drive(make_engine(), asked)
    engine = make_engine()
    turns: dict[int, Turn] = {}
    for one in asked:
        engine.add(one)
    cuts = Counter[int]()
    rng = np.random.default_rng(0)
    while engine.has_work:
        turns.update(engine.step())
        for one in asked:
            if one.id not in turns and rng.random() < 0.04:
                cut = engine.cut(one.id)
                assert cut.stop == "cancelled"
                engine.add(msgspec.structs.replace(one, begun=cut))
                cuts[one.id] += len(cut.tokens) > 0
    assert sum(cuts.values()) > 40
    for one in asked:
        assert turns[one.id].tokens.tolist() == whole[one.id].tokens.tolist()
        np.testing.assert_allclose(turns[one.id].logprobs, whole[one.id].logprobs, atol=TOLERANCE)
        assert (turns[one.id].support is not None) == one.sampling.truncates
        if one.sampling.truncates:
            rows = [
                [t.support.row(i).tolist() for i in range(len(t.tokens))] for t in (turns[one.id], whole[one.id])
            ]
            assert rows[0] == rows[1]
        # Two cuts without a token between them leave one event.
        assert 1 <= len(turns[one.id].lineage) <= 1 + cuts[one.id]
    assert worst_replay(turns) < TOLERANCE


def test_a_turn_that_was_cut_goes_on_under_other_weights_and_on_another_engine():
    engine, other = make_engine(), make_engine(version=3)
    engine.add(request(0, range(9), 30, sampling=TRUNCATING[2]))
    for _ in range(8):
        engine.step()
    publish(engine, 1, "keep")
    for _ in range(4):
        engine.step()
    cut = engine.cut(0)
    whole = drive(other, [request(7, range(9), 30, sampling=TRUNCATING[2], begun=cut)])[7]
    assert whole.versions.tolist() == [0] * 8 + [1] * 4 + [3] * 18
    assert events(whole) == [
        (0, 0, "kept", "start"),
        (16, 1, "kept", "swap"),
        (20, 3, "recomputed", "resume"),
    ]
    assert whole.tokens[:12].tolist() == cut.tokens.tolist()
    assert whole.logprobs[:12].tolist() == cut.logprobs.tolist()
    assert worst_replay({7: whole}) < TOLERANCE


def test_what_happened_after_the_last_token_of_a_cut_turn_is_forgotten():
    engine = make_engine()
    engine.add(request(0, range(5), 20))
    for _ in range(4):
        engine.step()
    publish(engine, 1, "keep")
    cut = engine.cut(0)
    assert events(cut) == [(0, 0, "kept", "start"), (8, 1, "kept", "swap")]
    late = msgspec.structs.replace(
        cut, lineage=(cut.lineage[0], msgspec.structs.replace(cut.lineage[1], position=9))
    )
    for i, begun in enumerate((cut, late), start=1):
        turn = drive(engine, [request(i, range(5), 20, begun=begun)])[i]
        assert events(turn) == [(0, 0, "kept", "start"), (8, 1, "recomputed", "resume")]
        assert worst_replay({i: turn}) < TOLERANCE


def test_a_turn_that_was_cut_before_its_first_token_starts_afresh():
    engine = make_engine()
    engine.add(request(0, range(5), 6))
    cut = engine.cut(0)
    turn = drive(engine, [request(0, range(5), 6, begun=cut)])[0]
    assert events(turn) == [(0, 0, "kept", "start")]
    assert turn.tokens.tolist() == drive(engine, [request(0, range(5), 6)])[0].tokens.tolist()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 3}, "max_tokens is above what was sampled already"),
        ({"sampling": Sampling(top_k=3)}, "brings its supports"),
        ({"fork_of": 0, "fork_at": 1}, "resumed, not forked"),
        ({"context": [1] * 92}, "leave no room"),
    ],
)
def test_a_turn_that_cannot_be_resumed_fails_with_its_reason(fields, reason):
    engine = make_engine()
    begun = drive(engine, [request(0, range(5), 4)])[0]
    with pytest.raises(EpisodeFailure, match=reason):
        engine.add(request(1, **{"context": range(5), "max_tokens": 9, "begun": begun, **fields}))
    assert engine.waiting == 0


# ── Interrupts ───────────────────────────────────────────────────────────────────────────────────────────


def test_resume_ends_what_runs_and_what_was_preempted_but_not_what_has_not_begun():
    engine = preempting()
    engine.add(request(9, range(7), 5))
    publish(engine, 1, "resume")
    assert engine.running == 0
    turns = dict(engine.step())
    assert turns.keys() == {0, 1, 2}
    for turn in turns.values():
        assert turn.stop == "cancelled"
        assert len(turn.tokens) > 0
        assert set(turn.versions.tolist()) == {0}
    assert worst_replay(turns) < TOLERANCE
    rest = [request(i, turn.context, 40, begun=turn) for i, turn in turns.items()]
    for one in rest:
        engine.add(one)
    turns = finish(engine)
    assert set(turns[9].versions.tolist()) == {1}
    for i in range(3):
        assert len(turns[i].tokens) == 40
        assert {0, 1} == set(turns[i].versions.tolist())
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_retry_begins_again_also_what_was_preempted():
    engine = preempting()
    publish(engine, 1, "retry")
    turns = finish(engine)
    for turn in turns.values():
        assert set(turn.versions.tolist()) == {1}
        assert events(turn)[0] == (0, 1, "kept", "start")
        assert all(event.cause in ("start", "preempt") for event in turn.lineage)
        assert len(turn.tokens) == 40
    assert worst_replay(turns) < TOLERANCE


def test_retry_gives_the_turn_that_the_new_weights_would_have_given_at_once():
    engine, fresh = make_engine(), make_engine(version=1)
    asked = with_samplings(requests(16, seed=6))
    turns = drive(engine, asked, lambda step: publish(engine, 1, "retry") if step == 12 else None)
    expected = drive(fresh, asked)
    late = [i for i, turn in turns.items() if turn.versions[0] == 1]
    assert len(late) == 16
    for i in late:
        assert turns[i].tokens.tolist() == expected[i].tokens.tolist()
        assert events(turns[i]) == [(0, 1, "kept", "start")]


def test_drain_waits_for_what_has_begun_also_when_it_was_preempted_and_lets_nothing_new_begin():
    engine = preempting()
    engine.add(request(9, range(7), 5))
    fill_standby(engine, 1)
    assert engine.must_drain("drain")
    assert not any(engine.must_drain(other) for other in ("keep", "recompute", "resume", "retry"))
    with pytest.raises(SyncError, match="drain"):
        engine.swap(1, "drain")
    assert engine.version == 0
    turns: dict[int, Turn] = {}
    while engine.must_drain("drain"):
        turns.update(engine.step(admit=False))
    assert turns.keys() == {0, 1, 2}
    assert (engine.running, engine.waiting) == (0, 1)
    assert engine.swap(1, "drain").running == 0
    turns |= finish(engine)
    for i, turn in turns.items():
        assert set(turn.versions.tolist()) == {1 if i == 9 else 0}
        assert len(turn.tokens) == (5 if i == 9 else 40)
    assert worst_replay(turns) < TOLERANCE


def test_what_sleeps_is_not_waited_for():
    engine = make_engine()
    engine.add(request(0, range(5), 20, interrupt="drain"))
    for _ in range(4):
        engine.step()
    engine.sleep(keep_weights=False)
    assert not engine.must_drain("drain")
    publish(engine, 1, "drain")
    engine.wake()
    turns = finish(engine)
    assert turns[0].versions.tolist() == [0] * 4 + [1] * 16
    assert worst_replay(turns) < TOLERANCE


def test_each_request_is_treated_as_it_says_and_the_others_as_the_swap_says():
    words: list[Interrupt | None] = [None, "keep", "recompute", "resume", "retry"]
    for default in ("keep", "recompute", "resume", "retry"):
        engine = make_engine()
        for i, word in enumerate(words):
            engine.add(request(i, range(3 + i), 20, interrupt=word))
        for _ in range(7):
            engine.step()
        fill_standby(engine, 1)
        report = engine.swap(1, default)
        did = [word or default for word in words]
        assert report.running == sum(what != "resume" for what in did)
        turns = finish(engine)
        for i, what in enumerate(did):
            start, at = (0, 0, "kept", "start"), 3 + i + 6
            assert (
                events(turns[i])
                == {
                    "keep": [start, (at, 1, "kept", "swap")],
                    "recompute": [start, (at, 1, "recomputed", "swap")],
                    "resume": [start],
                    "retry": [(0, 1, "kept", "start")],
                }[what]
            )
            assert turns[i].stop == ("cancelled" if what == "resume" else "length")
            assert len(turns[i].tokens) == (7 if what == "resume" else 20)
        assert worst_replay(turns) < TOLERANCE


def test_a_request_that_must_be_drained_holds_up_any_swap():
    engine = make_engine()
    engine.add(request(0, range(5), 6, interrupt="drain"))
    engine.add(request(1, range(6), 30))
    engine.step()
    assert engine.must_drain("keep")
    turns: dict[int, Turn] = {}
    while engine.must_drain("keep"):
        turns |= dict(engine.step(admit=False))
    publish(engine, 1, "keep")
    turns |= finish(engine)
    assert set(turns[0].versions.tolist()) == {0}
    assert set(turns[1].versions.tolist()) == {0, 1}
    assert worst_replay(turns) < TOLERANCE


def test_what_a_swap_ended_can_be_cut_or_cancelled_before_it_was_returned():
    engine = make_engine()
    for i in range(3):
        engine.add(request(i, range(5 + i), 20))
    for _ in range(3):
        engine.step()
    publish(engine, 1, "resume")
    cut = engine.cut(0)
    assert (cut.stop, len(cut.tokens)) == ("cancelled", 3)
    engine.cancel(1)
    engine.add(request(1, range(5), 4))
    turns = finish(engine)
    assert turns.keys() == {1, 2}
    assert (turns[1].stop, len(turns[1].tokens)) == ("length", 4)
    assert engine.cut(0) is None


# ── Scores ───────────────────────────────────────────────────────────────────────────────────────────────


def score_request(id: int, context: Any, tokens: Any, temperature: float = 1.0) -> ScoreRequest:
    return ScoreRequest(
        id=id, context=np.asarray(context), tokens=np.asarray(tokens), temperature=temperature, policy="p"
    )


def test_scores_are_what_one_plain_pass_gives_and_cost_one_pass_over_what_is_new():
    engine = make_engine(config={"prefill_tokens": 7})
    turns = drive(engine, [request(0, range(10), 30, sampling=Sampling(temperature=0.7))])
    passed = engine.tokens_passed
    engine.score(score_request(1, turns[0].context, turns[0].tokens, 0.7))
    scored = finish(engine)[1]
    expected = plain_logprobs(version_of(0), turns[0])[np.arange(30), turns[0].tokens]
    np.testing.assert_allclose(scored.logprobs, expected, atol=TOLERANCE)
    # The prompt is known but for its last position, whose logits are wanted; the last token needs no pass.
    assert engine.tokens_passed - passed == 1 + 29
    assert (scored.stop, scored.policy, scored.sampling.temperature) == ("length", "p", 0.7)
    assert events(scored) == [(0, 0, "kept", "start")]
    assert worst_replay({1: scored}) < TOLERANCE


@pytest.mark.parametrize("interrupt", ["keep", "recompute", "resume", "retry"])
def test_scores_replay_through_swaps_and_beside_other_requests(interrupt: Interrupt):
    engine = make_engine(config={"prefill_tokens": 16})
    rng = np.random.default_rng(1)
    for i in range(6):
        engine.add(request(i, rng.integers(0, VOCAB, 8), 30, interrupt="keep"))
    given = {i: (rng.integers(0, VOCAB, 5 + i), rng.integers(0, VOCAB, 40)) for i in range(10, 18)}
    for i, (context, tokens) in given.items():
        engine.score(score_request(i, context, tokens))
    turns: dict[int, Turn] = {}
    for step in itertools.count(1):
        turns |= dict(engine.step())
        if not engine.has_work:
            break
        if step % 3 == 0 and step < 30:
            publish(engine, step, interrupt)
    assert turns.keys() == {*range(6), *given}
    for i, (context, tokens) in given.items():
        assert turns[i].context.tolist() == context.tolist()
        assert turns[i].tokens.tolist() == tokens.tolist()
    if interrupt == "keep":
        assert sum(len(set(turns[i].versions.tolist())) > 1 for i in given) > 2
    else:
        assert all(len(set(turns[i].versions.tolist())) == 1 for i in given)
    assert worst_replay(turns) < TOLERANCE


def test_a_score_that_is_cut_has_nothing_and_is_never_a_fork_s_source():
    engine = make_engine(config={"prefill_tokens": 8})
    engine.score(score_request(0, range(4), range(20)))
    engine.step()
    with pytest.raises(EpisodeFailure, match="a fork's source"):
        engine.add(request(1, [], 4, fork_of=0, fork_at=2))
    turn = engine.cut(0)
    assert (turn.stop, len(turn.tokens), len(turn.logprobs)) == ("cancelled", 0, 0)
    assert not engine.has_work
    assert all_free(engine)


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"context": []}, "bad_request", "a context is a non-empty"),
        ({"tokens": []}, "bad_request", "what is scored is a non-empty"),
        ({"tokens": [VOCAB]}, "bad_request", "tokens lie in"),
        ({"temperature": 0.0}, "bad_request", "temperature"),
        ({"tokens": [1] * 95}, "prompt_too_long", "leave no room"),
        ({"id": 0}, "bad_request", "unique"),
    ],
)
def test_a_score_that_cannot_be_given_fails_with_its_reason(fields, reason, detail):
    engine = make_engine()
    engine.add(request(0))
    with pytest.raises(EpisodeFailure, match=detail) as failure:
        engine.score(score_request(**{"id": 1, "context": [1, 2], "tokens": [3], **fields}))
    assert failure.value.reason == reason
    assert engine.waiting == 1


# ── Everything at once ───────────────────────────────────────────────────────────────────────────────────


class WorksAhead(ReferenceRunner):
    """Lets the engine begin the next step before it has seen what the last one sampled, as on a GPU."""

    ahead = 1

    def __init__(self, engine: NativeEngine):
        super().__init__(engine._model, engine._kv, engine._slots)
        self._last = np.zeros(engine._slots.capacity, np.int64)

    def begin(self, plan: Plan) -> Any:
        plan.tokens = np.where(plan.tokens < 0, self._last[plan.rows], plan.tokens)
        running = super().begin(plan)
        self._last[plan.samples] = running.outcome().sampled.tokens
        return running


class Soak:
    """Random requests of all kinds, with whatever can happen to them; keeps every turn that came back."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.engine = make_engine(
            config={
                "page_size": int(self.rng.choice([1, 3, 4, 16])),
                "cache_tokens": int(self.rng.choice([110, 250, 500])),
                "max_running": 9,
                "prefill_tokens": int(self.rng.choice([11, 40])),
            }
        )
        if seed % 2:
            self.engine._runner = WorksAhead(self.engine)
        self.turns: list[Turn] = []
        self.asked: dict[int, Any] = {}
        """Not answered yet."""
        self.held: set[int] = set()
        self.ids = itertools.count()
        self.version = 0
        self.did: Counter[str] = Counter()
        self.waiting: Interrupt | None = None
        """Of the swap that waits."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.rng.integers(0, 3)):
                self.act()
            self.step()
        while self.engine.has_work:
            self.step()
        assert not self.asked

    def step(self) -> None:
        if self.waiting is not None and not self.engine.must_drain(self.waiting):
            self.engine.swap(self.version, self.waiting)
            self.waiting = None
        for number, turn in self.engine.step(admit=self.waiting is None):
            self.ended(number, turn)
        assert self.did["steps"] < 50_000, "the engine makes no progress"
        self.did["steps"] += 1

    def ended(self, number: int, turn: Turn) -> None:
        asked = self.asked.pop(number)
        self.turns.append(turn)
        if getattr(asked, "hold", False):
            self.held.add(number)
        if turn.stop == "cancelled" and not isinstance(asked, ScoreRequest) and self.rng.random() < 0.7:
            again = msgspec.structs.replace(asked, context=turn.context, fork_of=None, fork_at=0, begun=turn)
            self.add(again)
            self.did["resumed"] += 1

    def act(self) -> None:
        rng = self.rng
        actions = ["add", "fork", "score", "cut", "cancel", "release", "swap"]
        what = str(rng.choice(actions, p=[0.3, 0.25, 0.1, 0.1, 0.03, 0.1, 0.12]))
        if what in ("add", "fork", "score"):
            if len(self.asked) > 24:
                return
            getattr(self, what if what != "add" else "sample")()
        elif what == "swap":
            self.swap()
        elif what == "release":
            if self.held:
                number = int(rng.choice(sorted(self.held)))
                self.held.discard(number)
                self.engine.release(number)
        elif self.asked:
            number = int(rng.choice(sorted(self.asked)))
            if what == "cut":
                self.ended(number, self.engine.cut(number))
            else:
                self.engine.cancel(number)
                del self.asked[number]
        self.did[what] += 1

    def sample(self, context: np.ndarray | None = None, **fields: Any) -> None:
        rng = self.rng
        words: list[Interrupt | None] = [None, None, None, None, "keep", "recompute", "resume", "retry", "drain"]
        self.add(
            request(
                next(self.ids),
                rng.integers(0, 4, rng.integers(1, 25)) if context is None else context,
                int(rng.integers(1, 30)),
                sampling=TRUNCATING[int(rng.integers(len(TRUNCATING)))],
                hold=bool(rng.random() < 0.4),
                interrupt=words[int(rng.integers(len(words)))],
                **fields,
            )
        )

    def add(self, one: SampleRequest) -> None:
        length = 0 if one.begun is None else len(one.begun.tokens)
        if len(one.context) + length < 95 and length < one.max_tokens:
            self.engine.add(one)
            self.asked[one.id] = one

    def fork(self) -> None:
        engine, rng = self.engine, self.rng
        known = {**engine._scheduler.held, **engine._sequences}
        sources = [number for number, source in known.items() if source.targets is None]
        if sources:
            number = int(rng.choice(sources))
            slot = known[number].slot
            sampled = len(known[number].tokens) if slot is None else int(engine._slots.sampled[slot])
            at = int(rng.integers(1, min(90, len(known[number].context) + sampled) + 1))
            try:
                self.sample(rng.integers(0, VOCAB, rng.integers(0, 4)), fork_of=number, fork_at=at)
            except EpisodeFailure:
                # In the step under way it has ended.
                if number in engine._sequences:
                    raise

    def score(self) -> None:
        rng = self.rng
        one = score_request(next(self.ids), rng.integers(0, 4, rng.integers(1, 20)), rng.integers(0, VOCAB, 20))
        self.engine.score(one)
        self.asked[one.id] = one

    def swap(self) -> None:
        if self.waiting is not None:
            return
        interrupts: list[Interrupt] = ["keep", "recompute", "resume", "retry", "drain"]
        interrupt = interrupts[int(self.rng.choice(5, p=[0.4, 0.2, 0.15, 0.15, 0.1]))]
        self.version += 1
        fill_standby(self.engine, self.version)
        if self.engine.must_drain(interrupt):
            self.waiting = interrupt
            self.did["waited"] += 1
        else:
            self.engine.swap(self.version, interrupt)
        self.did[interrupt] += 1


@pytest.mark.parametrize("first", [0, 5])
def test_whatever_happens_to_requests_of_all_kinds_every_turn_replays_and_no_page_is_lost(first):
    did, causes = Counter[str](), Counter[str]()
    for seed in range(first, first + 5):
        soak = Soak(seed)
        soak.run(400)
        assert worst_replay({i: turn for i, turn in enumerate(soak.turns) if len(turn.tokens)}) < TOLERANCE, seed
        for number in soak.held:
            soak.engine.release(number)
        soak.engine.drop_prefixes()
        assert soak.engine.pages_free == soak.engine.pages_total, seed
        did += soak.did
        causes.update(event.cause for turn in soak.turns for event in turn.lineage)
    assert min(did[what] for what in ("add", "fork", "score", "cut", "resumed", "release")) > 100
    assert min(did[what] for what in ("keep", "recompute", "resume", "retry", "drain", "waited")) > 5
    assert min(causes[cause] for cause in ("start", "swap", "preempt", "fork", "resume")) > 5

from __future__ import annotations

import asyncio

import pytest

from headrace.records import Task, decode, encode
from headrace.rollout.config import ReasoningGymTasks
from headrace.rollout.tasks import TaskList, load_tasks
from headrace.scoring.base import Attempt, AttemptTurn
from headrace.scoring.rules import ExactMatch, MathVerify, ReasoningGym


def said(*texts: str) -> Attempt:
    return Attempt([AttemptTurn(prompt="", text=text, tokens=[], stop="end") for text in texts])


def task(answer: str | None) -> Task:
    return Task(id="0", prompt="", answer=answer)


# ── ExactMatch ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [("42", "42", 1), (" 42\n", "42 ", 1), ("42.", "42", 0), ("", "42", 0), ("Yes", "yes", 0)],
)
def test_the_whole_text_is_the_answer_without_a_pattern(text, answer, reward):
    assert ExactMatch().score(task(answer), said(text)) == reward


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        (r"\d+", "first 41, then 42", 1),
        (r"\d+", "first 42, then 41", 0),
        (r"answer: (\d+)", "answer: 7 … no, answer: 42 of 50", 1),
        (r"answer: (\d+)", "the answer is 42", 0),
        (r"<a>(.*?)</a>", "<a>42 </a>", 1),
        (r"(?:is|=) *(\d+)(\.)?", "x = 42.", 1),
        (r"answer:(?: (\d+))?", "answer: 42, or answer: none", 0),
    ],
)
def test_the_last_match_of_the_pattern_is_the_answer(pattern, text, reward):
    assert ExactMatch(pattern).score(task("42"), said(text)) == reward


def test_case_counts_unless_it_is_ignored():
    assert ExactMatch(r"\w+$").score(task("Paris"), said("It is paris")) == 0
    assert ExactMatch(r"\w+$", ignore_case=True).score(task("Paris"), said("It is PARIS")) == 1
    assert ExactMatch(ignore_case=True).score(task("paris"), said("Paris")) == 1


def test_the_last_turn_is_what_counts():
    assert ExactMatch().score(task("42"), said("42", "41")) == 0
    assert ExactMatch().score(task("42"), said("41", "42")) == 1
    assert ExactMatch().score(task("42"), said()) == 0


# ── MathVerify ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1/2", r"So it is $\frac{2}{4}$.", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"\sqrt{8}", r"The result is $2\sqrt{2}$", 1),
        ("12", "The answer is 12", 1),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        ("1/2", r"$\frac{2}{3}$", 0),
        ("12", "The answer is 13", 0),
        ("12", "I do not know.", 0),
        ("12", "", 0),
        ("12", r"$\frac{1}{$ }} \boxed{", 0),
    ],
)
def test_mathematically_equal_answers_are_right_and_garbage_is_wrong(answer, text, reward):
    assert asyncio.run(MathVerify().score(task(answer), said(text))) == reward


# ── ReasoningGym ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "dataset", ["chain_sum", "arc_agi", "rearc", "knights_knaves", "spell_backward", "basic_arithmetic"]
)
def test_reasoning_gym_gives_its_own_reward_also_after_the_task_has_travelled(dataset):
    tasks = load_tasks(ReasoningGymTasks(dataset=dataset, size=4, seed=1))
    for one in decode(encode(TaskList(tasks=tasks))).tasks:
        right = one.answer
        assert ReasoningGym().score(one, said(f"<think>…</think> <answer>{right}</answer>")) == 1.0
        assert ReasoningGym().score(one, said(f"<answer>no</answer> or <answer>\n{right}\n</answer>")) == 1.0
        assert ReasoningGym().score(one, said(right)) == 1.0
        assert ReasoningGym().score(one, said(f"<answer>{right}</answer> <answer>wrong</answer>")) < 1.0
        assert ReasoningGym(pattern=None).score(one, said(right)) == 1.0
        assert ReasoningGym(pattern=r"= (.*)").score(one, said(f"x = {right}")) == 1.0
        assert ReasoningGym().score(one, said("")) < 1.0

"""The learning study under benchmarks/: its task, its cells, and what it concludes from them."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from headrace import Attempt, Task
from headrace.scoring.base import AttemptTurn

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "learning"))

import chains
import study


def attempt(text: str, stop: str = "stop") -> Attempt:
    return Attempt([AttemptTurn(prompt="?", text=text, tokens=[], stop=stop)])


def test_a_chain_is_asked_thought_and_answered(monkeypatch) -> None:
    # Move m leads m + 1 places on.
    monkeypatch.setattr(chains, "leads", lambda: [[(p + m + 1) % 61 for p in range(61)] for m in range(300)])
    chain = (59, (0, 4, 9, 0))
    assert chains.prompt(chain) == "m0 m4 m9 m0 . . . . . . . . ? 59"
    assert chains.thinking(chain) == "60 4 14 15 = 15"
    assert chains.lazy(chain) == "= 15"


def test_every_move_can_be_taken_back() -> None:
    assert all(sorted(targets) == list(range(chains.PLACES)) for targets in chains.leads())
    assert len(chains.leads()) == chains.MOVES


def test_tasks_are_not_the_held_out_ones() -> None:
    held_out = {task.prompt for task in chains.held_out_tasks()}
    assert len(held_out) == chains.HELD_OUT
    assert not held_out & {task.prompt for task in islice(chains.training_tasks(), 2000)}
    words = {word for prompt in held_out for word in prompt.split()}
    assert words <= set(study.WORDS)


@pytest.mark.parametrize(
    ("text", "stop", "reward"),
    [
        ("8 11 28 6 = 6", "stop", 1),
        ("= 6", "stop", 1),
        ("= 7", "stop", 0),
        ("= 6 = 6", "stop", 0),
        ("= 6", "length", 0),
    ],
)
def test_what_follows_the_one_sign_is_the_answer(text: str, stop: str, reward: float) -> None:
    assert chains.score(Task(id="t", prompt="?", answer="6"), attempt(text, stop)) == reward


def line(lag: int, way: str, seed: int, accuracy: float) -> dict:
    cell = study.Cell(lag, way, seed)
    curve = [[step, 2.0 * step, accuracy, lag, 0.0, 1.0, 1.0] for step in range(1, 5)]
    told = {"accuracy": accuracy, "accuracy_before": 0.1, "seconds": 9.0 + seed, "tokens": 100, "curve": curve}
    return cell._asdict() | {"name": cell.name} | told


def test_what_staleness_costs_is_bounded_over_seeds() -> None:
    lines = [line(0, "none", seed, 0.8) for seed in range(5)]
    lines += [line(4, "tis", seed, 0.8 - 0.01 * (seed + 1)) for seed in range(5)]
    found = study.loss({one["name"]: one for one in lines}, 4, "tis")
    assert found is not None
    # Mean 0.03, standard deviation 0.0158, Student's t of four degrees of freedom 2.132.
    assert found == pytest.approx((0.03, 0.03 + 2.132 * 0.0158114 / 5**0.5), abs=1e-6)
    assert study.loss({one["name"]: one for one in lines}, 16, "none") is None


def test_a_report_has_a_row_a_curve_and_figures(tmp_path: Path) -> None:
    lines = [
        line(lag, way, seed, 0.8 - lag / 100)
        for lag, way in [(0, "none"), (4, "tis"), (16, "none")]
        for seed in (0, 1)
    ]
    (tmp_path / "cells.jsonl").write_text("".join(study.json.dumps(one) + "\n" for one in lines))
    told = study.report(tmp_path)
    assert [row["lag"] for row in told["rows"]] == [0, 4, 16]
    assert told["figures"] == pytest.approx({"lag4_loss_bound95": 0.04, "lag16_uncorrected_reward_gap": 0.16})
    assert told["curves"]["lag4-tis"]["reward"] == [0.76] * 4
    file = tmp_path / "learning.json"
    file.write_text(study.json.dumps(told))
    assert study.picture(file).startswith(b"\x89PNG")


def test_a_study_goes_on_with_the_cells_that_have_no_line(tmp_path: Path) -> None:
    assert len({cell.name for cell in study.cells()}) == len(study.cells()) == 50
    (tmp_path / "cells.jsonl").write_text(study.json.dumps(line(0, "none", 0, 0.8)) + "\n")
    assert list(study.done(tmp_path)) == ["lag0-none-0"]


def test_a_warm_start_ends_when_enough_is_known(monkeypatch, tmp_path: Path) -> None:
    for name, value in {"PLACES": 3, "MOVES": 2, "LEAST": 1, "MOST": 2, "HELD_OUT": 1}.items():
        monkeypatch.setattr(chains, name, value)
    monkeypatch.setattr(study, "WORDS", ["?", "=", ".", "0", "1", "2", "m0", "m1"])
    monkeypatch.setattr(study, "LONGEST", 9)
    monkeypatch.setattr(study, "LAST_STEPS", 10)
    monkeypatch.setattr(chains, "leads", lambda: [[1, 2, 0], [2, 0, 1]])
    size = study.Size(hidden=32, layers=1, heads=2, steps=400, batch=16)
    tokenizer = study.make_tokenizer(tmp_path)
    model = study.make_model(size, tokenizer, "cpu")
    assert study.warm_start(model, tokenizer, size, 0.5, 0.05, "cpu") >= 0.05
    with pytest.raises(SystemExit, match=r"after 10 steps .* are right, not 90%"):
        study.warm_start(model, tokenizer, size._replace(steps=10), 0.5, 0.9, "cpu")

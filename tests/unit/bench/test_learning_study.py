"""The learning study under benchmarks/: its task, its cells, and what it concludes from them."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from headrace import Attempt, Task
from headrace.scoring.base import AttemptTurn

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "learning"))

import chains
import report
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


def line(lag: int, way: str, seed: int, accuracy: float, commit: str = "c0ffee", *, teacher: bool = False) -> dict:
    cell = study.Cell(lag, way, seed, teacher)
    curve = [[step, 2.0 * step, accuracy, lag, 0.0, 1.0, 1.0] for step in range(1, 5)]
    told = {
        "accuracy": accuracy,
        "accuracy_before": 0.1,
        "seconds": 9.0 + seed,
        "tokens": 100,
        "curve": curve,
        "evaluations": [[0, 0.1], [4, accuracy]],
    }
    return cell._asdict() | {"name": cell.name} | told | {"hardware": {"gpu": "one"}, "commit": commit}


def by_name(lines: list[dict]) -> dict[str, dict]:
    return {one["name"]: one for one in lines}


def test_what_staleness_costs_is_bounded_over_seeds() -> None:
    lines = [line(0, "none", seed, 0.8) for seed in range(5)]
    lines += [line(4, "tis", seed, 0.8 - 0.01 * (seed + 1)) for seed in range(5)]
    lost = report.losses(by_name(lines), 4, "tis")
    assert lost == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    # Mean 0.03, standard deviation 0.0158, Student's t of four degrees of freedom 2.132.
    assert report.bound(lost, 1, report.T95) == pytest.approx(0.03 + 2.132 * 0.0158114 / 5**0.5, abs=1e-6)
    assert report.bound(lost, -1, report.T95) == pytest.approx(0.03 - 2.132 * 0.0158114 / 5**0.5, abs=1e-6)
    assert report.bound([0.1], 1, report.T95) is None
    assert report.losses(by_name(lines), 16, "none") == []
    assert report.figures(by_name(lines)) == {"lag4_loss_bound95": report.bound(lost, 1, report.T95)}
    # Of two corrections the better one is taken, which is to cost something.
    lines += [line(4, "decoupled", seed, 0.1) for seed in range(5)]
    assert report.figures(by_name(lines)) == {"lag4_loss_bound95": report.bound(lost, 1, report.T975)}


def test_what_a_teacher_gains_is_bounded_from_below() -> None:
    lines = [line(0, "none", seed, 0.6) for seed in range(5)]
    lines += [line(0, "none", seed, 0.7 + 0.01 * seed, teacher=True) for seed in range(5)]
    gain = 0.12 - 2.132 * 0.0158114 / 5**0.5
    assert report.figures(by_name(lines)) == pytest.approx({"distillation_gain_bound95": gain}, abs=1e-6)
    assert [row["lost_mean"] for row in report.of(by_name(lines))["rows"]] == [None, pytest.approx(-0.12)]


def test_a_report_has_a_row_a_curve_and_figures(tmp_path: Path) -> None:
    kinds = [(0, "none"), (4, "tis"), (16, "none")]
    lines = by_name([line(lag, way, seed, 0.8 - lag / 100) for lag, way in kinds for seed in (0, 1)])
    told = report.of(lines)
    assert [row["lag"] for row in told["rows"]] == [0, 4, 16]
    assert told["figures"] == pytest.approx({"lag4_loss_bound95": 0.04, "lag16_uncorrected_reward_gap": 0.16})
    assert told["curves"]["lag 4, tis"]["reward"] == [0.76] * 4
    assert told["curves"]["lag 4, tis"]["held_out"] == [[0, 0.1], [4, 0.76]]
    assert told["rows"][1]["accuracies"] == [0.76, 0.76]
    assert (told["hardware"], told["commit"]) == ({"gpu": "one"}, "c0ffee")
    assert report.of(lines | by_name([line(1, "tis", 0, 0.7, "decaf")]))["commit"] == {"0": "c0ffee", "1": "decaf"}
    file = tmp_path / "learning.json"
    file.write_text(json.dumps(told))
    assert report.picture(file).startswith(b"\x89PNG")


def test_a_study_runs_the_cells_that_have_no_line(tmp_path: Path, monkeypatch) -> None:
    assert len({cell.name for cell in study.cells()}) == len(study.cells()) == 50
    (tmp_path / "cells.jsonl").write_text(json.dumps(line(0, "none", 0, 0.8)) + "\n")
    asked: list[list[str]] = []

    class Ended:
        """A run that is over as soon as it begins; the second one has failed."""

        def __init__(self, command: list[str], **how: object) -> None:
            asked.append(command)
            self.returncode = int(len(asked) == 2)
            folder = Path(command[command.index("--run") + 1])
            folder.mkdir(parents=True)
            keys = ("step", "time_s", "reward_mean", "staleness_mean", "kl", "entropy", "effective_sample_frac")
            (folder / "metrics.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")
            summary = {"eval_before": 0.1, "eval_after": 0.7, "seconds": 5, "evaluations": []}
            (folder / "summary.json").write_text(json.dumps(summary | {"ledger": {"tokens": {"trained": 9}}}))

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(study, "commit", lambda: "c0ffee")
    monkeypatch.setattr(study.subprocess, "Popen", Ended)
    study.run(tmp_path, together=2, seconds=60, sets=["training.steps=1"], most=3)
    assert len(asked) == 3
    assert all("--overwrite" in command and "training.steps=1" in command for command in asked)
    assert list(study.done(tmp_path)) == ["lag0-none-0", "lag1-none-0", "lag4-none-0"]


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
    assert study.warm_start(model, tokenizer, size, 0.5, 0.05, "model") >= 0.05
    with pytest.raises(SystemExit, match=r"after 10 steps .* are right, not 90%"):
        study.warm_start(model, tokenizer, size._replace(steps=10), 0.5, 0.9, "model")

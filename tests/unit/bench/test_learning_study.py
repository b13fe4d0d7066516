"""The learning study under benchmarks/: its task, its cells, and what it concludes from them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest

from headrace import Attempt, Task
from headrace.scoring.base import AttemptTurn

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "learning"))

import chains
import report
import study


def attempt(text: str, stop: str = "end") -> Attempt:
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
        ("8 11 28 6 = 6", "end", 1),
        ("= 6", "end", 1),
        ("= 7", "end", 0),
        ("= 6 = 6", "end", 0),
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
    assert report.bound(lost, 1) == pytest.approx(0.03 + 2.132 * 0.0158114 / 5**0.5, abs=1e-6)
    assert report.bound(lost, -1) == pytest.approx(0.03 - 2.132 * 0.0158114 / 5**0.5, abs=1e-6)
    assert report.bound([0.1], 1) is None
    assert report.losses(by_name(lines), 16, "none") == []
    assert report.figures(by_name(lines)) == {"lag4_loss_bound95": report.bound(lost, 1)}
    # Of several corrections the best one is taken, which is to cost something: the quantiles are of 97.5 % and of
    # 98.33 %.
    for way, quantile in {"decoupled": 2.776, "third": 3.186}.items():
        lines += [line(4, way, seed, 0.1) for seed in range(5)]
        high = 0.03 + quantile * 0.0158114 / 5**0.5
        assert report.figures(by_name(lines)) == pytest.approx({"lag4_loss_bound95": high}, abs=1e-5)


@pytest.mark.parametrize(
    ("freedom", "of_95", "of_975"),
    [
        (1, 6.314, 12.706),
        (2, 2.920, 4.303),
        (3, 2.353, 3.182),
        (4, 2.132, 2.776),
        (10, 1.812, 2.228),
        (29, 1.699, 2.045),
    ],
)
def test_students_quantiles_are_those_of_tables(freedom: int, of_95: float, of_975: float) -> None:
    found = [round(report.student_quantile(level, freedom), 3) for level in (0.95, 0.975)]
    assert found == [of_95, of_975]


def test_a_smoothed_curve_begins_and_ends_where_it_does() -> None:
    assert report.smooth([0.0, 3.0, 9.0, 0.0, 6.0], beside=1) == [0.0, 4.0, 4.0, 5.0, 6.0]
    assert report.smooth([0.0, 3.0, 9.0, 0.0, 8.0], beside=3) == [0.0, 4.0, 4.0, 17 / 3, 8.0]


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


class Ended:
    """A run that is over as soon as it begins; the second one has failed."""

    asked: list[list[str]]

    def __init__(self, command: list[str], **how: object) -> None:
        self.asked.append(command)
        self.returncode = int(len(self.asked) == 2)
        folder = Path(command[command.index("--run") + 1])
        folder.mkdir(parents=True)
        keys = ("step", "time_s", "reward_mean", "staleness_mean", "kl", "entropy", "effective_sample_frac")
        (folder / "metrics.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")
        summary = {"eval_before": 0.1, "eval_after": 0.7, "seconds": 5, "evaluations": []}
        (folder / "summary.json").write_text(json.dumps(summary | {"ledger": {"tokens": {"trained": 9}}}))

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch) -> Path:
    """A study's folder with models, whose runs end at once."""
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(f"weights of the {name}")
    monkeypatch.setattr(study, "commit", lambda: "c0ffee")
    monkeypatch.setattr(Ended, "asked", [], raising=False)
    monkeypatch.setattr(study.subprocess, "Popen", Ended)
    return tmp_path


def test_a_study_runs_the_cells_that_have_no_line(prepared: Path) -> None:
    assert len({cell.name for cell in study.cells()}) == len(study.cells()) == 50
    common = study.in_common(prepared, ["training.steps=1"])
    study.keep(prepared, line(0, "none", 0, 0.8) | common)
    failed = study.run(prepared, together=2, seconds=60, sets=["training.steps=1"], most=3)
    assert failed == ["lag1-tis-0"]
    assert len(Ended.asked) == 3
    assert all("--overwrite" in command and "training.steps=1" in command for command in Ended.asked)
    lines = study.done(prepared)
    assert list(lines) == ["lag0-none-0", "lag1-none-0", "lag4-none-0"]
    digests = {"model": "ffef5ec7c636aae5", "teacher": "0426c7e0737b8857"}
    assert [(one["sets"], one["models"]) for one in lines.values()] == [(["training.steps=1"], digests)] * 3


def test_a_study_with_a_failed_cell_exits_with_1(prepared: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", "run", str(prepared), "--most", "2"])
    # A message as its code: printed, and 1.
    with pytest.raises(SystemExit, match=r"^1 failed: lag1-none-0$"):
        study.main()


def test_a_line_that_was_cut_off_is_not_done_and_is_replaced(tmp_path: Path, capsys) -> None:
    first, second = line(0, "none", 0, 0.8), line(0, "none", 1, 0.7)
    file = tmp_path / "cells.jsonl"
    file.write_text(json.dumps(first) + "\n" + json.dumps(second)[:40])
    assert study.done(tmp_path) == {"lag0-none-0": first}
    assert "its last line is unfinished" in capsys.readouterr().err
    study.keep(tmp_path, second)
    assert file.read_text() == json.dumps(first) + "\n" + json.dumps(second) + "\n"
    assert study.done(tmp_path) == {"lag0-none-0": first, "lag0-none-1": second}


def test_cells_of_other_settings_or_models_are_refused(prepared: Path) -> None:
    study.run(prepared, together=1, seconds=60, sets=["training.steps=1"], most=1)
    with pytest.raises(SystemExit, match=r'lag0-none-0 has .*"training.steps=1".* and this run has .*steps=2'):
        study.run(prepared, together=1, seconds=60, sets=["training.steps=2"], most=1)
    (prepared / "model" / "model.safetensors").write_text("weights of another student")
    with pytest.raises(SystemExit, match="the same settings and models"):
        study.run(prepared, together=1, seconds=60, sets=["training.steps=1"], most=1)
    assert len(Ended.asked) == 1
    study.keep(prepared, line(0, "none", 1, 0.7) | study.in_common(prepared, ["training.steps=1"]))
    with pytest.raises(SystemExit, match="the same settings and models"):
        study.done(prepared)


def test_lines_that_do_not_say_what_was_asked_are_reported(tmp_path: Path) -> None:
    study.keep(tmp_path, line(0, "none", 0, 0.8))
    study.keep(tmp_path, line(0, "none", 1, 0.7))
    assert report.of(study.done(tmp_path))["rows"][0]["accuracies"] == [0.8, 0.7]


def test_lines_that_do_not_say_what_was_asked_get_no_others(prepared: Path) -> None:
    study.keep(prepared, line(0, "none", 0, 0.8))
    with pytest.raises(SystemExit, match=r'lag0-none-0 has {"sets": null, "models": null}'):
        study.run(prepared, together=1, seconds=60, sets=[], most=1)


def test_a_study_without_models_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"model has no weights: run `prepare` first"):
        study.run(tmp_path, together=1, seconds=60, sets=[], most=1)


SLEEPING = """
import subprocess, sys
import study

def begin(folder, cell, sets):
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    process.stdout.readline()
    print(process.pid, flush=True)
    return study.Running(cell, process)

study.begin = begin
study.in_common = lambda folder, sets: {}
study.main()
"""


def test_a_terminated_study_ends_its_cells(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEPING, "run", str(tmp_path), "--together", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        cells = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert [cell.is_running() for cell in cells] == [False, False]


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

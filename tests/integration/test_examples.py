"""The examples run as their docstrings say, and the documentation names what exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.audit import run_audit
from headrace.config.schema import all_keys
from headrace.records import Task
from headrace.references import resolve
from headrace.scoring.base import Attempt, AttemptTurn
from headrace.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["training.steps=6", "evaluation.limit=40", "training.groups_per_batch=8"]
BOUND = 2


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository's root, with the quickstart's model made."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "examples").symlink_to(ROOT / "examples")
    call(folder, sys.executable, "examples/quickstart/prepare.py", "runs/quickstart-model")
    return folder


def call(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train(checkout: Path, run: str, *overrides: str) -> Path:
    sets = [word for override in (*SHORT, *overrides) for word in ("--set", override)]
    headrace = [sys.executable, "-m", "headrace.cli.main"]
    call(checkout, *headrace, "train", "examples/quickstart/quickstart.toml", *sets, "--run", f"runs/{run}")
    return checkout / "runs" / run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def episodes(run: Path) -> list[dict[str, Any]]:
    return [line for file in sorted(run.glob("episodes/step-*.jsonl")) for line in lines(file)]


def assert_finished(run: Path, *, admitted: int) -> None:
    summary = json.loads((run / "summary.json").read_text())
    ledger = summary["ledger"]
    assert (summary["steps"], summary["finished"]) == (6, True)
    assert 0 <= summary["eval_before"] <= 1
    assert 0 <= summary["eval_after"] <= 1
    assert 1 <= summary["staleness_max"] <= BOUND
    assert (ledger["admitted"], ledger["trained"], ledger["in_flight"]) == (admitted, admitted, 0)
    assert ledger["dropped"] == {}
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert len(episodes(run)) == admitted
    assert run_audit(run).violations == []


@pytest.mark.parametrize(("name", "most"), [("my_scorer", 30), ("my_environment", 30), ("library", 40)])
def test_an_example_is_short(name: str, most: int) -> None:
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < most


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Fri Mon Tue Sat Tue = Tue", 1.0),
        ("= Tue", 0.8),
        ("Fri Mon = Tue", 0.88),  # two of five days shown
        ("Fri Mon Tue Sat Wed = Wed", 0.16),  # four of five right, then a wrong answer
        ("Tue", 0.0),
    ],
)
def test_the_scorer_gives_the_reward_its_docstring_says(text: str, reward: float) -> None:
    score = resolve(f"{ROOT}/examples/my_scorer.py:score")
    task = Task(id="0", prompt="Wed +2 +3 +1 +4 +3 . . . . . ?", answer="Tue")
    turn = AttemptTurn(prompt="", text=text, tokens=[], stop="end")
    assert score(task, Attempt(turns=[turn])).reward == pytest.approx(reward)


def test_the_quickstart_trains_where_there_is_nothing_that_only_linux_has(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memfd_create, /proc, /dev/shm, prctl, epoll or processor affinity in any process, and no Triton."""
    log = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/integration/bare_system"))
    monkeypatch.setenv("PYTHON_BARE_SYSTEM_LOG", str(log))
    run = train(checkout, "bare")
    assert_finished(run, admitted=6 * 8 * 8)
    audit = json.loads(call(checkout, sys.executable, "-m", "headrace.cli.main", "audit", "runs/bare", "--json"))
    assert audit["ok"]
    started = log.read_text()
    kept = ["trainer", "engine-0", "engine-eval", "environment-1", "scorer-1"]
    assert [name for name in kept if f"headrace.orchestration.child {name} " not in started] == []
    assert started.count("bare_system/keeper.py") == len(kept)
    assert "headrace.cli.main train" in started
    assert "headrace.cli.main audit" in started


def test_a_scorer_of_ones_own_gives_the_rewards_that_are_trained_on(checkout: Path) -> None:
    run = train(checkout, "mine", "scorer.source=examples/my_scorer.py:score")
    assert_finished(run, admitted=6 * 8 * 8)
    for episode in episodes(run):
        metrics = episode["metrics"]
        assert episode["reward"] == pytest.approx(0.8 * metrics["right"] + 0.2 * metrics["work"])
        assert 0 <= episode["reward"] <= 1
    assert {episode["metrics"]["right"] for episode in episodes(run)} == {0.0, 1.0}


def test_an_environment_of_ones_own_asks_again_after_a_wrong_answer(checkout: Path) -> None:
    run = train(
        checkout, "second", "engine.max_context=64", "environment.source=examples/my_environment.py:SecondChance"
    )
    assert_finished(run, admitted=6 * 8 * 8)
    question = Tokenizer(checkout / "runs/quickstart-model").encode("?")
    found = {1.0: 0, 0.0: 0}
    for episode in episodes(run):
        first_right = episode["metrics"]["first_right"]
        found[first_right] += 1
        assert [turn["parent"] for turn in episode["turns"]] == ([None] if first_right else [None, 0])
        if not first_right:
            assert episode["turns"][1]["context"] == question
    assert min(found.values()) > 0


def test_taking_turns_with_a_patient_scorer_both_sides_say_that_they_waited_for_it(checkout: Path) -> None:
    patient = "scorer.source=examples/quickstart/days.py:patient_score"
    run = train(
        checkout, "judge", patient, "scorer.options.wait_s=4", "buffer.max_staleness=0", "training.threads=1"
    )
    time = json.loads((run / "summary.json").read_text())["time"]
    for who in ("trainer", "engine"):
        shares = time[f"{who}_idle"]
        assert max(shares, key=shares.__getitem__) == "scoring"
        for line in lines(run / "metrics.jsonl"):
            by_cause = [line[f"{who}_idle_{cause}_frac"] for cause in shares]
            assert sum(by_cause) == pytest.approx(line[f"{who}_idle_frac"], abs=1e-9)
    # Nothing is generated or scored during a step.
    assert time["together"] < 0.05


def test_a_run_from_python_uses_the_scripts_own_classes(checkout: Path) -> None:
    out = call(checkout, sys.executable, "examples/library.py", *SHORT)
    run = checkout / "runs/library"
    assert_finished(run, admitted=6 * 8 * 8)
    assert out.startswith("accuracy 0.")
    assert "library.py:LastCall" in (run / "config.toml").read_text()
    assert all(len(turn["tokens"]) <= 10 for episode in episodes(run) for turn in episode["turns"])


def test_the_loop_of_primitives_learns_within_the_bound(checkout: Path) -> None:
    out = call(checkout, sys.executable, "examples/loop.py", "30")
    found = re.findall(r"^step +(\d+) .* reward ([\d.]+) .* staleness at most (\d+)$", out, re.MULTILINE)
    steps, rewards, staleness = ([float(value) for value in column] for column in zip(*found, strict=True))
    assert steps == list(range(1, 31))
    assert all(0 <= reward <= 1 for reward in rewards)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert staleness[0] == 0
    assert 1 <= max(staleness) <= BOUND


def test_every_key_of_the_configuration_is_documented_with_its_default() -> None:
    rows = set(re.findall(r"^\| `([^`]+)` \| .* \| `([^|]+)` \|", _read("docs/configuration.md"), re.MULTILINE))
    assert rows == {(key.path, key.default) for key in all_keys()}


def test_the_documentation_names_files_that_exist() -> None:
    for page in [*ROOT.glob("docs/**/*.md"), ROOT / "CHANGELOG.md"]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for path in re.findall(r"`((?:src|tests|docs|examples|\.ci)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")

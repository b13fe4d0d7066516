"""Whole runs through the command line: finishing, being interrupted, being killed, going on."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from integration_project import Project, wait_until

from headrace.telemetry.episodes import read_episodes
from headrace.telemetry.metrics import METRIC_KEYS


def versions(project: Project) -> list[tuple[int, int | None, int]]:
    with sqlite3.connect(project.run / "ledger.sqlite") as db:
        return db.execute("SELECT number, parent, orphaned FROM versions ORDER BY number").fetchall()


def assert_sound(project: Project, *, steps: int) -> None:
    """The run has ended, left no process, trained to the end, and its audit passes, recomputation included."""
    summary = json.loads((project.run / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["steps"] == steps
    assert summary["finished"] is True
    assert ledger["in_flight"] == 0
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["trained"] == steps * 16
    audit = project.audit("--recompute", "20")
    assert audit["violations"] == []
    assert audit["recomputed"]["episodes"] == 20
    assert audit["recomputed"]["max_abs_diff"] < 1e-4
    assert project.children() == {}


def test_a_run_finishes_and_leaves_what_it_promises(project):
    summary = project.train()
    assert summary["steps"] == 12
    assert summary["staleness_max"] <= 2
    lines = [json.loads(line) for line in (project.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["version"] for line in lines] == list(range(1, 13))
    assert all(set(METRIC_KEYS) <= set(line) for line in lines)
    assert all(line["mismatch_kl"] < 1e-6 for line in lines if line["staleness_max"] == 0)
    assert sum(line["tokens_trained"] for line in lines) == summary["ledger"]["tokens"]["trained"]
    for name in (
        "config.toml",
        "events.jsonl",
        "report.png",
        "ledger.sqlite",
        "checkpoints/step-000012/state.json",
    ):
        assert (project.run / name).stat().st_size > 0, name
    assert_sound(project, steps=12)


def test_synchronous_training_is_the_same_code_without_staleness(project):
    summary = project.train("--set", "buffer.type=none", "--set", "buffer.max_staleness=0")
    assert summary["staleness_max"] == 0
    assert_sound(project, steps=12)


def test_the_transformers_back_end_trains_what_the_native_engine_samples(project):
    project.train("--set", "training.backend=transformers", "--set", "training.steps=4")
    lines = [json.loads(line) for line in (project.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["staleness_max"] == 0
    assert lines[0]["mismatch_kl"] < 1e-6
    assert_sound(project, steps=4)


def test_a_policy_that_teaches_itself_changes_its_teacher_while_it_generates(project):
    """The teacher is changed five times; the ledger says which one each episode was held against. Requests always
    wait, so the engine is idle only where something holds it up."""
    distillation = ("training.distillation.every=2", "training.distillation.rewards=true")
    slow = ("engine.max_running=4", "environment.max_tokens=24")
    project.train(*(part for one in ("training.steps=14", *distillation, *slow) for part in ("--set", one)))
    with sqlite3.connect(project.run / "ledger.sqlite") as db:
        rows = db.execute("SELECT DISTINCT trained_at, teacher FROM episodes WHERE state = 'trained' ORDER BY 1")
        teachers = dict(rows.fetchall())
    assert teachers == {at: max(0, at // 2 * 2 - 2) for at in range(14)}
    events = [json.loads(line) for line in (project.run / "events.jsonl").read_text().splitlines()]
    first, *changes = [event for event in events if event["kind"] == "teacher"]
    assert [event["version"] for event in (first, *changes)] == [0, 2, 4, 6, 8, 10]
    lines = [json.loads(line) for line in (project.run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["teacher_divergence"] > 0 for line in lines[1:])
    recorded = list(read_episodes(project.run))
    assert {stored.trained_version: stored.teacher for stored in recorded} == teachers
    episodes = [stored.episode for stored in recorded]
    total = {"took": 0.0, "busy": 0.0, "idle": 0.0}
    for change in changes:
        before, after = lines[change["step"] - 2 : change["step"]]
        took = after["time_s"] - before["time_s"]
        received = [e.num_tokens for e in episodes if change["time"] - took < e.finished < change["time"]]
        assert sum(received) > 0
        assert after["gen_tokens_per_s"] > 0
        total["took"] += took
        for state in ("busy", "idle"):
            total[state] += after[f"engine_{state}_s"] - before[f"engine_{state}_s"]
        total["idle"] += after["swap_pause_s"]
    # Of all changes together: single steps of some 50 ms say little on a busy machine.
    assert total["busy"] > 0.5 * total["took"]
    assert total["idle"] < 0.4 * total["took"]
    # Engines get versions of the policy and no others, and are never put to sleep.
    published = [event["version"] for event in events if event["kind"] == "published"]
    assert published == sorted(set(published))
    assert {event.cause for e in episodes for turn in e.turns for event in turn.lineage} <= {"start", "swap"}
    assert_sound(project, steps=14)


def test_batches_used_twice_near_a_reference_are_counted_and_audited(project):
    settings = ("training.epochs=2", "training.minibatches=2", "training.reference.coefficient=0.01")
    corrections = 'training.corrections=[{type="tis"}]'
    project.train(*(part for one in (*settings, corrections) for part in ("--set", one)))
    with sqlite3.connect(project.run / "ledger.sqlite") as db:
        times = db.execute("SELECT DISTINCT times_trained FROM episodes WHERE state = 'trained'").fetchall()
    assert times == [(2,)]
    lines = [json.loads(line) for line in (project.run / "metrics.jsonl").read_text().splitlines()]
    assert {line["updates"] for line in lines} == {4}
    assert lines[-1]["reference_kl"] > 0
    assert_sound(project, steps=12)


@pytest.mark.parametrize(
    ("interrupt", "schedule"),
    [
        ("keep", "blocking"),
        ("recompute", "blocking"),
        ("resume", "never_stop"),
        ("retry", "never_stop"),
        ("drain", "never_stop"),
    ],
)
def test_truncated_sampling_and_swaps_are_recomputable(project, interrupt, schedule):
    project.train(
        "--set", "environment.sampling.top_p=0.8",
        "--set", f"sync.interrupt={interrupt}",
        "--set", f"sync.schedule={schedule}",
    )  # fmt: skip
    assert_sound(project, steps=12)


def test_ctrl_c_writes_a_checkpoint_and_resume_goes_on(project):
    run = project.start("train", "config.toml", "--set", "training.steps=2000")
    wait_until(lambda: project.steps_done() >= 5, 60, "five steps")
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=30)[0]
    assert run.returncode == 1, output
    assert "--resume" in output
    assert project.children() == {}
    summary = json.loads((project.run / "summary.json").read_text())
    done = summary["steps"]
    assert done >= 5
    assert (project.run / "checkpoints" / f"step-{done:06d}" / "state.json").exists()
    assert project.audit()["ok"]
    before = versions(project)
    assert before[-1] == (done, done - 1, 0)

    project.train("--resume", "--set", f"training.steps={done + 4}")
    assert versions(project) == [*before, *((done + i, done + i - 1, 0) for i in range(1, 5))]
    assert_sound(project, steps=done + 4)


KILLS = [("controller", 0), ("controller", 1), ("trainer", 0), ("trainer", 1), ("engine-0", 0), ("engine-0", 1)]


@pytest.mark.parametrize(("victim", "moment"), [*KILLS, ("scorer-1", 0), ("environment-1", 0)])
def test_a_run_whose_process_is_killed_resumes_and_its_audit_passes(project, victim, moment):
    dice = random.Random(f"{victim} {moment}")
    run = project.start("train", "config.toml", "--set", "training.steps=400")
    wait_until(lambda: project.steps_done() >= dice.choice([1, 3, 7]), 60, "some steps")
    time.sleep(dice.random() * 0.3)
    (run if victim == "controller" else project.children()[victim]).send_signal(signal.SIGKILL)
    if victim == "controller":
        run.communicate(timeout=30)
        assert run.returncode != 0
    else:
        # Any other process may die: the run heals and goes on.
        here = project.steps_done()
        wait_until(lambda: project.steps_done() > here + 5, 60, "the run to go on")
        run.send_signal(signal.SIGINT)
        output = run.communicate(timeout=30)[0]
        if victim == "trainer":
            assert "trainer ended unexpectedly: killed by signal 9" in output
            assert "The run goes on from its last checkpoint" in output
    wait_until(lambda: project.children() == {}, 5, "its processes to end")
    assert project.audit()["ok"], "also before it is resumed"

    steps = project.steps_done() + 3
    project.train("--resume", "--set", f"training.steps={steps}")
    assert_sound(project, steps=steps)
    numbers = [number for number, _, _ in versions(project)]
    assert len(numbers) == len(set(numbers))


def test_a_scorer_that_fails_in_any_way_costs_its_episodes_only(project):
    every_task_once = ["--set", "training.steps=15", "--set", "tasks.options.count=64"]
    project.train("--set", "scorer.source=user.py:troubled", "--set", "scorer.timeout_s=1", *every_task_once)
    with sqlite3.connect(project.run / "ledger.sqlite") as db:
        reasons = dict(db.execute("SELECT DISTINCT task, reason FROM episodes WHERE state = 'dropped'").fetchall())
    assert reasons == {"t1": "scorer_error", "t3": "scorer_crash", "t5": "scorer_timeout", "t7": "bad_reward"}
    assert_sound(project, steps=15)


def test_what_a_dying_environment_had_sampled_is_wasted_and_not_trained_on(project):
    summary = project.train("--set", "environment.source=user.py:Fragile", "--set", "training.steps=6")
    turns = [len(stored.episode.turns) for stored in read_episodes(project.run)]
    assert set(turns) == {1}
    assert len(turns) == summary["ledger"]["trained"]
    assert summary["ledger"]["tokens"]["dropped"]["attempt_begun_again"] > 0
    assert project.audit("--recompute", "10")["ok"]


def test_a_task_file_with_a_bad_line_is_refused_as_bad_input(project):
    (project.path / "tasks.jsonl").write_text('{"prompt": "w1"}\n{"prompt": \n')
    (project.path / "config.toml").write_text(
        (project.path / "config.toml")
        .read_text()
        .replace('"python"\nsource = "user.py:tasks"', '"jsonl"\npath = "tasks.jsonl"')
    )
    done = project.headrace("train", "config.toml")
    assert done.returncode == 2
    assert "tasks.jsonl, line 2: a line is one JSON object" in done.stderr
    assert not (project.path / "runs").exists()
    assert project.children() == {}


def test_a_scorer_that_does_not_load_in_time_is_named(project):
    slow = "\nimport time\nclass Slow:\n    def __init__(self):\n        time.sleep(60)\n"
    slow += "    def score(self, task, attempt):\n        return 1.0\n"
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + slow)
    done = project.headrace(
        "train", "config.toml", "--set", "scorer.source=user.py:Slow", "--set", "limits.start_s=12"
    )
    assert done.returncode == 1
    assert "scorer-1 has been loading the user's code for 1" in done.stderr
    assert "the controller waited 12.0 s for scorer-1 to load the user's code" in done.stderr
    assert project.children() == {}


def test_a_scorer_stuck_in_a_thread_costs_its_episodes_only(project):
    project.train(
        "--set", "scorer.source=user.py:stuck", "--set", "scorer.timeout_s=1", "--set", "training.steps=15"
    )
    with sqlite3.connect(project.run / "ledger.sqlite") as db:
        rows = db.execute("SELECT DISTINCT task FROM episodes WHERE reason = 'scorer_timeout'").fetchall()
    assert rows == [("t3",)]
    assert_sound(project, steps=15)


def test_a_prompt_that_is_too_long_costs_its_episodes_only(project):
    project.train("--set", "tasks.options={count = 16, long_prompts = [2, 5]}")
    with sqlite3.connect(project.run / "ledger.sqlite") as db:
        rows = db.execute(
            "SELECT DISTINCT task FROM episodes WHERE reason = 'prompt_too_long' ORDER BY 1"
        ).fetchall()
    assert rows == [("t2",), ("t5",)]
    assert_sound(project, steps=12)


def test_a_run_in_which_everything_fails_ends_with_the_reason(project):
    (project.path / "user.py").write_text(
        (project.path / "user.py").read_text() + "\ndef broken(task, attempt):\n    1 / 0\n"
    )
    done = project.headrace("train", "config.toml", "--set", "scorer.source=user.py:broken")
    assert done.returncode == 1
    assert "scorer_error: ZeroDivisionError" in done.stderr
    assert project.children() == {}


def test_the_ledger_of_a_run_that_failed_is_whole(project):
    code = "\ndef broken(task, attempt):\n    1 / 0\n"
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + code)
    project.headrace("train", "config.toml", "--set", "scorer.source=user.py:broken")
    ledger = project.audit()["ledger"]
    assert ledger["admitted"] >= 132 * 4
    assert ledger["dropped"]["scorer_error"] >= 132 * 4


def test_overwriting_removes_a_run_and_nothing_of_the_users(project):
    project.train("--set", "training.steps=2")
    (project.run / "notes.txt").write_text("mine")
    project.train("--set", "training.steps=3", "--overwrite")
    assert project.steps_done() == 3
    assert (project.run / "notes.txt").read_text() == "mine"
    done = project.headrace("train", "config.toml", "--run", ".", "--overwrite")
    assert done.returncode == 2
    assert "Headrace has made no run in this one" in done.stderr
    assert (project.path / "user.py").exists()


def test_a_run_that_lost_its_ledger_is_not_resumed(project):
    project.train("--set", "training.steps=2")
    (project.run / "ledger.sqlite").unlink()
    done = project.headrace("train", "config.toml", "--resume", "--set", "training.steps=3")
    assert done.returncode == 2
    assert "has lost it" in done.stderr


def test_a_finished_run_leaves_its_model_in_hugging_face_format(project):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    project.train("--set", "training.steps=2")
    final = project.run / "checkpoints" / "final"
    assert AutoModelForCausalLM.from_pretrained(final).config.vocab_size == 18
    assert AutoTokenizer.from_pretrained(final).convert_ids_to_tokens([3, 4]) == ["w3", "w4"]


LIBRARY = """
import asyncio
import beside
import headrace

async def main():
    config = headrace.load_config("config.toml", ["training.steps=2"])
    return headrace.train(config, scorer=beside.score, folder="runs/config", progress=False)

if __name__ == "__main__":
    print(asyncio.run(main())["steps"])
"""


def test_the_library_runs_inside_an_event_loop_with_a_scorer_beside_the_script(project):
    """As in a notebook; the script's folder is not the current one."""
    folder = project.path / "lib"
    folder.mkdir()
    (folder / "script.py").write_text(LIBRARY)
    (folder / "beside.py").write_text(
        "def score(task, attempt):\n    return float(attempt.turns[-1].tokens[0] % 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "lib/script.py"], cwd=project.path, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "2\n", done.stderr
    assert project.audit("--recompute", "5")["ok"]


def test_a_script_without_the_main_guard_is_told_so(project):
    script = LIBRARY.replace('if __name__ == "__main__":\n    print', "print").replace("beside.score", "score")
    script = script.replace("import beside", "def score(task, attempt):\n    return 1.0")
    (project.path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=project.path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0
    assert '__name__ == "__main__"' in done.stderr


USER_METRICS = '''
import zlib
from headrace import Score, Task
from user import tasks

def held_out():
    return tasks(12)

def moody(task, attempt):
    """±1, with numbers of its own, and a failure for one attempt in three."""
    last = attempt.turns[-1].tokens
    if zlib.crc32(bytes(last)) % 3 == 0:
        raise KeyError("answer")
    return Score(1.0 if last[0] % 2 else -1.0, {"first": float(last[0])})
'''


def test_failures_and_users_metrics_are_where_people_look(project):
    (project.path / "moody.py").write_text(USER_METRICS)
    sets = 'evaluation.sets={other={tasks={type="python", source="moody.py:held_out"}, samples=2}}'
    words = ["scorer.source=moody.py:moody", 'evaluation.tasks={type="python", source="moody.py:held_out"}', sets]
    words += ["evaluation.every=6", "evaluation.limit=12", "training.min_group=2"]
    settings = [part for word in words for part in ("--set", word)]
    done = project.headrace("train", "config.toml", "--set", "training.steps=6", *settings)
    assert done.returncode == 0, done.stderr
    assert (
        "of 12 completions failed and are not in it (scorer_error: KeyError: 'answer' (moody.py, line "
        in done.stderr
    )
    assert "training episodes fail: " in done.stderr
    assert "held-out reward" in done.stderr
    assert "accuracy" not in done.stdout + done.stderr
    summary = json.loads((project.run / "summary.json").read_text())
    assert (summary["eval_before"], summary["eval_after"], summary["eval_metric"]) == (None, None, "reward")
    assert len(summary["warnings"]) == 5
    assert not (project.run / "checkpoints" / "best").exists()
    lines = [json.loads(line) for line in (project.run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        found = [one.episode.metrics["first"] for one in read_episodes(project.run, line["step"])]
        assert line["user/first"] == pytest.approx(sum(found) / len(found))
    assert summary["user"]["first"] == pytest.approx(sum(line["user/first"] for line in lines) / 6)
    shares = [line["failed_frac"] for line in lines if line["failed_frac"] is not None]
    assert 0.1 < sum(shares) / len(shares) < 0.6
    assert project.audit()["violations"] == []
    # A resumed run keeps the evaluations of before as they were.
    again = project.train("--resume", "--set", "training.steps=8", *settings)
    assert again["evaluations"][:2] == summary["evaluations"]
    assert [line["step"] for line in again["evaluations"]] == [0, 6, 8]
    assert project.audit()["violations"] == []

"""Runs with users' code that would harm more than itself: they go on, at their rate, and nothing is left behind.

Each case is run in a short form here, and with the full numbers by `make test-full`.
"""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import threading
import time
from pathlib import Path

import psutil
import pytest
from integration_project import Project, wait_until

HARM = '''
import asyncio, os, signal, time
from pathlib import Path

seen = 0

def once(name):
    """True for the first who asks."""
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def harm_of(task, kinds):
    """For each kind of harm one task, with all its episodes: the one whose turn it is when the run has found its
    pace, one kind after another."""
    global seen
    seen += 1
    if seen % 160 == 0:
        kind = next((kind for kind in kinds if once(f"chosen-{kind}")), None)
        if kind:
            Path(f"culprit-{kind}").write_text(task.id)
    for kind in kinds:
        culprit = Path(f"culprit-{kind}")
        if culprit.exists() and culprit.read_text() == task.id:
            return kind

def began():
    with open("began", "a") as file:
        file.write(f"{time.time()}\\n")

def ended(kind):
    with open("ended", "a") as file:
        file.write(f"{kind} {time.time()}\\n")

def hide():
    """As a daemon does: a session of its own, deaf to what would end it, orphaned."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)

class Endless(Exception):
    def __init__(self, size):
        self.size = size

    def __str__(self):
        return "y" * self.size

async def harms(task, attempt, kinds):
    kind = harm_of(task, kinds)
    if kind is None:
        return score(task, attempt)
    began()
    if kind == "prints":
        # In full once: an episode is run three times until it is known to be the culprit.
        for _ in range((kinds[kind] if once("printed") else 50_000_000) // 1_000_000):
            os.write(1, (b"x" * 199 + b"\\n") * 5000)
        os.write(2, b"that was all\\n")
    elif kind == "forks":
        for index in range(kinds[kind]):
            pid = os.fork()
            if pid == 0:
                if index % 2:
                    hide()
                while True:
                    time.sleep(3600)
            if index % 2:
                os.waitpid(pid, 0)
    elif kind == "stops":
        ended(kind)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raises":
        ended(kind)
        raise Endless(kinds[kind])
    ended(kind)
    os._exit(9)

class Greedy:
    def __init__(self, count):
        self.count = count

    async def rollout(self, task, policy):
        if harm_of(task, ["samples"]) is None:
            await policy.sample(task.prompt)
            return
        began()
        try:
            await asyncio.gather(*(policy.sample(task.prompt) for _ in range(self.count)))
        finally:
            ended("samples")
'''


class Watch(threading.Thread):
    """Samples the resident memory of the run's controller, and remembers the marks of its children."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._controller = psutil.Process(pid)
        self.samples: list[tuple[float, int]] = []
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.samples.append((time.time(), self._controller.memory_info().rss))
                time.sleep(0.02)
        except psutil.NoSuchProcess:
            pass

    def growth(self, since: float) -> int:
        """Bytes above what it had at that time."""
        before = [rss for at, rss in self.samples if at < since]
        after = [rss for at, rss in self.samples if at >= since]
        return max(after) - before[-1]


def left_behind(folder: Path) -> list[psutil.Process]:
    """Processes of a run in `folder`: those that began there with a mark of Headrace in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if "HEADRACE_CHILD" in variables and process.cwd() == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def step_times(folder: Path) -> list[float]:
    """When each step was done, by the wall clock."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    begun = next(event["time"] for event in events if event["kind"] == "started")
    # The last line may be being written.
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().split("\n")[:-1])
    return [line["time_s"] + begun for line in lines]


def harmed(project: Project, kinds: dict[str, int], timeout: float = 100) -> None:
    """A run with culprits among its tasks, and some seconds more: each kind of harm costs its own episodes."""
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + HARM)
    settings = ["tasks.options.count=100000", "training.steps=100000", "training.checkpoint_every=1000"]
    scored = {kind: number for kind, number in kinds.items() if kind != "samples"}
    settings += ["scorer.source=user.py:harms", "scorer.timeout_s=600", f"scorer.options.kinds={toml(scored)}"]
    if "stops" in kinds:
        settings += ["scorer.timeout_s=1"]
    if "samples" in kinds:
        settings += ["environment.source=user.py:Greedy", f"environment.options.count={kinds['samples']}"]
    run = project.start("train", "config.toml", *(word for one in settings for word in ("--set", one)))
    watch = Watch(run.pid)
    marks = project.path / "ended"

    def over() -> bool:
        if run.poll() is not None:
            return True
        done = marks.exists() and {line.split()[0] for line in marks.read_text().splitlines()} == set(kinds)
        return done and len([at for at in step_times(project.run) if at > marks.stat().st_mtime + 5]) > 10

    wait_until(over, timeout, "the culprits to have ended for the last time")
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=30)[0]
    assert "stopping after this step" in output, output
    wait_until(lambda: left_behind(project.path) == [], 5, "its processes to end")
    assert project.audit()["ok"]

    began = float((project.path / "began").read_text().splitlines()[0])
    ended = float(marks.read_text().splitlines()[-1].split()[1])
    steps = list(itertools.pairwise(step_times(project.run)))
    before = statistics.median(b - a for a, b in steps if b < began)
    after = statistics.median(b - a for a, b in steps if a > ended + 5)
    first = min(b for _, b in steps if b > ended) - ended
    growth = watch.growth(began)
    print(
        f"{', '.join(kinds)}: {ended - began:.1f} s of harm, a step {before:.3f} s before, {after:.3f} s from 5 s "
        f"after, the first {first:.2f} s after, controller +{growth / 2**20:.1f} MiB"
    )
    assert growth < 50 << 20
    assert after < 2 * before + 0.1
    dropped: dict[str, list[str]] = {}
    for event in map(json.loads, (project.run / "events.jsonl").read_text().splitlines()):
        if event["kind"] == "dropped":
            dropped.setdefault(event["reason"], []).append(event["detail"])
    assert set(dropped) == {REASONS[kind] for kind in kinds}
    details = [detail for each in dropped.values() for detail in each]
    assert all(len(detail) <= 2000 for detail in details)
    for kind in kinds:
        assert any(words in detail for words in WORDS[kind] for detail in dropped[REASONS[kind]]), details


REASONS = {
    "prints": "scorer_crash",
    "forks": "scorer_crash",
    "raises": "scorer_error",
    "stops": "scorer_timeout",
    "samples": "too_many_samples",
}
WORDS = {
    "prints": [
        "exit status 9; its last words in ",
    ],
    "forks": ["exit status 9; it said nothing in ", "exit status 9; its last words in "],
    "raises": ["Endless: yyy"],
    "stops": ["scorer-"],
    "samples": ["at most 256 turns at once (environment.max_samples)"],
}


def toml(table: dict[str, int]) -> str:
    return "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"


def test_users_code_that_does_harm_costs_its_own_episodes_only(project):
    kinds = {"prints": 5 * 10**7, "raises": 10**7, "forks": 40, "samples": 20_000}
    harmed(project, kinds)
    log = (project.run / "logs" / "scorer-1.log").read_text()
    assert "bytes are left out here" in log
    assert log.endswith("that was all\n")
    assert max(file.stat().st_size for file in (project.run / "logs").iterdir()) <= 17 << 20


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "number"), [("prints", 10**10), ("forks", 2000), ("raises", 10**8), ("stops", 1), ("samples", 20_000)]
)
def test_users_code_that_does_great_harm_costs_its_own_episodes_only(project, kind, number):
    harmed(project, {kind: number}, timeout=800)


def test_nothing_is_left_when_the_controller_is_killed_while_a_worker_is_stopped(project):
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + HARM)
    run = project.start("train", "config.toml", "--set", "training.steps=100000")
    wait_until(lambda: project.steps_done() > 2, 60, "some steps")
    for process in left_behind(project.path):
        if process.environ()["HEADRACE_CHILD"] in ("scorer-1", "environment-1"):
            # The worker, and the keeper too.
            process.send_signal(signal.SIGSTOP)
    run.kill()
    run.communicate(timeout=30)
    wait_until(lambda: left_behind(project.path) == [], 5, "its processes to end")


def test_a_key_in_the_environment_reaches_a_scorer_only_where_it_is_named(project, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "secret")
    code = """
import os
def searching(task, attempt):
    return len(os.environ['SEARCH_API_KEY']) + score(task, attempt)
"""
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + code)
    words = ("train", "config.toml", "--set", "scorer.source=user.py:searching", "--set", "training.steps=2")
    done = project.headrace(*words)
    assert done.returncode == 1
    assert "scorer_error: KeyError: 'SEARCH_API_KEY'" in done.stderr
    done = project.headrace(*words, "--overwrite", "--set", 'scorer.pass_env=["SEARCH_*"]')
    assert done.returncode == 0, done.stderr

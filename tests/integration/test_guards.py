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
from typing import Any

import psutil
import pytest
from integration_project import Project, wait_until

HARM = '''
import asyncio, ctypes, os, signal, sys, time
from pathlib import Path

seen = 0

def once(name):
    """True for the first who asks."""
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def harmful(task):
    """One task is the culprit, with all its episodes: the one whose turn it was when the run had found its pace."""
    global seen
    seen += 1
    if seen == 160 and once("chosen"):
        Path("culprit").write_text(task.id)
    return os.path.exists("culprit") and Path("culprit").read_text() == task.id

def began(what):
    with open("began", "a") as file:
        file.write(f"{what} {os.getpid()} {time.time()}\\n")

def ended():
    with open("ended", "a") as file:
        file.write(f"{time.time()}\\n")

async def prints(task, attempt, size):
    if harmful(task):
        began("prints")
        line = b"x" * 199 + b"\\n"
        for _ in range(size // (200 * 5000)):
            os.write(1, line * 5000)
        os.write(2, b"that was all\\n")
        ended()
        os._exit(9)
    return score(task, attempt)

def _hide():
    """As a daemon does: a session of its own, no terminal, deaf to what would end it, orphaned."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    while True:
        time.sleep(3600)

async def forks(task, attempt, count):
    if harmful(task):
        began("forks")
        for index in range(count):
            pid = os.fork()
            if pid == 0:
                if index % 2:
                    _hide()
                while True:
                    time.sleep(3600)
            if index % 2:
                os.waitpid(pid, 0)
        ended()
        os._exit(9)
    return score(task, attempt)

async def stops(task, attempt):
    if harmful(task):
        began("stops")
        ended()
        os.kill(os.getpid(), signal.SIGSTOP)
    return score(task, attempt)

class Endless(Exception):
    def __init__(self, size):
        self.size = size

    def __str__(self):
        return "y" * self.size

async def raises(task, attempt, size):
    if harmful(task):
        began("raises")
        try:
            raise Endless(size)
        finally:
            ended()
    return score(task, attempt)

class Greedy:
    def __init__(self, count):
        self.count = count

    async def rollout(self, task, policy):
        if not harmful(task):
            await policy.sample(task.prompt)
            return
        began("samples")
        try:
            await asyncio.gather(*(policy.sample(task.prompt) for _ in range(self.count)))
        finally:
            ended()
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


def at_its_rate(folder: Path, began: float, ended: float, within: float) -> tuple[float, float]:
    """(median seconds of a step before, and of those that began `within` seconds or more after the end)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    begun = next(event["time"] for event in events if event["kind"] == "started")
    times = [line["time_s"] + begun for line in lines]
    steps = list(itertools.pairwise(times))
    before = [b - a for a, b in steps if b < began]
    after = [b - a for a, b in steps if a > ended + within]
    return statistics.median(before), statistics.median(after)


def harmed(project: Project, *settings: str, timeout: float = 100) -> dict[str, Any]:
    """A run with a culprit among its tasks, and some seconds more: what it says, what it cost the controller."""
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + HARM)
    settings = ("tasks.options.count=100000", "training.steps=100000", "training.checkpoint_every=1000", *settings)
    words = [word for one in settings for word in ("--set", one)]
    run = project.start("train", "config.toml", *words)
    watch = Watch(run.pid)
    marks = project.path / "ended"
    wait_until(
        lambda: run.poll() is not None or (marks.exists() and time.time() - marks.stat().st_mtime > 8),
        timeout,
        "the culprit to have ended for the last time",
    )
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=30)[0]
    assert "stopping after this step" in output, output
    wait_until(lambda: left_behind(project.path) == [], 5, "its processes to end")
    began = float((project.path / "began").read_text().splitlines()[0].split()[2])
    ended = float(marks.read_text().splitlines()[-1])
    events = map(json.loads, (project.run / "events.jsonl").read_text().splitlines())
    before, after = at_its_rate(project.run, began, ended, 5.0)
    growth = watch.growth(began)
    took = f"{ended - began:.1f} s of harm, a step {before:.3f} s before, {after:.3f} s after"
    print(f"{took}, controller +{growth / 2**20:.1f} MiB")
    assert project.audit()["ok"]
    culprit = (project.path / "culprit").read_text()
    return {
        "dropped": [event for event in events if event["kind"] == "dropped"],
        "culprit": culprit,
        "growth": growth,
        "before": before,
        "after": after,
    }


SHORT, FULL = "short", pytest.param("full", marks=[pytest.mark.full, pytest.mark.timeout(900)])


@pytest.mark.parametrize("form", [SHORT, FULL])
def test_a_scorer_that_prints_without_end_costs_its_episodes_only(project, form):
    size = 10**10 if form == "full" else 6 * 10**7
    found = harmed(
        project, "scorer.source=user.py:prints", f"scorer.options.size={size}", "scorer.timeout_s=100", timeout=800
    )
    assert {event["reason"] for event in found["dropped"]} <= {"scorer_crash"}
    logs = {log.name: log.stat().st_size for log in (project.run / "logs").iterdir()}
    assert max(logs.values()) <= 17 << 20
    assert "bytes are left out here" in (project.run / "logs" / "scorer-1.log").read_text()
    assert (project.run / "logs" / "scorer-1.log").read_text().endswith("that was all\n")
    assert found["growth"] < 50 << 20
    assert found["after"] < 2 * found["before"] + 0.1


@pytest.mark.parametrize("form", [SHORT, FULL])
def test_what_a_scorer_has_forked_ends_with_it(project, form):
    count = 2000 if form == "full" else 40
    found = harmed(project, "scorer.source=user.py:forks", f"scorer.options.count={count}", timeout=250)
    assert {event["reason"] for event in found["dropped"]} == {"scorer_crash"}
    assert "scorer-" in found["dropped"][0]["detail"]
    assert "exit status 9" in found["dropped"][0]["detail"]
    assert found["growth"] < 50 << 20
    assert found["after"] < 2 * found["before"] + 0.1


def test_a_scorer_that_stops_itself_costs_its_episodes_only(project):
    found = harmed(project, "scorer.source=user.py:stops", "scorer.timeout_s=1")
    assert {event["reason"] for event in found["dropped"]} == {"scorer_timeout"}
    assert found["growth"] < 50 << 20
    assert found["after"] < 2 * found["before"] + 0.1


@pytest.mark.parametrize("form", [SHORT, FULL])
def test_an_exception_of_any_size_is_told_in_a_few_words(project, form):
    size = 10**8 if form == "full" else 10**7
    found = harmed(project, "scorer.source=user.py:raises", f"scorer.options.size={size}")
    assert [event["reason"] for event in found["dropped"]] == ["scorer_error"] * len(found["dropped"]) != []
    assert all(len(event["detail"]) <= 2000 for event in found["dropped"])
    assert found["dropped"][0]["detail"].startswith("Endless: yyy")
    assert f"({size} characters)" in found["dropped"][0]["detail"]
    assert found["growth"] < 50 << 20
    assert found["after"] < 2 * found["before"] + 0.1


def test_an_episode_with_very_many_samples_at_once_fails_and_starves_no_other(project):
    found = harmed(project, "environment.source=user.py:Greedy", "environment.options.count=20000")
    assert [event["reason"] for event in found["dropped"]] == ["too_many_samples"] * len(found["dropped"]) != []
    assert "at most 256 turns at once (environment.max_samples)" in found["dropped"][0]["detail"]
    assert found["growth"] < 50 << 20
    assert found["after"] < 2 * found["before"] + 0.1


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
    code = "\nimport os\ndef searching(task, attempt):\n    return len(os.environ['SEARCH_API_KEY']) + score(task, attempt)\n"
    (project.path / "user.py").write_text((project.path / "user.py").read_text() + code)
    words = ("train", "config.toml", "--set", "scorer.source=user.py:searching", "--set", "training.steps=2")
    done = project.headrace(*words)
    assert done.returncode == 1
    assert "scorer_error: KeyError: 'SEARCH_API_KEY'" in done.stderr
    done = project.headrace(*words, "--overwrite", "--set", 'scorer.pass_env=["SEARCH_*"]')
    assert done.returncode == 0, done.stderr

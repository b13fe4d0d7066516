"""Random SIGKILLs and SIGSTOPs of whole runs: each run is resumed until it has finished, and audited.

    python tests/integration/kills.py --kills 150 [--seed 0]      # writes benchmarks/results/kills.json
    python tests/integration/kills.py --trials 17 23              # these again, in full view

A trial is a function of its number: a transport, a payload, a buffer, an interrupt, and when which processes are
killed or stopped, several a run. A stopped process stays stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from integration_project import CONFIG, USER_CODE, Project, make_model

STEPS = 30
LONGEST_S = 240.0
"""Of one session, from its start to its end. One that takes longer is wedged."""
MOST_SESSIONS = 12
RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results" / "kills.json"


@dataclass(frozen=True)
class Blow:
    """A signal for one of the processes that a run has at some time."""

    after_s: float
    """After the session's first step, or after its start where it is to hit that."""
    starting: bool
    victim: str
    number: signal.Signals


@dataclass(frozen=True)
class Trial:
    number: int
    settings: dict[str, str]
    sessions: tuple[tuple[Blow, ...], ...]
    """The blows of each session. Those after the last are left alone."""


@dataclass
class Outcome:
    """What became of a trial."""

    trial: Trial
    struck: Counter[str] = field(default_factory=Counter)
    """Signals that hit, by what they hit."""
    sessions: int = 0
    problem: str = ""
    """Why it was not survived; empty if it was."""


def make_trial(number: int) -> Trial:
    dice = random.Random(number)
    payload = dice.choice(["full", "delta", "adapter"])
    settings = {
        "seed": str(number),
        "sync.transport": dice.choice(["shared_memory", "files", "http", "collective"]),
        "sync.interrupt": dice.choice(["keep", "recompute", "resume", "retry"]),
        "sync.schedule": dice.choice(["never_stop", "blocking"]),
        "engine.count": dice.choice(["1", "2"]),
        "buffer.order": dice.choice(["fifo", "windowed", "first_finished"]),
        "buffer.max_staleness": dice.choice(["1", "2", "4"]),
        "buffer.late": dice.choice(["wait", "drop"]),
        "training.checkpoint_every": dice.choice(["3", "7"]),
        "placement": dice.choice(["side_by_side", "side_by_side", "turns"]),
        "training.steps": str(STEPS),
        # Short, so that what is stopped is noticed soon.
        "sync.deadline_s": "8",
        "limits.step_s": "15",
        "limits.batch_s": "30",
        "limits.start_s": "90",
        "environment.timeout_s": "8",
        "scorer.timeout_s": "8",
    }
    if payload == "adapter":
        settings["training.lora"] = "{rank = 4}"
    else:
        settings["sync.payload"] = payload
    if payload == "delta":
        settings |= {"engine.dtype": "bfloat16", "training.optimizer.learning_rate": "1e-4"}
    return Trial(number, settings, tuple(_blows(dice) for _ in range(dice.randint(1, 3))))


def _blows(dice: random.Random) -> tuple[Blow, ...]:
    kinds = ["controller", "trainer", "engine", "environment", "scorer", "keeper"]
    found = []
    for _ in range(dice.randint(1, 3)):
        victim = dice.choice(kinds)
        number = signal.SIGKILL if victim == "controller" else dice.choice([signal.SIGKILL, signal.SIGSTOP])
        found.append(Blow(dice.expovariate(1.0), dice.random() < 0.15, victim, number))
    return tuple(sorted(found, key=lambda blow: (not blow.starting, blow.after_s)))


def run_trial(trial: Trial, folder: Path, model: Path) -> Outcome:
    """Until the run has finished, whatever befalls it. Then it is audited, with episodes recomputed."""
    outcome = Outcome(trial)
    (folder / "user.py").write_text(USER_CODE)
    (folder / "config.toml").write_text(CONFIG.replace('path = "model"', f'path = "{model}"'))
    project = Project(folder)
    words = [word for key, value in trial.settings.items() for word in ("--set", f"{key}={value}")]
    while True:
        blows = trial.sessions[outcome.sessions] if outcome.sessions < len(trial.sessions) else ()
        resume = ["--resume"] if (project.run / "config.toml").exists() else []
        outcome.sessions += 1
        status, said = _session(project, [*words, *resume], blows, outcome)
        if left := project.children():
            outcome.problem = f"processes are left after session {outcome.sessions}: {sorted(left)}"
            return outcome
        if status == 0:
            break
        if status is None or status == 2 or outcome.sessions == MOST_SESSIONS:
            outcome.problem = f"session {outcome.sessions} ended with {status}: {said[-600:]}"
            return outcome
    report = project.audit("--recompute", "10")
    if not report["ok"]:
        outcome.problem = f"the audit: {report['violations'][:3]}"
    return outcome


def _session(
    project: Project, words: list[str], blows: tuple[Blow, ...], outcome: Outcome
) -> tuple[int | None, str]:
    """(exit status, None if it is wedged; what it printed)."""
    log = project.path / f"session-{outcome.sessions}.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            project.command("train", "config.toml", *words),
            cwd=project.path,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        begun, first_step, before = time.monotonic(), None, project.steps_done()
        waiting = list(blows)
        while process.poll() is None:
            now = time.monotonic()
            if now - begun > LONGEST_S:
                process.kill()
                process.wait()
                return None, "it took too long, and was killed: " + log.read_text(errors="replace")
            if first_step is None and project.steps_done() > before:
                first_step = now
            if waiting:
                since = begun if waiting[0].starting else first_step
                if since is not None and now >= since + waiting[0].after_s:
                    _strike(project, process, waiting.pop(0), outcome)
            time.sleep(0.01)
    deadline = time.monotonic() + 20
    while project.children() and time.monotonic() < deadline:
        time.sleep(0.1)
    return process.returncode, log.read_text(errors="replace")


def _strike(project: Project, controller: subprocess.Popen[bytes], blow: Blow, outcome: Outcome) -> None:
    children = project.children()
    if blow.victim == "controller":
        victims = [controller.pid]
    elif blow.victim == "keeper":
        victims = [process.ppid() for process in children.values() if process.ppid() != controller.pid]
    else:
        victims = [process.pid for name, process in children.items() if name.startswith(blow.victim)]
    if not victims:
        return
    try:
        os.kill(random.Random(len(victims)).choice(victims), blow.number)
    except ProcessLookupError:
        return
    outcome.struck[f"{blow.number.name} {blow.victim}"] += 1


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill and stop processes of runs at random.")
    parser.add_argument("--kills", type=int, default=150, help="go on until so many signals have hit")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--trials", type=int, nargs="*", help="these alone")
    given = parser.parse_args(words)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        numbers = iter(given.trials) if given.trials else iter(range(given.seed, given.seed + 10_000))
        while given.trials or sum(o.struck.total() for o in outcomes) < given.kills:
            number = next(numbers, None)
            if number is None:
                break
            folder = Path(scratch) / f"trial-{number}"
            folder.mkdir()
            began = time.monotonic()
            outcomes.append(outcome := run_trial(make_trial(number), folder, model))
            hit = ", ".join(f"{count} × {name}" for name, count in outcome.struck.items())
            line = f"trial {number}: {outcome.sessions} sessions, {time.monotonic() - began:.0f} s, {hit}"
            print(line, flush=True)
            if outcome.problem:
                print(f"  NOT SURVIVED: {outcome.problem}", flush=True)
    if not given.trials:
        _write(outcomes)
    return int(any(outcome.problem for outcome in outcomes))


def _write(outcomes: list[Outcome]) -> None:
    from headrace.bench import result

    struck: Counter[str] = sum((o.struck for o in outcomes), Counter())
    survived = sum(o.struck.total() for o in outcomes if not o.problem)
    rows: list[dict[str, Any]] = [{"signal": name, "times": count} for name, count in sorted(struck.items())]
    figures = {"kills_tried": struck.total(), "kills_survived": survived, "runs": len(outcomes)}
    RESULTS.write_text(json.dumps(result("kills", rows, figures), indent=1) + "\n")
    print(f"{survived} of {struck.total()} signals in {len(outcomes)} runs were survived: {RESULTS}")


if __name__ == "__main__":
    assert psutil.LINUX, "it looks for processes in /proc"
    sys.exit(main())

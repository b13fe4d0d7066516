"""The finished runs that are tampered with, and the settings in which planted bugs have something to bite on."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

from integration_project import CONFIG, Project

USER_CODE = '''
from headrace import Task
from headrace.errors import EpisodeFailure

def tasks(count=64):
    for i in range(count):
        prompt = " ".join(f"w{(i * 7 + j) % 16}" for j in range(3 + i % 3))
        yield Task(id=f"t{i}", prompt=prompt, answer=f"w{i % 16}", data={"level": i % 4})

class Conversation:
    """Two turns, and every other task a third that goes back into the first."""

    async def rollout(self, task, policy):
        first = await policy.sample(task.prompt)
        second = await policy.sample("w1 w2", after=first)
        if task.data["level"] % 2:
            await policy.sample("w3", after=first, at=len(first.tokens) // 2)
        return {"calls": 2.0, "length": float(len(first.tokens) + len(second.tokens))}

def score(task, attempt):
    return sum(token % 2 for turn in attempt.turns for token in turn.tokens) / 8

def moody(task, attempt):
    """A scorer that cannot judge some attempts: their groups go on without them."""
    if task.data["level"] == 2 and attempt.turns[-1].tokens[0] % 5 == 0:
        raise EpisodeFailure("unreadable", "the answer begins with a word that cannot be judged")
    return score(task, attempt)
'''

PLAIN = CONFIG.replace("max_tokens = 8", "max_tokens = 24").replace("max_running = 64", "max_running = 12")

CONVERSATION = """
[model]
path = "model"
[tasks]
type = "python"
source = "user.py:tasks"
[environment]
source = "user.py:Conversation"
max_tokens = 12
[environment.sampling]
temperature = 0.9
top_p = 0.9
[scorer]
source = "user.py:moody"
[engine]
max_context = 60
max_running = 12
[buffer]
max_staleness = 2
[training]
steps = 14
groups_per_batch = 4
group_size = 4
checkpoint_every = 5
[training.optimizer]
learning_rate = 1e-3
[recording]
episodes = 1.0
keep_versions_every = 1
"""


def make_project(folder: Path, model: Path, config: str) -> Project:
    """A folder ready to train. The model is named by its whole path, so that audits run anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "user.py").write_text(USER_CODE)
    (folder / "config.toml").write_text(config.replace('path = "model"', f'path = "{model}"'))
    return Project(folder)


def plain_run(folder: Path, model: Path) -> Path:
    project = make_project(folder, model, PLAIN)
    project.train()
    return project.run


def resumed_run(folder: Path, model: Path) -> Path:
    """Truncated sampling, several turns, some failed episodes; killed after some steps beyond a checkpoint, and
    resumed, so that versions and episodes are orphaned."""
    for attempt in range(5):
        project = make_project(folder / str(attempt), model, CONVERSATION)
        _kill_after(project, steps=8)
        project.train("--resume")
        if _orphaned(project.run):
            return project.run
    raise AssertionError("the run was never killed between two checkpoints")


def _kill_after(project: Project, steps: int) -> None:
    process = project.start("train", "config.toml", "--json")
    end = time.monotonic() + 120
    while project.steps_done() < steps and process.poll() is None:
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.005)
    children = project.children()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for child in children.values():
        child.wait(30)


def _orphaned(run: Path) -> bool:
    with sqlite3.connect(run / "ledger.sqlite") as db:
        reasons = dict(db.execute("SELECT reason, COUNT(*) FROM episodes GROUP BY reason"))
    db.close()
    return reasons.get("orphaned_by_restore", 0) > 0 and reasons.get("lost_in_crash", 0) > 0

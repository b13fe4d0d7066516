"""Bad input exits with 2 in under two seconds, with one clear message and no traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CASES = {
    "unknown key": (["--set", "buffer.dept=3"], ["'buffer.dept'", "did you mean buffer.depth?"]),
    "out of range": (["--set", "buffer.depth=-3"], ["buffer.depth is an integer >= 1", "-3"]),
    "wrong type": (["--set", "training.steps=many"], ["training.steps is an integer >= 1", "'many'"]),
    "unknown variant": (
        ["--set", "tasks.type=csv"],
        ['tasks.type is one of "jsonl", "parquet", "datasets", "reasoning_gym", "python"'],
    ),
    "model missing": (["--set", "model.path=nowhere"], ["model.path", "'nowhere'"]),
    "tasks missing": (["--set", "tasks.path=nowhere.jsonl"], ["tasks.path", "does not exist", "nowhere.jsonl"]),
    "environment missing": (["--set", "environment.source=e.py:E"], ["environment.source", "e.py"]),
    "scorer misspelt": (
        ["--set", "scorer.source=headrace.scoring.rules:ExactMatsch"],
        ["scorer.source", "did you mean 'ExactMatch'?"],
    ),
    "scorer broken": (["--set", "scorer.source=broken.py:f"], ["broken.py can be imported", "division by zero"]),
    "interval against staleness": (
        ["--set", "sync.interval=9"],
        [
            "at least every buffer.max_staleness + 1 steps",
            "sync.interval = 9, max_staleness = 2",
            "lower sync.interval",
        ],
    ),
    "no room for a prompt": (
        ["--set", "environment.max_tokens=4096"],
        ["leaves room for a prompt", "4096 >= 2048"],
    ),
    "staleness of a synchronous run": (
        ["--set", "buffer.type=none", "--set", "buffer.max_staleness=3"],
        ["is synchronous: its max_staleness is 0", "3"],
    ),
    "depth below a batch": (["--set", "buffer.depth=2"], ["holds at least one batch", "2 <"]),
    "more survivors than members": (["--set", "training.min_group=99"], ["at most training.group_size", "99 >"]),
    "groups of one": (
        ["--set", "training.group_size=1", "--set", "training.min_group=1"],
        ["grpo compares rewards within a group", "use ppo"],
    ),
    "one token to choose from": (["--set", "environment.sampling.top_k=1"], ["top_k = 1 takes the likeliest"]),
    "a teacher that is its pupil": (
        ["--set", "training.distillation.teacher=model"],
        ["is another model than model.path", "distillation.rewards = true"],
    ),
    "an adapter and all weights": (
        ["--set", "training.lora.rank=4", "--set", "sync.payload=full"],
        ["only the adapter changes", "leave sync.payload out"],
    ),
    "nothing to resume": (["--resume"], ["--resume continues a run that has begun", "runs/run"]),
    "resume and overwrite": (["--resume", "--overwrite"], ["resumed or overwritten, not both"]),
}


def call(project: Path, *arguments: str, **environment: str) -> tuple[int, str, str, float]:
    begun = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=project.parent,
        env=os.environ | environment,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: other work on this machine does not count.
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # A busy machine stretches wall time, one of many cores multiplies processor time.
    seconds = min(worked, time.monotonic() - begun)
    return done.returncode, done.stdout, done.stderr, seconds


@pytest.mark.parametrize("case", CASES)
def test_a_bad_train_command_is_refused_quickly_and_clearly(project: Path, case: str) -> None:
    (project.parent / "broken.py").write_text("x = 1 / 0\n")
    arguments, words = CASES[case]
    code, out, err, seconds = call(project, "train", "run.toml", "--json", *arguments)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert seconds < 2
    assert not (project.parent / "runs").exists()


@pytest.mark.parametrize(
    ("content", "word"), [("steps = = 3\n", "line 1"), ("", "model is required"), (None, "does not exist")]
)
def test_a_bad_file_is_refused(project: Path, content: str | None, word: str) -> None:
    project.unlink()
    if content is not None:
        project.write_text(content)
    code, _, err, seconds = call(project, "train", "run.toml")
    assert code == 2
    assert word in err
    assert seconds < 2


@pytest.mark.parametrize("command", ["audit", "show"])
def test_a_folder_that_holds_no_run_is_refused(project: Path, command: str) -> None:
    code, out, err, seconds = call(project, command, "model", "--json")
    assert (code, out) == (2, "")
    assert "a run's folder holds a config.toml" in err
    assert seconds < 2


def test_an_unknown_benchmark_is_refused_with_those_known(project: Path) -> None:
    code, _, err, _ = call(project, "bench", "speed")
    assert code == 2
    assert "known: loop" in err


def test_the_traceback_is_there_for_who_asks(project: Path) -> None:
    code, _, err, _ = call(project, "train", "run.toml", "--set", "buffer.depth=-3", HEADRACE_DEBUG="1")
    assert code == 1
    assert "Traceback" in err
    assert "buffer.depth is an integer >= 1" in err


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def deep(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2 * 10**9}))


def outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')


def endless(folder: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loops)


def boundless(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 40}')


def unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (empty, "must not be empty"),
        (truncated, "bytes"),
        (unknown, "mamba"),
        (deep, "num_hidden_layers of config.json"),
        (outside, "must name files of its own folder"),
        (endless, "chat_template.jinja must render within"),
        (boundless, "eos_token_id must be below"),
    ],
)
def test_a_damaged_model_folder_is_refused(project: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(project.parent / "model")
    code, _, err, seconds = call(project, "train", "run.toml")
    assert code == 2, err
    assert words in err
    assert "model" in err
    assert seconds < 2

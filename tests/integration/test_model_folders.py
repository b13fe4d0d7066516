"""What is wrong with a model folder and is found only by the processes of a run."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from integration_project import Project
from safetensors.torch import load_file, save_file

CHATS = """
from headrace import Task

def tasks(nobody=lambda i: i > 7 and i % 8 == 0):
    for i in range(64):
        yield Task(id=f"t{i}", prompt=[{"role": "nobody" if nobody(i) else "user", "content": "w1 w2"}])

def early():
    return tasks(lambda i: i == 7)

def score(task, attempt):
    return sum(token % 2 for token in attempt.turns[-1].tokens) / 8
"""
TEMPLATE = "{% for m in messages %}{% if m.role == 'nobody' %}{{ m.a.b.c }}{% endif %}{{ m.content }} {% endfor %}"


@pytest.fixture
def own_model(project: Project) -> Project:
    """The project with a copy of the model that may be damaged."""
    model = project.path / "model"
    original = model.resolve()
    model.unlink()
    shutil.copytree(original, model)
    return project


def test_a_weight_that_is_no_number_ends_the_run_with_its_name_and_exit_code_2(own_model: Project) -> None:
    file = own_model.path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    done = own_model.headrace("train", "config.toml")
    assert done.returncode == 2, done.stderr
    assert "error: all weights must be finite numbers" in done.stderr
    assert "model.norm.weight in model.safetensors is not" in done.stderr
    assert "unexpected" not in done.stderr.lower()


def test_messages_that_a_template_cannot_render_cost_their_episodes_only(own_model: Project) -> None:
    (own_model.path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (own_model.path / "user.py").write_text(CHATS)
    summary = own_model.train("--set", "training.steps=3")
    assert summary["steps"] == 3
    assert set(summary["ledger"]["dropped"]) == {"chat_template"}


SCORERS_MARK = """
import os
from pathlib import Path
if os.environ.get("HEADRACE_CHILD", "").startswith("scorer"):  # scorers start together with trainer and engines
    Path("a-scorer-started").touch()
"""


@pytest.mark.parametrize("key", ["tasks", "evaluation.tasks"])
def test_first_messages_that_a_template_cannot_render_are_refused_before_a_model_is_loaded(
    own_model: Project, key: str
) -> None:
    (own_model.path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (own_model.path / "user.py").write_text(CHATS + SCORERS_MARK)
    done = own_model.headrace("train", "config.toml", "--set", f"{key}={{type='python', source='user.py:early'}}")
    assert done.returncode == 2, done.stderr
    told = " ".join(done.stderr.split())
    assert f"not those of task 't7' of {key}, which are {{role: 'nobody', content: 'w1 w2'}}" in told
    assert "the chat template in chat_template.jinja must render these messages: UndefinedError" in told
    assert not own_model.run.exists()
    assert not (own_model.path / "a-scorer-started").exists()


def test_the_settings_of_a_template_reach_prompts_and_the_audit(own_model: Project) -> None:
    folder = own_model.path / "model"
    named = [
        {"name": "default", "template": "w9 "},
        {"name": "own", "template": "{{ word }} {{ tools[0].name }} {{ documents[0].text }} {{ bos_token }}"},
    ]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "w7"}))
    (own_model.path / "user.py").write_text(CHATS)
    given = "{name='own', variables={word='w4'}, tools=[{name='w5'}], documents=[{text='w6'}]}"
    own_model.train("--set", "training.steps=2", "--set", f"environment.template={given}")
    contexts = {tuple(turn["context"]) for episode in episodes(own_model) for turn in episode["turns"]}
    assert contexts == {(4, 5, 6, 7)}
    found = own_model.audit()
    assert found["ok"], found["violations"]
    assert "prompts" not in found["unchecked"]


def episodes(project: Project) -> list[dict[str, Any]]:
    files = sorted((project.run / "episodes").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]

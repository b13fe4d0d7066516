"""What is wrong with a model folder and is found only by the processes of a run."""

from __future__ import annotations

import shutil

import pytest
from integration_project import Project
from safetensors.torch import load_file, save_file

CHATS = """
from headrace import Task

def tasks():
    for i in range(64):
        yield Task(id=f"t{i}", prompt=[{"role": "user" if i % 8 else "nobody", "content": "w1 w2"}])

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

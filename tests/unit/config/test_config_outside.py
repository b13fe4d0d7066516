"""What a configuration points at is checked before anything starts."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.config.load import load_config
from headrace.errors import BadReference, ConfigError, InputError, MissingExtra, ModelFolderError


def refusal(project: Path, *overrides: str) -> InputError:
    began = time.thread_time()
    with pytest.raises(InputError) as caught:
        load_config(project, overrides)
    assert time.thread_time() - began < 2
    return caught.value


def test_a_configuration_in_order_is_accepted(project: Path) -> None:
    assert load_config(project, ["training.steps=3"]).training.steps == 3


def test_reading_a_configuration_loads_no_torch(project: Path) -> None:
    program = (
        "import sys; from headrace.config.load import load_config\n"
        f"print(load_config({str(project)!r}).seed, [n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 []\n", done.stderr


def test_a_missing_or_damaged_model_folder_is_refused(project: Path) -> None:
    missing = refusal(project, "model.path=nowhere")
    assert isinstance(missing, ModelFolderError)
    assert missing.rule.startswith("model.path: ")
    assert missing.value == "nowhere"
    weights = project.parent / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "truncated" in str(refusal(project))


def test_a_model_without_tokenizer_is_refused(project: Path) -> None:
    (project.parent / "model" / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(project).rule


@pytest.mark.parametrize("key", ["training.reference.model", "training.distillation.teacher"])
def test_a_model_beside_the_run_s_is_there_and_has_its_tokens(project: Path, key: str) -> None:
    missing = refusal(project, f"{key}=nowhere")
    assert isinstance(missing, ModelFolderError)
    assert missing.rule.startswith(f"{key}: ")
    other = project.parent / "other"
    shutil.copytree(project.parent / "model", other)
    load_config(project, [f"{key}={other}"])
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"]["another"] = 10_000
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert "has the tokenizer of model.path" in refusal(project, f"{key}={other}").rule
    (other / "tokenizer.json").unlink()
    load_config(project, [f"{key}={other}"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("", "at least one task"),
        ("\n\nnot json\n", "line 3: a line is one JSON object"),
        ('{"question": "1+1"}\n', 'line 1: a task has a "prompt"'),
        ("[1]\n", 'line 1: a task has a "prompt"'),
    ],
)
def test_a_task_file_that_holds_no_tasks_is_refused(project: Path, content: str | None, words: str) -> None:
    tasks = project.parent / "tasks.jsonl"
    tasks.unlink()
    if content is not None:
        tasks.write_text(content)
    error = refusal(project)
    assert isinstance(error, ConfigError)
    assert words in str(error)


def test_evaluation_tasks_are_checked_too(project: Path) -> None:
    error = refusal(project, 'evaluation.tasks={type="jsonl", path="held_out.jsonl"}')
    assert "evaluation.tasks.path" in error.rule
    assert error.value == "held_out.jsonl"


def test_a_reasoning_gym_data_set_is_known_or_refused_with_the_nearest(project: Path) -> None:
    error = refusal(project, 'tasks={type="reasoning_gym", dataset="chain_sums"}')
    assert error.rule == "tasks.dataset is a data set of reasoning-gym"
    assert "'chain_sum'" in (error.remedy or "")


def test_a_missing_extra_is_refused_with_its_install_command(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal(project, 'tasks={type="reasoning_gym", dataset="chain_sum"}')
    assert isinstance(error, MissingExtra)
    assert "pip install 'headrace[reasoning-gym]'" in str(error)


def test_an_adapters_targets_are_looked_up_in_the_model(project: Path) -> None:
    assert load_config(project, ["training.lora.rank=2"]).training.lora is not None
    error = refusal(project, 'training.lora.targets=["q_proj", "qkv_proj"]')
    assert isinstance(error, ConfigError)
    assert "would bind to nothing" in error.rule
    assert error.value == "qkv_proj"
    assert error.remedy == "there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert "lm_head" in str(refusal(project, 'training.lora.targets=["lm_head"]').value)
    assert "embed_tokens" in str(refusal(project, 'training.lora.targets=["embed_tokens"]').value)


def test_an_adapter_without_peft_is_refused_with_the_install_command(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal(project, "training.lora.rank=2")
    assert isinstance(error, MissingExtra)
    assert "pip install 'headrace[lora]'" in str(error)


def test_environment_scorer_and_task_references_name_their_key(project: Path) -> None:
    environment = refusal(project, "environment.source=headrace.rollout.single_turn:SingleTurns")
    assert isinstance(environment, BadReference)
    assert environment.rule.startswith("environment.source: ")
    assert environment.remedy == "did you mean 'SingleTurn'?"
    scorer = refusal(project, "scorer.source=reward.py:reward")
    assert scorer.rule.startswith("scorer.source: ")
    assert str(project.parent / "reward.py") in (scorer.remedy or "")
    rewards = refusal(project, 'scorer.rewards=[{source="os:sep"}]')
    assert rewards.rule == "scorer.rewards.0.source names a class or a function"
    tasks = refusal(project, 'tasks={type="python", source="os:no_such"}')
    assert tasks.rule.startswith("tasks.source: ")


def test_a_reference_to_something_that_cannot_be_called_is_refused(project: Path) -> None:
    error = refusal(project, "scorer.source=os:sep")
    assert error.rule == "scorer.source names a class or a function"
    assert error.remedy == "it leads to str: name the class or function itself"


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that wandb itself left in the current directory is no package."""
    (project.parent / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(project.parent), *(p for p in sys.path if "site-packages" not in p)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    assert importlib.util.find_spec("wandb") is not None
    error = refusal(project, "recording.wandb.mode=offline")
    assert isinstance(error, MissingExtra)
    assert "pip install 'headrace[wandb]'" in str(error)

"""What a configuration points at: the model's folder, task files, environments and scorers."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headrace.config.run import RunConfig
from headrace.errors import ConfigError, InputError, MissingExtra, short
from headrace.models.config import ModelConfig
from headrace.references import resolve
from headrace.rollout.config import JsonlTasks, PythonTasks, ReasoningGymTasks, TaskConfig
from headrace.training.adapter import bound_modules
from headrace.training.config import LoraConfig

Checked = TypeVar("Checked")


def check_outside(config: RunConfig) -> None:
    """Raise the InputError that the run would meet later. Imports the user's references, never torch."""
    check_models(config)
    with _told():
        _check_code(config)


def check_models(config: RunConfig) -> None:
    """The same of the model folders alone: no user's code is imported."""
    with _told():
        _check_models(config)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "the files and folders that the configuration names can be looked at",
            f"{error.strerror}: {short(error.filename)}",
            "correct the path, or its permissions",
        ) from error


def _check_models(config: RunConfig) -> None:
    from headrace.models.folder import check_policy

    model = _with_key("model.path", check_policy, config.model.path)
    if config.training.lora is not None:
        _check_lora(config.training.lora, model)
    _check_other_models(config)


def _check_code(config: RunConfig) -> None:
    _check_tasks(config.tasks, "tasks")
    if config.evaluation.tasks is not None:
        _check_tasks(config.evaluation.tasks, "evaluation.tasks")
    _check_callable(config.environment.source, "environment.source")
    if not config.scorer.rewards:
        _check_callable(config.scorer.source, "scorer.source")
    for number, reward in enumerate(config.scorer.rewards):
        _check_callable(reward.source, f"scorer.rewards.{number}.source")


def _check_other_models(config: RunConfig) -> None:
    """Those that look at the run's tokens: a reference policy, a teacher."""
    from headrace.models.folder import check_files, check_folder

    training = config.training
    paths = {
        "training.reference.model": None if training.reference is None else training.reference.model,
        "training.distillation.teacher": None if training.distillation is None else training.distillation.teacher,
    }
    check: Callable[[str], object] = check_folder if training.backend == "native" else check_files
    for key, path in paths.items():
        if path is None:
            continue
        _with_key(key, check, path)
        if _with_key(key, _words, path) not in (None, _words(config.model.path)):
            raise ConfigError(f"{key} has the tokenizer of model.path", path, "name a model with the same tokens")


def _words(path: str) -> dict[str, int] | None:
    """A tokenizer's tokens and their ids; None where there is none to compare."""
    from headrace.tokenizer import FILE, Tokenizer

    return Tokenizer(path).words if (Path(path) / FILE).exists() else None


def _check_lora(lora: LoraConfig, model: ModelConfig) -> None:
    from headrace.models.shapes import parameter_shapes

    if importlib.util.find_spec("peft") is None:
        raise MissingExtra("peft", "lora")
    matrices = [name.removesuffix(".weight") for name, shape in parameter_shapes(model).items() if len(shape) == 2]
    layers = [name for name in matrices if ".layers." in name]
    bound_modules(lora.targets, layers, {"lm_head", *matrices}.difference(layers))


def _check_tasks(tasks: TaskConfig, key: str) -> None:
    if isinstance(tasks, JsonlTasks):
        _check_jsonl(Path(tasks.path), key)
    elif isinstance(tasks, PythonTasks):
        _check_callable(tasks.source, f"{key}.source")
    elif isinstance(tasks, ReasoningGymTasks):
        _check_reasoning_gym(tasks, key)


def _check_jsonl(file: Path, key: str) -> None:
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise ConfigError(f"{key}.path names a file of tasks; it {what}", str(file), f"change {key}.path")
    with file.open(encoding="utf-8", errors="replace") as lines:
        numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        number, first = next(numbered, (0, ""))
    if not number:
        raise ConfigError(f"{key}.path names a file with at least one task", str(file), "write one task a line")
    try:
        task = json.loads(first)
    # A ValueError that is no JSONDecodeError is an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}, line {number}: a line is one JSON object",
            f"{first.strip()[:60]}: {short(error)}",
            "correct the line",
        ) from error
    if not isinstance(task, dict) or "prompt" not in task:
        raise ConfigError(
            f'{file}, line {number}: a task has a "prompt"',
            sorted(task) if isinstance(task, dict) else task,
            'write {"prompt": …, "answer": …}',
        )


def _check_reasoning_gym(tasks: ReasoningGymTasks, key: str) -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtra("reasoning-gym", "reasoning-gym")
    from reasoning_gym.factory import DATASETS

    if tasks.dataset not in DATASETS:
        close = difflib.get_close_matches(tasks.dataset, DATASETS, n=3)
        remedy = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(sorted(DATASETS))}"
        )
        raise ConfigError(f"{key}.dataset is a data set of reasoning-gym", tasks.dataset, remedy)


def _check_callable(source: str, key: str) -> None:
    found = _with_key(key, resolve, source)
    if not callable(found):
        raise ConfigError(f"{key} names a class or a function", source, f"it leads to {type(found).__name__}")


def _with_key(key: str, check: Callable[[str], Checked], value: str) -> Checked:
    """`check(value)`; its error also names the key that the value came from."""
    try:
        return check(value)
    except MissingExtra:
        raise
    except InputError as error:
        raise type(error)(f"{key}: {error.rule}", error.value, error.remedy) from error

"""What a configuration points at: the model's folder, task files, environments and scorers."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.run import RunConfig
from headrace.errors import BadReference, ConfigError, InputError, MissingExtra, short
from headrace.models.config import ModelConfig
from headrace.references import check_call, resolve
from headrace.rollout.config import (
    DatasetsTasks,
    EnvironmentConfig,
    JsonlTasks,
    ParquetTasks,
    PythonTasks,
    ReasoningGymTasks,
    TaskConfig,
    TemplateConfig,
)
from headrace.rollout.task_checks import checked_tasks
from headrace.rollout.task_sources import jsonl_rows
from headrace.rollout.task_tables import check_local, check_parquet
from headrace.scoring.config import RewardConfig, ScorerConfig
from headrace.training.adapter import bound_modules
from headrace.training.config import LoraConfig

Checked = TypeVar("Checked")


def check_outside(config: RunConfig) -> None:
    """Raise the InputError that the run would meet later. Imports the user's references, never torch."""
    check_models(config)
    with _told():
        _check_code(config)


def check_models(config: RunConfig) -> None:
    """The same of the model folders and extras alone: no user's code is imported."""
    with _told():
        _check_models(config)
    _check_trackers(config)


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
    _check_template(config)


def _check_trackers(config: RunConfig) -> None:
    if config.recording.wandb is None:
        return
    found = importlib.util.find_spec("wandb")
    # A folder of that name, as offline runs leave, looks like a package without an origin.
    if found is None or found.origin is None:
        raise MissingExtra("wandb", "wandb")


def _check_code(config: RunConfig) -> None:
    compares = config.scorer.source if config.scorer.source in _COMPARE else None
    _check_tasks(config.tasks, "tasks", compares)
    if config.evaluation.tasks is not None:
        _check_tasks(config.evaluation.tasks, "evaluation.tasks", compares)
    for name, given in config.evaluation.sets.items():
        _check_tasks(given.tasks, f"evaluation.sets.{name}.tasks", compares)
    _check_user_class(config.environment, "environment", "rollout", ("task", "policy"))
    if not config.scorer.rewards:
        _check_user_class(config.scorer, "scorer", "score", ("task", "attempt"))
    for number, reward in enumerate(config.scorer.rewards):
        _check_user_class(reward, f"scorer.rewards.{number}", "score", ("task", "attempt"))


def _check_template(config: RunConfig) -> None:
    """That what is said of the model's chat template finds one."""
    from headrace.tokenizer import Tokenizer

    settings = config.environment.template
    if settings == TemplateConfig():
        return
    if Tokenizer(config.model.path).template(settings.name, tools=settings.tools is not None) is None:
        raise ConfigError(
            "environment.template is for a model whose folder has a chat template",
            config.model.path,
            "add chat_template.jinja to the folder, or leave environment.template out",
        )


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


_COMPARE = ("headrace.scoring.rules:ExactMatch", "headrace.scoring.rules:MathVerify")
"""Scorers that can do nothing with a task that has no answer."""


def _check_tasks(tasks: TaskConfig, key: str, compares: str | None) -> None:
    if isinstance(tasks, JsonlTasks):
        _check_jsonl(tasks, key, compares)
    elif isinstance(tasks, PythonTasks):
        function = _check_callable(tasks.source, f"{key}.source")
        check_call(function, (), tasks.options, tasks.source, f"{key}.options")
    elif isinstance(tasks, ReasoningGymTasks):
        _check_reasoning_gym(tasks, key)
    else:
        _check_tables(tasks)


def _check_tables(tasks: ParquetTasks | DatasetsTasks) -> None:
    """What can be told without loading a data set: the hub is asked by the worker that reads the tasks."""
    package = "pyarrow" if isinstance(tasks, ParquetTasks) else "datasets"
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(package, "datasets")
    if isinstance(tasks, ParquetTasks):
        check_parquet(tasks)
    else:
        check_local(tasks)


_LOOKED_AT_BYTES = 32 << 20
"""Of a file of tasks, before the start: seconds at most. The worker that reads the tasks looks at all of it."""


def _check_jsonl(tasks: JsonlTasks, key: str, compares: str | None) -> None:
    file = Path(tasks.path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise ConfigError(f"{key}.path names a file of tasks; it {what}", str(file), f"change {key}.path")
    if not sum(1 for _ in checked_tasks(jsonl_rows(tasks, _LOOKED_AT_BYTES), compares)):
        remedy = "there is no task in it: write one a line"
        raise ConfigError(f"{key}.path names a file with at least one task", str(file), remedy)


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


def _check_callable(source: str, key: str) -> Any:
    found = _with_key(key, resolve, source)
    if not callable(found):
        kind = type(found).__name__
        remedy = f"it leads to {kind}: name the class or function itself"
        raise ConfigError(f"{key} names a class or a function", source, remedy)
    return found


def _check_user_class(
    room: EnvironmentConfig | ScorerConfig | RewardConfig, key: str, method: str, arguments: tuple[str, ...]
) -> None:
    """That an environment, or a scorer, can be made with its options and called with the arguments it will get."""
    found = _check_callable(room.source, f"{key}.source")
    wanted = f"{method}(self, {', '.join(arguments)})"
    if not isinstance(found, type):
        _with_key(
            f"{key}.source", lambda source: check_call(found, arguments, room.options, source, key), room.source
        )
        return
    called = inspect.getattr_static(found, method, None)
    if called is None or not callable(getattr(found, method)):
        has = [name for name in vars(found) if not name.startswith("_")]
        remedy = f"define {wanted} in it; it has {', '.join(has) or 'no public names'}"
        raise BadReference(f"{key}.source: a class there has a method {wanted}", room.source, remedy)
    _with_key(
        f"{key}.options", lambda source: check_call(found, (), room.options, source, f"{key}.options"), room.source
    )
    bound = ("self", *arguments) if inspect.isfunction(called) else arguments
    _with_key(
        f"{key}.source",
        lambda source: check_call(getattr(found, method), bound, {}, f"{source}.{method}", key),
        room.source,
    )


def _with_key(key: str, check: Callable[[str], Checked], value: str) -> Checked:
    """`check(value)`; its error also names the key that the value came from."""
    try:
        return check(value)
    except MissingExtra:
        raise
    except InputError as error:
        raise type(error)(f"{key}: {error.rule}", error.value, error.remedy) from error

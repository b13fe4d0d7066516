"""Configuration of tasks and environments. No torch here."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError
from headrace.records import Sampling


class Columns(Config, kw_only=True):
    """What the keys or columns of a source are called. Those that are named nowhere go to the task's data."""

    prompt_column: Annotated[str, Meta(min_length=1)] = "prompt"
    """Which one is the prompt: text or messages."""
    answer_column: Annotated[str, Meta(min_length=1)] | None = None
    """Which one is the answer. None: "answer", where there is one."""
    id_column: Annotated[str, Meta(min_length=1)] | None = None
    """Which one names the task. None: "id", where there is one, otherwise the task's number."""

    def check(self) -> None:
        named = [name for name in (self.prompt_column, self.answer_column, self.id_column) if name is not None]
        if len(named) != len(set(named)):
            raise ConfigError("prompt, answer and id of a task are different columns", named, "name another column")


class JsonlTasks(Columns, tag="jsonl", tag_field="type", kw_only=True):
    """One task a line: {"prompt": text or messages, "answer": …, …}; other keys go to the task's data."""

    path: str
    """The file, in UTF-8."""


class ParquetTasks(Columns, tag="parquet", tag_field="type", kw_only=True):
    """One task a row of a Parquet file, or of all those in a folder. Needs `headrace[datasets]`."""

    path: str
    """The file, or a folder whose *.parquet files are read in the order of their names."""


class DatasetsTasks(Columns, tag="datasets", tag_field="type", kw_only=True):
    """One task a row of a data set that the `datasets` library loads. Needs `headrace[datasets]`."""

    path: str
    """A local folder, a local file (.csv, .json, .jsonl, .parquet, .arrow), or a name on the hub, such as
    "openai/gsm8k"."""
    subset: str | None = None
    """The data set's configuration, such as "main", where it has several."""
    split: str = "train"
    """Which split, also in the library's notation: "train[:1000]"."""
    revision: str | None = None
    """A commit, tag or branch of a data set on the hub. None: its newest."""


class ReasoningGymTasks(Config, tag="reasoning_gym", tag_field="type"):
    """Tasks of a `reasoning-gym` dataset. Its own verifier is `headrace.scoring.rules:ReasoningGym`."""

    dataset: str
    """The dataset's name, such as "chain_sum"."""
    size: Annotated[int, Meta(ge=1)] = 10_000
    seed: int = 0
    options: dict[str, Any] = {}
    """The dataset's own options."""


class PythonTasks(Config, tag="python", tag_field="type"):
    """Tasks from a function of the user's: `source(**options)` returns or yields tasks."""

    source: str
    """ "module:function" or "file.py:function"."""
    options: dict[str, Any] = {}


TaskConfig = JsonlTasks | ParquetTasks | DatasetsTasks | ReasoningGymTasks | PythonTasks


class SamplingConfig(Config):
    """How the policy is sampled."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 keeps all tokens."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def check(self) -> None:
        if (fault := self.sampling().fault()) is not None:
            raise ConfigError(*fault, "choose one that a device can tell from 0 and 1")

    def sampling(self) -> Sampling:
        return Sampling(**msgspec.structs.asdict(self))


class TemplateConfig(Config):
    """What the model's chat template is given beside the messages, in training and in evaluation."""

    name: str | None = None
    """One of several templates of the model's folder. None: "tool_use" where there are tools and a template of that
    name, otherwise "default"."""
    variables: dict[str, Any] = {}
    """The template's own variables, such as `enable_thinking = false`."""
    tools: tuple[dict[str, Any], ...] | None = None
    """What the policy is told that it can call: JSON schemas of functions."""
    documents: tuple[dict[str, Any], ...] | None = None
    """What the policy is told to answer from."""

    def check(self) -> None:
        for key in self.variables:
            if key in ("messages", "tools", "documents", "add_generation_prompt"):
                where = f"environment.template.{key}" if key in ("tools", "documents") else "the prompt"
                raise ConfigError(
                    "environment.template.variables are the template's own", key, f"leave it to {where}"
                )

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `Tokenizer.chat`."""
        given = msgspec.structs.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


class EnvironmentConfig(Config):
    """What turns a task into an episode, in worker processes of its own."""

    source: str = "headrace.rollout.single_turn:SingleTurn"
    """The environment's class, or a function `rollout(task, policy)`: "module:Name" or "file.py:Name"."""
    options: dict[str, Any] = {}
    """Keyword arguments of its constructor."""
    template: TemplateConfig = TemplateConfig()
    sampling: SamplingConfig = SamplingConfig()
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most tokens of one turn."""
    stop_strings: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Texts that end a turn, besides the model's end-of-sequence tokens."""
    workers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Worker processes."""
    concurrency: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """Episodes run at once in one worker."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest one episode may take, in seconds."""
    max_samples: Annotated[int, Meta(ge=1)] = 256
    """Most turns that one episode may sample at once. One that asks for more fails with `too_many_samples`."""
    pass_env: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Environment variables that its workers get beside the usual ones: names, or patterns such as "OPENAI_*". "*"
    passes all."""

    def check(self) -> None:
        if ":" not in self.source:
            raise ConfigError(
                'environment.source names an environment as "module:Name" or "file.py:Name"',
                self.source,
                'the built-in one is "headrace.rollout.single_turn:SingleTurn"',
            )

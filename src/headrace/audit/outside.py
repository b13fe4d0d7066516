"""What stands outside a run's folder and confirms what is in it: the model's tokenizer, the file of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from headrace.audit.findings import PROVENANCE, RECORDS
from headrace.audit.turns import SINGLE_TURN
from headrace.config.run import RunConfig
from headrace.errors import HeadraceError
from headrace.records import Task
from headrace.rollout.config import JsonlTasks
from headrace.rollout.single_turn import SingleTurn
from headrace.rollout.tasks import load_tasks
from headrace.telemetry.episodes import StoredEpisode
from headrace.tokenizer import Tokenizer

_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


class Outside:
    """What could be read of it. What could not is told, once, in `unchecked`."""

    def __init__(self, config: RunConfig):
        self.unchecked: dict[str, str] = {}
        self._config = config
        self._tokenizer = self._open_tokenizer()
        self.vocabulary = self._read_vocabulary()
        self._tasks = self._read_tasks()
        self._single = self._open_prompts()

    def problems(self, item: StoredEpisode) -> Iterator[tuple[str, str]]:
        """(law, what) that an episode contradicts."""
        task, turns = item.episode.task, item.episode.turns
        if self._tasks is not None and _digest(task) not in self._tasks:
            yield RECORDS, f"its task {task.id!r} is not one of the run's task file"
        if self._tokenizer is None:
            return
        if item.text is not None:
            text = "\n".join(self._tokenizer.decode(turn.tokens.tolist()) for turn in turns)
            if text != item.text:
                yield RECORDS, f"its text is {item.text[:60]!r}, and its tokens say {text[:60]!r}"
        if self._single is not None:
            prompt = self._single.prompt(task)
            if isinstance(prompt, str):
                tokens = self._tokenizer.encode(prompt, special=True)
            else:
                tokens = self._tokenizer.chat(prompt)
            if len(turns) != 1 or not np.array_equal(turns[0].context, tokens):
                yield PROVENANCE, "what the policy was shown is not its task's prompt"

    def _open_prompts(self) -> SingleTurn | None:
        """The environment whose prompts are made again. Another's are its own affair."""
        if self._tokenizer is None or self._config.environment.source != SINGLE_TURN:
            return None
        if any("strftime_now" in text for text in _texts(Path(self._config.model.path), _TEMPLATES)):
            self.unchecked["prompts"] = "the model's chat template shows the date"
            return None
        return SingleTurn(**self._config.environment.options)

    def _open_tokenizer(self) -> Tokenizer | None:
        try:
            return Tokenizer(Path(self._config.model.path))
        except (HeadraceError, OSError, ValueError) as error:
            self.unchecked["texts and prompts"] = f"the model's tokenizer cannot be read: {error}"
            return None

    def _read_vocabulary(self) -> int | None:
        """How many tokens the model knows."""
        try:
            found = json.loads((Path(self._config.model.path) / "config.json").read_text(encoding="utf-8"))
            size = found.get("vocab_size", found.get("text_config", {}).get("vocab_size"))
            return int(size)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self.unchecked["that tokens are of the vocabulary"] = f"the model's config.json cannot be read: {error}"
            return None

    def _read_tasks(self) -> set[int] | None:
        """Digests of all tasks. Only a file of tasks is read: a user's functions are not called here."""
        if not isinstance(self._config.tasks, JsonlTasks):
            self.unchecked["that tasks are the run's"] = "they come from code, which an audit does not run"
            return None
        try:
            return {_digest(task) for task in load_tasks(self._config.tasks)}
        except (HeadraceError, OSError, ValueError) as error:
            self.unchecked["that tasks are the run's"] = f"the task file cannot be read: {error}"
            return None


def _texts(folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if (folder / name).is_file():
            yield (folder / name).read_text(encoding="utf-8", errors="replace")


def _digest(task: Task) -> int:
    plain = {name: getattr(task, name) for name in Task.__struct_fields__}
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(plain, order="sorted"))

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
from headrace.errors import HeadraceError, ModelFolderError
from headrace.records import Task, Turn, text_before
from headrace.rollout.config import DatasetsTasks, JsonlTasks, ParquetTasks
from headrace.rollout.prompts import prompt_tokens
from headrace.rollout.single_turn import SingleTurn
from headrace.rollout.tasks import load_tasks
from headrace.telemetry.episodes import StoredEpisode
from headrace.tokenizer import Tokenizer


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
            texts = (text_before(self._tokenizer.decode(t.tokens.tolist()), t.stop_string) for t in turns)
            text = "\n".join(texts)
            if text != item.text:
                yield RECORDS, f"its text is {item.text[:60]!r}, and its tokens say {text[:60]!r}"
        for turn in turns:
            yield from self._stops(turn)
        if self._single is not None:
            prompt = self._single.prompt(task)
            tokens = prompt_tokens(prompt, self._tokenizer, self._config.environment.template)
            if len(turns) != 1 or not np.array_equal(turns[0].context, tokens):
                yield PROVENANCE, "what the policy was shown is not its task's prompt"

    def _stops(self, turn: Turn) -> Iterator[tuple[str, str]]:
        """What a turn says of its end, and what its tokens and text say."""
        assert self._tokenizer is not None
        tokens, ends, string = turn.tokens.tolist(), self._ends, turn.stop_string
        told = f"it stops by {turn.stop!r}, with {len(tokens)} tokens to {tokens[-4:]}"
        at_end = bool(tokens) and tokens[-1] in ends
        if turn.stop not in ("end", "stop_string", "length"):
            yield PROVENANCE, f"{told}: no turn that was trained on does"
        elif at_end != (turn.stop == "end") or any(token in ends for token in tokens[:-1]):
            yield PROVENANCE, f"{told}, and tokens that end a turn are {sorted(ends)}"
        if string is not None and string not in self._tokenizer.decode(tokens):
            yield PROVENANCE, f"{told}: the stop string {string[:60]!r} is not in its text"
        if self._single is None:
            return
        environment, room = self._config.environment, self._config.engine.max_context - len(turn.context)
        if string is not None and string not in environment.stop_strings:
            yield PROVENANCE, f"{told}: the stop string {string[:60]!r} is none of the run's"
        if turn.stop == "length" and len(tokens) != min(environment.max_tokens, room):
            yield PROVENANCE, f"{told}, and may have {min(environment.max_tokens, room)}"

    def _open_prompts(self) -> SingleTurn | None:
        """The environment whose prompts are made again. Another's are its own affair."""
        if self._tokenizer is None or self._config.environment.source != SINGLE_TURN:
            return None
        settings = self._config.environment.template
        try:
            template = self._tokenizer.template(settings.name, tools=settings.tools is not None)
        except ModelFolderError as error:
            self.unchecked["prompts"] = f"the model's chat template cannot be read: {error}"
            return None
        if template is not None and template.tells_time:
            self.unchecked["prompts"] = "the model's chat template shows the date"
            return None
        return SingleTurn(**self._config.environment.options)

    def _open_tokenizer(self) -> Tokenizer | None:
        try:
            tokenizer = Tokenizer(Path(self._config.model.path))
            self._ends = frozenset(tokenizer.eos_tokens)
            return tokenizer
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
        """Digests of all tasks. Only files are read: no function of a user's is called, and nothing downloaded."""
        if not isinstance(self._config.tasks, JsonlTasks | ParquetTasks):
            where = "a library's data sets" if isinstance(self._config.tasks, DatasetsTasks) else "code"
            self.unchecked["that tasks are the run's"] = f"they come from {where}, which an audit does not run"
            return None
        try:
            return {_digest(task) for task in load_tasks(self._config.tasks)}
        except (HeadraceError, OSError, ValueError) as error:
            self.unchecked["that tasks are the run's"] = f"the task file cannot be read: {error}"
            return None


def _digest(task: Task) -> int:
    plain = {name: getattr(task, name) for name in Task.__struct_fields__}
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(plain, order="sorted"))

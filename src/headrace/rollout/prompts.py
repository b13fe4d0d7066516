"""What a policy is shown, as tokens, and a look at the first tasks' prompts before anything expensive starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError, ModelFolderError, short
from headrace.records import Task
from headrace.rollout.config import TemplateConfig
from headrace.rollout.single_turn import SingleTurn
from headrace.tokenizer import Tokenizer

CHECKED_TASKS = 8
"""So many tasks of training, and of evaluation, are rendered before a run starts its engines."""
_SHOWN_MESSAGES = 8
_SHOWN_CHARS = 80


def prompt_tokens(
    prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
    tokenizer: Tokenizer,
    template: TemplateConfig,
    *,
    first: bool = True,
) -> list[int]:
    """Text, chat messages or tokens as tokens. `first`: nothing comes before them."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, special=first)
    if prompt and isinstance(prompt[0], Mapping):
        return tokenizer.chat(prompt, **template.options())  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def check_prompt(
    task: Task, environment: Any, tokenizer: Tokenizer, template: TemplateConfig, where: str
) -> int | None:
    """Tokens of the task's prompt. Raises ConfigError where it cannot be rendered. `where` is the key that the task
    comes from.

    Only the built-in environment says what it will ask; one of a user's is not looked at, and gives None.
    """
    if type(environment) is not SingleTurn:
        return None
    prompt = environment.prompt(task)
    try:
        return len(prompt_tokens(prompt, tokenizer, template))
    except ModelFolderError as error:
        why = error.rule if error.value is None else f"{error.rule}: {error.value}"
        raise ConfigError(
            f"the model's chat template renders the messages of every task, and not those of task {task.id!r} of "
            f"{where}, which are {shown_messages(prompt)}",
            why,
            error.remedy,
        ) from error


def check_lengths(lengths: Sequence[int | None], where: str, max_context: int) -> None:
    """Raise ConfigError where none of the prompts leaves room for a token. Of single ones an episode's failure
    tells."""
    if lengths and all(length is not None and length >= max_context for length in lengths):
        known = [length for length in lengths if length is not None]
        raise ConfigError(
            "a prompt leaves room for a completion within engine.max_context",
            f"the first prompts of {where} have {min(known):,} tokens and more, "
            f"engine.max_context = {max_context:,}",
            "raise engine.max_context, or shorten the prompts",
        )


def shown_messages(messages: Any) -> str:
    """The messages in a line, each cut where it is long."""
    if isinstance(messages, str):
        return repr(_cut(messages))
    shown = [_shown(message) for message in messages[:_SHOWN_MESSAGES]]
    more = len(messages) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def _shown(message: Any) -> str:
    if not isinstance(message, Mapping):
        return _cut(repr(message))
    parts = (f"{short(key)}: {_cut(repr(value))}" for key, value in message.items())
    return "{" + ", ".join(parts) + "}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"

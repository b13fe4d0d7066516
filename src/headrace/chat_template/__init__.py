"""A model folder's chat template: a program by a stranger, run with a limit on its work and its memory.

Jinja's sandbox keeps a template from the process's objects, but not from its time. Here the code that Jinja
generates counts what it does, in steps, and stops at a limit:

    a loop's turn, a macro's or block's body        its nodes and literal text
    a filter, a test, a call, an operator           what it scans, before; what it made, after
    text that is written                            its length

A step is a character or a sixteenth of an element, so the limit bounds memory as well as time. What makes much out
of little in one operation (`*`, `**`, `%`, widths, `replace`, `join`, …) is counted before it is done. Nothing
depends on a clock: the same template and messages end the same way on every machine, and in every thread.

    sizes.py         how many steps it takes to look at a value
    generator.py     the code that Jinja makes of a template, with counting between
    environment.py   what that code calls: filters, tests, methods, operators
    folder.py        where a model folder keeps its templates, and which one a conversation takes
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from headrace.chat_template.environment import MAX_STEPS, STEPS_PER_INPUT, CountingEnvironment, Refusal, TooMuchWork
from headrace.errors import ModelFolderError

__all__ = ["MAX_SOURCE", "MAX_STEPS", "STEPS_PER_INPUT", "ChatTemplate"]

MAX_SOURCE = 1 << 16
"""Characters of a template. The longest in use have a third of that."""
MAX_TOKENS = 1 << 13
"""Words and signs of a template's code, of which the longest in use have a third. To compile them takes up to
4 KiB for each."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry their reasoning, as transformers knows them."""
_WHAT_TEMPLATES_RAISE = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@cache
def _shared_environment() -> CountingEnvironment:
    return CountingEnvironment()


# The environment counts the steps of one rendering at a time, whichever template's it is.
_one_at_a_time = threading.Lock()


class ChatTemplate:
    """A compiled template. May be used from several threads, which render one after the other."""

    def __init__(self, source: str, name: str):
        """`name` is the file that errors speak of."""
        self._name = name
        self.tells_time = "strftime_now" in source
        """Whether it may render the same messages differently tomorrow."""
        if len(source) > MAX_SOURCE:
            raise ModelFolderError(
                f"the chat template in {name} must not exceed {MAX_SOURCE} characters",
                f"{len(source)} characters",
                "shorten it",
            )
        self._environment = _shared_environment()
        try:
            with _one_at_a_time, warnings.catch_warnings():
                self._environment.begin({})
                # Python's compiler finds what is odd in a stranger's code, which nobody here can mend.
                warnings.simplefilter("ignore", SyntaxWarning)
                self._refuse_long_code(source)
                self._template = self._environment.from_string(source)
        except _WHAT_TEMPLATES_RAISE as error:
            raise self._fault("must be a Jinja template", error) from error

    def _refuse_long_code(self, source: str) -> None:
        tokens = (kind for _, kind, _ in self._environment.lex(source) if kind != "whitespace")
        if next(islice(tokens, MAX_TOKENS, None), None) is not None:
            raise ValueError(f"it has more than {MAX_TOKENS} words and signs")

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text, as transformers' `apply_chat_template` renders it. Raises ModelFolderError."""
        environment = self._environment
        with _one_at_a_time:
            try:
                given = {"messages": _conversation(messages), "tools": None, "documents": None, **variables}
                context = self._template.new_context(environment.begin(given))
                return "".join(self._template.root_render_func(context))
            except TooMuchWork as error:
                raise ModelFolderError(
                    f"the chat template in {self._name} must render within {MAX_STEPS} steps, "
                    f"and {STEPS_PER_INPUT} more for each character of the messages",
                    remedy="use the template of another folder of this model, or plain text as prompt",
                ) from error
            except Refusal as error:
                raise self._fault("refuses these messages", error) from error
            except _WHAT_TEMPLATES_RAISE as error:
                raise self._fault("must render these messages", error) from error

    def _fault(self, rule: str, error: Exception) -> ModelFolderError:
        said = str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"
        return ModelFolderError(
            f"the chat template in {self._name} {rule}", said, "correct it, or give prompts as plain text"
        )


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise ValueError("a conversation has at least one message")
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"a message is an object, not {type(message).__name__}")
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under each of the names that templates read."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}

"""Conversations of many kinds for chat templates, each with words of its own, and what is given beside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

WORDS = (
    "weather", "Zürich", "naïve", "你好", "🙂", "عربي", "नमस्ते", "∑", "2 < 3", "<b>&amp;</b>",
    "it's", '"quoted"', "a\tb", "line\nbreak", "\\n", "{x}", "%s", "e\u0301", "👩\u200d👩\u200d👧",
    "<|im_end|>", "[INST]", "</s>", "```py\nx\n```", "end.",
)  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how <warm> it is, in °C.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Una città"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": None},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]
DOCUMENTS = [{"title": "Hours", "text": "We open\nat nine."}, {"title": "Straße", "text": "Nr. 5 & 6"}]


@dataclass(frozen=True)
class Conversation:
    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def conversations(seed: str) -> list[Conversation]:
    """One of each kind. Another seed has other words."""
    chance = random.Random(seed)

    def say(most: int = 8) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, most)))

    return [make(say) for make in _KINDS]


Say = Callable[..., str]


def user(content: Any, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def call(name: str, arguments: Any, key: str) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(name: str, content: Any, key: str) -> Message:
    return {"role": "tool", "name": name, "content": content, "tool_call_id": key}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _one_call(say: Say, arguments: Any, content: Any, *after: Message) -> list[Message]:
    calls = [call("weather", arguments, "abcdefgh1")]
    return [
        user(say()),
        assistant(content, tool_calls=calls),
        result("weather", '{"t": 21.5}', "abcdefgh1"),
        *after,
    ]


def _two_calls(say: Say) -> list[Message]:
    calls = [call("weather", {"place": "Oslo", "days": [1, 2]}, "abcdefgh1"), call("now", {}, "abcdefgh2")]
    results = [result("weather", say(), "abcdefgh1"), result("now", "12:00", "abcdefgh2")]
    return [
        system(say()),
        user(say()),
        assistant(say(), tool_calls=calls),
        *results,
        assistant(say()),
        user(say()),
    ]


_KINDS: tuple[Callable[[Say], Conversation], ...] = (
    lambda say: Conversation("one message", [user(say())]),
    lambda say: Conversation("with a system message", [system(say()), user(say())]),
    lambda say: Conversation(
        "several turns", [user(say()), assistant(say()), user(say() + "\n"), assistant(f" {say()} "), user(say())]
    ),
    lambda say: Conversation(
        "several turns with a system message", [system(say()), user(say()), assistant(say()), user(say())]
    ),
    lambda say: Conversation("empty contents", [system(""), user(""), assistant(""), user("  \n ")]),
    lambda say: Conversation(
        "lists of contents", [user([_text(say()), _text(say())]), assistant([_text(say())]), user(say())]
    ),
    lambda say: Conversation("pictures", [user([{"type": "image"}, _text(say())])]),
    lambda say: Conversation(
        "thoughts in contents", [user(say()), assistant(f"<think>\n{say()}\n</think>\n\n{say()}"), user(say())]
    ),
    lambda say: Conversation(
        "reasoning content", [user(say()), assistant(say(), reasoning_content=say()), user(say())]
    ),
    lambda say: Conversation("thinking", [user(say()), assistant(say(), thinking=say()), user(say())]),
    lambda say: Conversation(
        "thinking switched off", [user(say())], variables={"enable_thinking": False, "thinking": False}
    ),
    lambda say: Conversation(
        "thinking switched on",
        [system(say()), user(say())],
        variables={"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    ),
    lambda say: Conversation("tools", [user(say())], tools=TOOLS),
    lambda say: Conversation("tools and a system message", [system(say()), user(say())], tools=TOOLS),
    lambda say: Conversation("no tools at all", [user(say())], tools=[]),
    lambda say: Conversation(
        "a call and its result", _one_call(say, {"place": say(3), "days": [1]}, ""), tools=TOOLS
    ),
    lambda say: Conversation(
        "a call with arguments as text",
        _one_call(say, '{"place": "Oslo"}', None, assistant(say()), user(say())),
        tools=TOOLS,
    ),
    lambda say: Conversation("calls without tools", _one_call(say, {"place": "Oslo", "unit": None}, say())),
    lambda say: Conversation("two calls at once", _two_calls(say), tools=TOOLS),
    lambda say: Conversation("documents", [user(say())], documents=DOCUMENTS),
    lambda say: Conversation("keys of its own", [user(say(), name="Ann", weight=0.5, tags=["a", None, True])]),
    lambda say: Conversation(
        "a long one", [(user, assistant)[place % 2](f"{place} " + say(60)) for place in range(41)]
    ),
    lambda say: Conversation("two of the user's in a row", [user(say()), user(say())]),
    lambda say: Conversation("the assistant's at the end", [user(say()), assistant(say())]),
    lambda say: Conversation("a role that few know", [{"role": "developer", "content": say()}, user(say())]),
    lambda say: Conversation("no content", [user(None), assistant(None), user(say())]),
    lambda say: Conversation("no message", []),
)

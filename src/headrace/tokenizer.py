"""Text to tokens and back, from a Hugging Face folder, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from headrace.chat_template import ChatTemplate
from headrace.chat_template.folder import DEFAULT, TEMPLATE, choose_template, template_sources
from headrace.errors import ModelFolderError
from headrace.model_files import read_bytes, read_object, shortened, token_ids
from headrace.special_tokens import SETTINGS, SPECIAL_TOKENS, class_defaults, named_tokens

FILE = "tokenizer.json"
_MAX_BYTES = 128 * 2**20
_MAX_GROWTH = 1 << 12
_FEW_VALUES = 1 << 16
_VALUES_PER_TOKEN = 12
"""Pieces of JSON that a tokenizer.json has for each token of the model: its text and id, merges, added tokens."""
_PLAIN_TALK: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)


class Tokenizer:
    """The folder's tokenizer.json, its chat template and its end-of-sequence tokens.

    Raises ModelFolderError for what is wrong with one of these files, at the latest when it is needed; `check`
    looks at all of them at once.
    """

    def __init__(self, folder: str | Path, vocabulary: int | None = None):
        """`vocabulary`, the model's, limits how large a tokenizer.json may be."""
        self._folder = Path(folder)
        self._backend = _load(self._folder / FILE, vocabulary)
        self._settings = read_object(self._folder / SETTINGS) or {}
        self._compiled: dict[str, ChatTemplate] = {}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special` adds what the tokenizer puts around a text, such as a beginning-of-sequence token."""
        with _telling(f"{FILE} must be able to encode a text"):
            return list(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Iterable[int], *, keep_special: bool = False) -> str:
        with _telling(f"{FILE} must be able to decode tokens"):
            return str(self._backend.decode([int(t) for t in tokens], skip_special_tokens=not keep_special))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        name: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The messages through the folder's chat template, ready to be answered: the tokens that transformers'
        `apply_chat_template` gives. `name` chooses among several templates; `variables` are the template's own."""
        template = self.template(name, tools=tools is not None)
        if template is None:
            raise ModelFolderError(
                "chat messages need a chat template in the model folder",
                str(self._folder),
                f"add {TEMPLATE}, or give the task's prompt as plain text",
            )
        return self.encode(
            template.render(
                messages,
                tools=tools,
                documents=documents,
                **{
                    **self._special_tokens,
                    "add_generation_prompt": add_generation_prompt,
                    **(variables or {}),
                },
            )
        )

    def template(self, name: str | None = None, *, tools: bool = False) -> ChatTemplate | None:
        """The chat template of this name, or the one that a conversation takes, with or without tools."""
        name = choose_template(self._templates, name, tools=tools)
        if name is None:
            return None
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(*self._templates[name])
        return self._compiled[name]

    @cached_property
    def words(self) -> dict[str, int]:
        """Every token's text and its id."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    @cached_property
    def eos_tokens(self) -> tuple[int, ...]:
        """Every token that ends a completion: of generation_config.json, config.json and the tokenizer."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            found += token_ids((read_object(self._folder / name) or {}).get("eos_token_id"), "eos_token_id", name)
        text = self._named_tokens.get("eos_token")
        token = self._backend.token_to_id(text) if text else None
        return tuple(dict.fromkeys([*found, *([token] if token is not None else [])]))

    def check(self, vocabulary: int) -> None:
        """Raise ModelFolderError unless all files of the tokenizer are sound and fit a model of this vocabulary."""
        text, largest = max(self.words.items(), key=lambda word: word[1], default=("", -1))
        if not self.words:
            raise ModelFolderError(
                f"{FILE} must have tokens", str(self._folder), "save the model's tokenizer there"
            )
        if largest >= vocabulary:
            raise ModelFolderError(
                f"every token of {FILE} must be below the model's vocabulary of {vocabulary}",
                f"{shortened(text)!r}: {largest}",
                "the tokenizer and the weights belong to different models",
            )
        for token in self.eos_tokens:
            if token >= vocabulary:
                raise ModelFolderError(
                    f"eos_token_id must be below the model's vocabulary of {vocabulary}",
                    token,
                    "correct config.json and generation_config.json",
                )
        for name in self._templates:
            self.template(name)
        if DEFAULT in self._templates:
            self.chat(_PLAIN_TALK[:1])
            self.chat(_PLAIN_TALK)
        else:
            self.encode(_PLAIN_TALK[0]["content"], special=True)

    @cached_property
    def _templates(self) -> dict[str, tuple[str, str]]:
        return template_sources(self._folder, self._settings)

    @cached_property
    def _named_tokens(self) -> dict[str, str | None]:
        return named_tokens(self._settings, read_object(self._folder / SPECIAL_TOKENS) or {})

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """What chat templates know of them: those that there are."""
        config = read_object(self._folder / "config.json") or {}
        defaults = class_defaults(self._settings, config, byte_level=_is_byte_level(self._backend))
        return {key: text for key, text in {**defaults, **self._named_tokens}.items() if text is not None}


def _load(file: Path, vocabulary: int | None) -> Any:
    from tokenizers import Tokenizer as Backend

    content = read_bytes(file, _MAX_BYTES)
    if content is None:
        raise ModelFolderError(f"a model folder has a {FILE}", str(file), "save the model's tokenizer there")
    values = content.count(b",") + content.count(b"[") + content.count(b"{")
    if vocabulary is not None and values > _FEW_VALUES + _VALUES_PER_TOKEN * vocabulary:
        raise ModelFolderError(
            f"{FILE} must have at most {_VALUES_PER_TOKEN} values for each of the model's {vocabulary} tokens",
            f"{values} values",
            "the tokenizer and the weights belong to different models",
        )
    with _telling(f"{FILE} must be a tokenizer of the tokenizers library"):
        backend = Backend.from_buffer(content)
        # A folder may ask for texts to be cut, or filled up to any length.
        backend.no_truncation()
        backend.no_padding()
        parts = {"normalizer": backend.normalizer, "decoder": backend.decoder}
        growths = {
            name: _growth(json.loads(part.__getstate__())) for name, part in parts.items() if part is not None
        }
    for name, growth in growths.items():
        if growth > _MAX_GROWTH:
            raise ModelFolderError(
                f"the {name} of {FILE} must not make texts more than {_MAX_GROWTH} times as long",
                f"up to {growth:.3g} times",
                "save the model's tokenizer there",
            )
    return backend


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a text may become, by one replacement after another."""
    if part["type"] == "Replace":
        [(kind, pattern)] = part["pattern"].items()
        # What is found may be empty, so that the content comes between all characters.
        least = len(pattern) if kind == "String" else 0
        return max(1.0, len(part["content"]) / least if least else 1 + len(part["content"]))
    return prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()), start=1.0)


@contextmanager
def _telling(rule: str) -> Iterator[None]:
    """What the tokenizers library raises within it is a fault of the folder."""
    try:
        yield
    # The library raises plain exceptions, and those of its own panics are not even of this class.
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFolderError(rule, f"{type(error).__name__}: {error}", f"repair or replace {FILE}") from error
        raise


def _is_byte_level(backend: Any) -> bool:
    parts = (backend.pre_tokenizer, backend.decoder)
    return any("ByteLevel" in part.__getstate__().decode() for part in parts if part is not None)

"""Text to tokens and back, from a Hugging Face folder, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from headrace.chat_template import ChatTemplate
from headrace.errors import ModelFolderError
from headrace.model_files import read_bytes, read_object, read_text, shortened, token_ids

FILE, SETTINGS, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
_MAX_BYTES = 128 * 2**20
_MAX_GROWTH = 1 << 12
_FEW_VALUES = 1 << 16
_VALUES_PER_TOKEN = 12
"""Pieces of JSON that a tokenizer.json has for each token of the model: its text and id, merges, added tokens."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
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

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special` adds what the tokenizer puts around a text, such as a beginning-of-sequence token."""
        with _telling(f"{FILE} must be able to encode a text"):
            return list(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Iterable[int], *, keep_special: bool = False) -> str:
        with _telling(f"{FILE} must be able to decode tokens"):
            return str(self._backend.decode([int(t) for t in tokens], skip_special_tokens=not keep_special))

    def chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """The messages through the folder's chat template, ready to be answered."""
        if self._template is None:
            raise ModelFolderError(
                "chat messages need a chat template in the model folder",
                str(self._folder),
                f"add {TEMPLATE}, or give the task's prompt as plain text",
            )
        return self.encode(
            self._template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                **{"bos_token": "", "eos_token": ""} | self._named,
            )
        )

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
        text = self._named.get("eos_token")
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
        _token_texts(read_object(self._folder / SPECIAL_TOKENS) or {}, SPECIAL_TOKENS)
        if self._template is not None:
            self.chat(_PLAIN_TALK[:1])
            self.chat(_PLAIN_TALK)
        else:
            self.encode(_PLAIN_TALK[0]["content"], special=True)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = read_text(self._folder / TEMPLATE)
        if source is not None:
            return ChatTemplate(source, TEMPLATE)
        given = self._settings.get("chat_template")
        if isinstance(given, list):
            # Several templates, each with a name, of which plain conversations take one.
            named = [(one.get("name"), one.get("template")) for one in given if isinstance(one, dict)]
            if len(named) < len(given):
                raise ModelFolderError(
                    f"chat_template of {SETTINGS} must be a text, or objects of name and template", given
                )
            given = dict(named[::-1]).get("default") if all(isinstance(name, str) for name, _ in named) else named
        if given is None:
            return None
        if not isinstance(given, str):
            raise ModelFolderError(f"chat_template of {SETTINGS} must be a text", given, f"correct {SETTINGS}")
        return ChatTemplate(given, SETTINGS)

    @cached_property
    def _named(self) -> dict[str, str]:
        return _token_texts(self._settings, SETTINGS)


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


def _token_texts(settings: dict[str, Any], name: str) -> dict[str, str]:
    """The special tokens that have a name, as texts."""
    found = {}
    for key in _NAMED:
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None and value is None:
            continue
        if not isinstance(text, str):
            raise ModelFolderError(
                f"{key} of {name} must be a text, or an object with its content", value, f"correct {name}"
            )
        found[key] = text
    return found

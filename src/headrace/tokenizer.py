"""Text to tokens and back, from a Hugging Face folder, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.errors import ModelFolderError


class Tokenizer:
    """The folder's tokenizer.json, its chat template and its end-of-sequence tokens."""

    def __init__(self, folder: str | Path):
        from tokenizers import Tokenizer as Backend

        self._folder = Path(folder)
        file = self._folder / "tokenizer.json"
        if not file.exists():
            raise ModelFolderError(
                "a model folder has a tokenizer.json", str(file), "save the model's tokenizer there"
            )
        self._backend = Backend.from_file(str(file))
        self._config = self._json("tokenizer_config.json")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special` adds what the tokenizer puts around a text, such as a beginning-of-sequence token."""
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Iterable[int], *, keep_special: bool = False) -> str:
        return str(self._backend.decode([int(t) for t in tokens], skip_special_tokens=not keep_special))

    def chat(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """The messages through the folder's chat template, ready to be answered."""
        if self._template is None:
            raise ModelFolderError(
                "chat messages need a chat template in the model folder",
                str(self._folder),
                "add chat_template.jinja, or give the task's prompt as plain text",
            )
        text = self._template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._token_text("bos_token"),
            eos_token=self._token_text("eos_token"),
        )
        return self.encode(text)

    @cached_property
    def eos_tokens(self) -> tuple[int, ...]:
        """Every token that ends a completion: of generation_config.json, config.json and the tokenizer."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get("eos_token_id")
            found += value if isinstance(value, list) else [value] if value is not None else []
        text = self._token_text("eos_token")
        token = self._backend.token_to_id(text) if text else None
        return tuple(dict.fromkeys(int(t) for t in [*found, *([token] if token is not None else [])]))

    @cached_property
    def _template(self) -> Any:
        file = self._folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else self._config.get("chat_template")
        if not isinstance(source, str):
            return None
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        return environment.from_string(source)

    def _token_text(self, key: str) -> str:
        value = self._config.get(key)
        return value["content"] if isinstance(value, dict) else value or ""

    def _json(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _raise(text: str) -> None:
    raise ModelFolderError("the chat template refuses these messages", text)

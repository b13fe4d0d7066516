"""What transformers renders of templates in use, Headrace renders: the same tokens, and a refusal for an error."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_conversations import WORDS, Conversation, conversations
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.errors import ModelFolderError
from headrace.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "chat_templates"
TEMPLATES = sorted(str(file.relative_to(DATA)) for file in DATA.glob("*/*.jinja"))
SPECIAL = (
    "<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<|user|>", "<|assistant|>", "<|system|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|END_OF_TURN_TOKEN|>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class Noon(datetime.datetime):
    """A clock that stands still, for both."""

    @classmethod
    def now(cls, tz: Any = None) -> Noon:
        return cls(2025, 3, 7, 12, 0, 0)


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.chat_template.environment.datetime", Noon)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Noon)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes, some words, and special tokens of several families."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate([*SPECIAL, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(file))
    return file


@pytest.fixture
def folder(tmp_path: Path, tokenizer_file: Path) -> Path:
    (tmp_path / "tokenizer.json").symlink_to(tokenizer_file)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def wanted_of(reference: Any, one: Conversation) -> list[int] | Exception:
    try:
        return list(
            reference.apply_chat_template(
                one.messages,
                tools=one.tools,
                documents=one.documents,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **one.variables,
            )
        )
    except Exception as error:
        return error


def found_of(own: Tokenizer, one: Conversation) -> list[int] | ModelFolderError:
    try:
        return own.chat(one.messages, tools=one.tools, documents=one.documents, variables=one.variables)
    except ModelFolderError as error:
        return error


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gives_the_tokens_that_transformers_gives(
    folder: Path, template: str, trial: Callable[..., None]
) -> None:
    (folder / "chat_template.jinja").write_text((DATA / template).read_text(encoding="utf-8"), encoding="utf-8")
    reference, own = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    differing = []
    for one in conversations(template):
        wanted, found = wanted_of(reference, one), found_of(own, one)
        row = {"name": f"{template}: {one.kind}", "template": template}
        if isinstance(wanted, Exception):
            agreed = isinstance(found, ModelFolderError)
            trial("template-refusals", **row, agreed=agreed)
        else:
            agreed = found == wanted
            trial("templates", **row, equal=agreed)
        if not agreed:
            differing.append((one.kind, wanted, found))
    assert not differing


def test_the_comparison_is_of_three_hundred_conversations_over_forty_templates() -> None:
    """All of them different, of which the longest has words that are tokens of their own."""
    texts = {str(one.messages) for template in TEMPLATES for one in conversations(template) if one.messages}
    assert len(TEMPLATES) >= 40
    assert len(texts) >= 300
    assert all(any(word in text for text in map(str, texts)) for word in ("<|im_end|>", "[INST]"))
    assert {"<|im_end|>", "[INST]", "</s>"} <= set(WORDS) & set(SPECIAL)

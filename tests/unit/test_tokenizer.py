"""The tokenizer, against transformers on a small one made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from headrace.errors import ModelFolderError
from headrace.tokenizer import Tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BLOCKS = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] not in ('user', 'assistant', 'system') %}
        {{ raise_exception('unknown role ' + message['role']) }}
    {% endif %}
[{{ message.role }}] {{ message['content'] | tojson }}
    {% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}"""
CONTROLS = """{% set seen = namespace(roles=0) %}{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set seen.roles = seen.roles + 1 %}
    {{- messages | tojson(indent=2) if loop.last else message.content }}
    {% if message.role == 'assistant' %}{% break %}{% endif %}
{% endfor %}{{ seen.roles }}"""
TALK = [
    {"role": "user", "content": "  Grüße, 2 < 3?  "},
    {"role": "assistant", "content": "Yes: 'naïve' \"✓\""},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with special tokens, which puts <s> before a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters, "th", "the"])}
    backend = Backend(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    return tmp_path


def put(folder: Path, name: str, **content: Any) -> None:
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **content}))


# ── Text ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["the thing", "", "Grüße ✓\n\t", "<|im_end|> the <s>"])
def test_text_becomes_the_tokens_that_transformers_gives_and_comes_back(folder, text):
    own, reference = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert own.encode(text) == reference.encode(text, add_special_tokens=False)
    assert own.encode(text, special=True) == reference.encode(text) == [1, *own.encode(text)]
    assert own.decode(own.encode(text, special=True), keep_special=True) == "<s>" + text


def test_merges_are_applied_and_special_tokens_left_out_of_a_text(folder):
    own = Tokenizer(folder)
    the = len(SPECIAL) + 256 + 1
    assert own.encode("the<|im_end|>") == [the, 4]
    assert own.decode([1, the, 4]) == "the"
    assert own.decode([1, the, 4], keep_special=True) == "<s>the<|im_end|>"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_padding_and_truncation_that_a_folder_asks_for_are_not_done(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    direction = {"direction": "Right"}
    content["padding"] = {
        **direction,
        "strategy": {"Fixed": 10**12},
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
        "pad_to_multiple_of": None,
    }
    content["truncation"] = {**direction, "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer(folder).encode("the thing")) == 6


def test_a_pattern_that_backtracks_without_end_is_the_folders_fault(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match="must be able to encode a text"):
        Tokenizer(folder).encode("a" * 60 + "b")


# ── Chat ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("template", [CHATML, BLOCKS, CONTROLS], ids=["chatml", "blocks", "controls"])
@pytest.mark.parametrize("generation", [True, False])
def test_chat_gives_the_tokens_of_transformers(folder, place, template, generation):
    if place == "chat_template.jinja":
        (folder / place).write_text(template, encoding="utf-8")
    else:
        put(folder, place, chat_template=template)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for messages in (TALK, [{"role": "system", "content": "Be brief."}, *TALK], TALK[:1]):
        wanted = reference.apply_chat_template(messages, add_generation_prompt=generation, tokenize=True)
        found = Tokenizer(folder).chat(messages, add_generation_prompt=generation)
        assert found == list(wanted["input_ids"])


def test_chat_renders_what_the_template_says(folder):
    (folder / "chat_template.jinja").write_text(CHATML)
    own = Tokenizer(folder)
    assert own.decode(own.chat(TALK[:1]), keep_special=True) == (
        "<|im_start|>system\nYou help.<|im_end|>\n"
        "<|im_start|>user\nGrüße, 2 < 3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_file_outranks_the_template_of_the_configuration(folder):
    put(folder, "tokenizer_config.json", chat_template="configuration")
    assert Tokenizer(folder).decode(Tokenizer(folder).chat(TALK)) == "configuration"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer(folder).decode(Tokenizer(folder).chat(TALK)) == "file"


def test_messages_without_a_template_are_refused(folder):
    with pytest.raises(ModelFolderError, match=r"chat_template\.jinja"):
        Tokenizer(folder).chat(TALK)


def test_a_template_that_refuses_the_messages_says_so(folder):
    (folder / "chat_template.jinja").write_text(BLOCKS)
    with pytest.raises(ModelFolderError, match="unknown role tool"):
        Tokenizer(folder).chat([{"role": "tool", "content": ""}])


def test_a_template_cannot_reach_into_the_process(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception, match="unsafe"):
        Tokenizer(folder).chat(TALK)


# ── Ends ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_ends_come_from_all_three_places_each_once(folder):
    assert Tokenizer(folder).eos_tokens == (4,)
    put(folder, "config.json", eos_token_id=2)
    assert Tokenizer(folder).eos_tokens == (2, 4)
    put(folder, "generation_config.json", eos_token_id=[3, 2])
    assert Tokenizer(folder).eos_tokens == (3, 2, 4)


def test_the_tokenizers_end_may_be_written_as_an_object_or_be_missing(folder):
    put(folder, "tokenizer_config.json", eos_token={"content": "</s>", "lstrip": False})
    assert Tokenizer(folder).eos_tokens == (2,)
    put(folder, "tokenizer_config.json", eos_token=None)
    assert Tokenizer(folder).eos_tokens == ()

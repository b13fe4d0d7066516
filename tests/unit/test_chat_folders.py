"""What a model folder's files give its chat templates, as in transformers: special tokens, several templates."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.errors import ModelFolderError
from headrace.special_tokens import CLASS_DEFAULTS
from headrace.tokenizer import Tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|endoftext|>"]
TALK = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
SEEN = """{% for name, value in [('bos', bos_token), ('eos', eos_token), ('unk', unk_token), ('pad', pad_token),
    ('sep', sep_token), ('tools', tools), ('documents', documents), ('image', image_token)] %}
{{ name }}={{ value if value is defined else 'undefined' }};
{% endfor %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate([*SPECIAL, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(tmp_path / "tokenizer.json"))
    put(tmp_path, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "chat_template.jinja").write_text(SEEN)
    return tmp_path


def put(folder: Path, name: str, **content: Any) -> None:
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **content}))


def text(folder: Path, messages: Any = TALK, **options: Any) -> str:
    own = Tokenizer(folder)
    return own.decode(own.chat(messages, **options), keep_special=True)


def reference(folder: Path, messages: Any = TALK, **options: Any) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))


# ── Special tokens ───────────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_there_is_none_or_undefined_as_in_transformers(folder):
    assert text(folder) == reference(folder)
    assert "bos=undefined;" in text(folder)
    assert "tools=None;" in text(folder)
    assert "documents=None;" in text(folder)


def test_a_token_named_only_in_the_special_tokens_map_is_there(folder):
    put(folder, "special_tokens_map.json", bos_token="<s>", pad_token={"content": "<pad>", "lstrip": False})
    put(folder, "tokenizer_config.json", eos_token="</s>")
    assert text(folder) == reference(folder)
    assert "bos=<s>;\neos=</s>;\nunk=undefined;\npad=<pad>;" in text(folder)


def test_the_end_named_only_in_the_special_tokens_map_ends_a_completion(folder):
    put(folder, "special_tokens_map.json", eos_token="</s>")
    assert Tokenizer(folder).eos_tokens == (2,)


def test_the_special_tokens_map_is_out_of_use_where_all_tokens_are_listed(folder):
    put(folder, "special_tokens_map.json", bos_token="<s>")
    listed = {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    put(folder, "tokenizer_config.json", added_tokens_decoder={"1": {**listed, "special": True}})
    assert text(folder) == reference(folder)
    assert "bos=undefined;" in text(folder)


def test_tokens_with_names_of_the_models_own_are_there(folder):
    put(folder, "tokenizer_config.json", image_token="<unk>", add_bos_token=False)
    assert text(folder) == reference(folder)
    assert "image=<unk>;" in text(folder)
    put(folder, "tokenizer_config.json", image_token=None, extra_special_tokens={"image_token": "<pad>"})
    assert text(folder) == reference(folder)
    assert "image=<pad>;" in text(folder)


@pytest.mark.parametrize("name", ["Qwen2TokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", "Unheard"])
@pytest.mark.parametrize("said", [{}, {"eos_token": "</s>", "unk_token": None}], ids=["nothing", "something"])
def test_a_tokenizers_class_has_tokens_of_its_own(folder, name, said):
    put(folder, "tokenizer_config.json", tokenizer_class=name, **said)
    assert text(folder) == reference(folder)


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast"])
def test_a_folder_that_names_no_class_has_that_of_its_model(folder, model, name):
    put(folder, "config.json", model_type=model)
    put(folder, "tokenizer_config.json", tokenizer_class=name)
    assert text(folder) == reference(folder)


@pytest.mark.parametrize("name", sorted(CLASS_DEFAULTS))
def test_the_tokens_of_a_class_are_those_of_transformers(name):
    given = inspect.signature(getattr(transformers, name).__init__).parameters
    standard = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    wanted = {key: given[key].default for key in standard if key in given and given[key].default is not None}
    assert CLASS_DEFAULTS[name] == wanted


def test_a_sum_with_a_token_that_is_not_there_is_refused_as_in_transformers(folder):
    (folder / "chat_template.jinja").write_text("{{ bos_token + messages[0].content }}")
    with pytest.raises(Exception, match="bos_token"):
        reference(folder)
    with pytest.raises(ModelFolderError, match="bos_token"):
        text(folder)


# ── Several templates ────────────────────────────────────────────────────────────────────────────────────


def in_settings(folder: Path, **templates: str) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": name, "template": template} for name, template in templates.items()]
    put(folder, "tokenizer_config.json", chat_template=named)


def in_files(folder: Path, **templates: str) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    for name, template in templates.items():
        file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / file).write_text(template)


@pytest.mark.parametrize("kept", [in_settings, in_files])
def test_a_template_is_chosen_by_name_by_tools_or_by_default(folder, kept):
    kept(folder, default="plain", tool_use="tools {{ tools|length }}", rag="{{ documents[0].title }}")
    documents = [{"title": "A", "text": "a"}]
    assert text(folder) == reference(folder) == "plain"
    assert text(folder, tools=TOOLS) == reference(folder, tools=TOOLS) == "tools 1"
    assert text(folder, tools=[]) == reference(folder, tools=[]) == "tools 0"
    assert text(folder, name="default", tools=TOOLS) == reference(folder, chat_template="default", tools=TOOLS)
    found = reference(folder, chat_template="rag", documents=documents)
    assert text(folder, name="rag", documents=documents) == found == "A"


@pytest.mark.parametrize("kept", [in_settings, in_files])
def test_templates_without_a_default_are_chosen_by_name_alone(folder, kept):
    kept(folder, rag="rag", tool_use="tools")
    Tokenizer(folder).check(1000)
    assert text(folder, name="rag") == reference(folder, chat_template="rag") == "rag"
    assert text(folder, tools=TOOLS) == reference(folder, tools=TOOLS) == "tools"
    with pytest.raises(ValueError, match="no default"):
        reference(folder)
    with pytest.raises(ModelFolderError, match=r"one is the default.*'rag', 'tool_use'"):
        text(folder)


def test_files_outrank_the_templates_of_the_settings(folder):
    in_files(folder, default="file")
    put(folder, "tokenizer_config.json", chat_template=[{"name": "default", "template": "settings"}])
    assert text(folder) == reference(folder) == "file"


def test_a_name_that_no_template_has_is_refused_with_those_there_are(folder):
    in_settings(folder, default="plain", rag="rag")
    with pytest.raises(ModelFolderError, match=r"environment\.template\.name .*\(got 'rga'\); it has default, rag"):
        text(folder, name="rga")


def test_each_template_of_a_folder_is_looked_at(folder):
    in_settings(folder, default="plain", tool_use="{% if %}")
    with pytest.raises(ModelFolderError, match="must be a Jinja template"):
        Tokenizer(folder).check(1000)


def test_a_folder_with_very_many_templates_is_refused(folder):
    in_files(folder, **{f"t{number}": "" for number in range(65)})
    with pytest.raises(ModelFolderError, match="at most 64 templates"):
        Tokenizer(folder).check(1000)


# ── Variables and messages ───────────────────────────────────────────────────────────────────────────────


def test_variables_of_a_template_can_be_set_special_tokens_among_them(folder):
    (folder / "chat_template.jinja").write_text(
        "{% if enable_thinking is defined and enable_thinking is false %}quick{% endif %}"
        "{{ effort }}{{ bos_token }}"
    )
    variables = {"enable_thinking": False, "effort": ["low", 2], "bos_token": "B"}
    assert text(folder, variables=variables) == reference(folder, **variables) == "quick['low', 2]B"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_there_under_each_of_its_names(folder, name):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}/{{ m|tojson }}{% endfor %}"
    )
    talk = [*TALK, {"role": "assistant", name: "hm", "content": "Hi"}, {"role": "assistant", name: None}]
    assert text(folder, talk) == reference(folder, talk)
    assert "hm/hm/" in text(folder, talk)


@pytest.mark.parametrize("messages", [[], ["Hello"], [TALK]], ids=["none", "text", "a list"])
def test_what_is_no_conversation_is_refused_as_in_transformers(folder, messages):
    if messages != [TALK]:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            reference(folder, messages)
    with pytest.raises(ModelFolderError, match=r"a conversation has at least one message|a message is an object"):
        text(folder, messages)


def test_numbers_of_numpy_and_objects_with_fields_are_plain_values(folder):
    from dataclasses import dataclass

    @dataclass
    class Call:
        name: str
        arguments: dict[str, Any]

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"a": 1}

    (folder / "chat_template.jinja").write_text("{{ messages|tojson }}")
    talk = [{"role": "user", "n": np.float64(0.5), "b": np.bool_(False), "c": Call("f", {"x": 1}), "m": Model()}]
    assert text(folder, talk) == reference(folder, talk)


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict.fromkeys(['a', 'b'], 1) }}{{ dict(a=1) }}{{ dict.fromkeys('a') }}",
        "{{ 'a1'.isidentifier() }}{{ 'a '.isprintable() }}",
        "{{ messages|tojson(ensure_ascii=true) }}{{ messages|tojson(ensure_ascii=False, indent=2) }}"
        "{{ messages|tojson(separators=(',', ':'), sort_keys=true) }}{{ messages[0]|tojson(indent='  ') }}",
        "{% for m in messages %}{%- generation -%} {{ m.content }}{{ loop.index }}"
        " {%- endgeneration -%}{% endfor %}",
        "{% set s = 1 %}{% generation %}{% set s = 2 %}{{ s }}{% endgeneration %}{{ s }}",
    ],
    ids=["dict", "methods", "json", "generation", "scope"],
)
def test_functions_filters_and_tags_are_those_of_transformers(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    talk = [{"role": "user", "content": "Grüße <b>"}]
    assert text(folder, talk) == reference(folder, talk)
    assert len(text(folder, talk)) > 1

"""Folders that a stranger may have made: each fault is told with its file, soon, and in little memory."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "config"))

from folder_builders import LETTERS, write_model

from headrace.errors import ModelFolderError
from headrace.models import check_policy, load_model
from headrace.models.folder import check_files

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
Damage = Callable[[Path], object]


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def config(**changes: Any) -> Damage:
    return lambda folder: (folder / CONFIG).write_text(
        json.dumps({**json.loads((folder / CONFIG).read_text()), **changes})
    )


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        before = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(before[:8], "little")
        content = json.loads(before[8 : 8 + length])
        content = change(content) or content
        after = json.dumps(content).encode()
        (folder / WEIGHTS).write_bytes(len(after).to_bytes(8, "little") + after + before[8 + length :])

    return damage


def entry(**changes: Any) -> Damage:
    return header(lambda content: content["model.norm.weight"].update(changes))


def index(change: Callable[[dict[str, Any]], object], *, also: str | None = None) -> Damage:
    """Two shards, and what `change` makes of the map from tensors to them."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = {name: f"{'ab'[place % 2]}.safetensors" for place, name in enumerate(sorted(tensors))}
        for file in ("a.safetensors", "b.safetensors"):
            mine = {name: tensors[name] for name in tensors if names[name] == file or name == also}
            save_file(mine, folder / file)
        change(names)
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return damage


def tokenizer(**changes: Any) -> Damage:
    return lambda folder: (folder / TOKENIZER).write_text(
        json.dumps({**json.loads((folder / TOKENIZER).read_text()), **changes})
    )


def added(**token: Any) -> Damage:
    full = {"content": "z9", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return tokenizer(added_tokens=[{**full, "special": True, **token}])


def pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


ROPE = "rope_scaling"
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
EMBEDDING = "model.embed_tokens.weight"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

# What is done to a sound folder, and words that the error says.
CASES: dict[str, tuple[Damage, list[str]]] = {
    # config.json as a file
    "config: not UTF-8": (text(CONFIG, b'{"a": "\xff"}'), ["config.json must be UTF-8"]),
    "config: a byte order mark": (text(CONFIG, b"\xef\xbb\xbf{}"), ["config.json must be valid JSON", "BOM"]),
    "config: cut short": (text(CONFIG, '{"model_type": '), ["config.json must be valid JSON"]),
    "config: a list": (text(CONFIG, "[1, 2]"), ["config.json must hold a JSON object", "[1, 2]"]),
    "config: a key twice": (text(CONFIG, '{"a": 1, "b": 2, "a": 3}'), ["config.json", "'a' is there twice"]),
    "config: NaN": (text(CONFIG, '{"rms_norm_eps": NaN}'), ["config.json", "NaN is no number"]),
    "config: half a character": (text(CONFIG, '{"model_type": "\\ud800"}'), ["config.json must be valid JSON"]),
    "config: nested": (text(CONFIG, '{"a":' + "[" * 5000 + "]" * 5000 + "}"), ["config.json", "deeper than 64"]),
    "config: nested less": (text(CONFIG, '{"a":' + "[" * 70 + "]" * 70 + "}"), ["config.json", "deeper than 64"]),
    "config: a long integer": (
        text(CONFIG, '{"a": ' + "9" * 5000 + "}"),
        ["config.json must be valid JSON", "4300"],
    ),
    "config: many values": (
        text(CONFIG, '{"a":[' + "[]," * 600_000 + "0]}"),
        ["config.json must have at most 131072"],
    ),
    "config: large": (text(CONFIG, '"' + "a" * 3_000_000 + '"'), ["config.json must not exceed 2097152 bytes"]),
    "config: a pipe": (pipe(CONFIG), ["config.json must be a regular file"]),
    # config.json's values
    "family: none": (config(model_type=None), ["model_type must be a known architecture"]),
    "family: a list": (config(model_type=["qwen2"]), ["model_type must be a known architecture"]),
    "layers: two thousand million": (config(num_hidden_layers=2 * 10**9), ["num_hidden_layers", "2000000000"]),
    "layers: beyond an index": (config(num_hidden_layers=10**30), ["'num_hidden_layers'", "below 2^31"]),
    "layers: a text": (config(num_hidden_layers="1"), ["'num_hidden_layers'", "positive integer", "'1'"]),
    "layers: none": (config(num_hidden_layers=0), ["'num_hidden_layers'", "positive integer"]),
    "heads: more than the model is wide": (config(num_attention_heads=9), ["'head_dim'", "positive integer"]),
    "heads: shared unevenly": (
        config(num_attention_heads=4, num_key_value_heads=3),
        ["multiple of num_key_value_heads"],
    ),
    "head: odd": (config(head_dim=3), ["head_dim must be even"]),
    "vocabulary: larger than the weights": (config(vocab_size=10**9), [EMBEDDING, "must have the shape"]),
    "vocabulary: a truth": (config(vocab_size=True), ["'vocab_size'", "positive integer"]),
    "width: negative": (config(hidden_size=-8), ["'hidden_size'", "positive integer"]),
    "width: another": (config(intermediate_size=17), ["must have the shape (17, 8)"]),
    "eps: zero": (config(rms_norm_eps=0), ["rms_norm_eps must be a number from", "to 1"]),
    "eps: negative": (config(rms_norm_eps=-1e-6), ["rms_norm_eps must be a number"]),
    "eps: none in float32": (config(rms_norm_eps=1e-300), ["rms_norm_eps must be a number"]),
    "eps: a text": (config(rms_norm_eps="1e-6"), ["rms_norm_eps must be a number"]),
    "eps: infinite": (text(CONFIG, '{"model_type":"qwen2","rms_norm_eps":1e999}'), ["config.json needs"]),
    "theta: zero": (config(rope_theta=0), ["rope_theta must be a number from 1.001"]),
    "theta: an object": (config(rope_theta={}), ["rope_theta must be a number"]),
    "rope: a text": (config(**{ROPE: "yarn"}), ["rope_scaling must be an object"]),
    "rope: a list as type": (config(**{ROPE: {"rope_type": []}}), ["rope_type must be a known one"]),
    "rope: no factor": (config(**{ROPE: {"rope_type": "linear", "factor": 0}}), ["factor must be a number from"]),
    "rope: equal frequencies": (
        config(**{ROPE: {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}),
        ["low_freq_factor must be below high_freq_factor"],
    ),
    "rope: factors of texts": (
        config(**{ROPE: {"rope_type": "longrope", "short_factor": ["a", 1], "long_factor": [1, 1]}}),
        ["each number of short_factor"],
    ),
    "rope: too few factors": (
        config(**{ROPE: {"rope_type": "longrope", "short_factor": [1], "long_factor": [1, 1]}}),
        ["short_factor must have one number per rotated pair"],
    ),
    "rope: a window of text": (
        config(**{ROPE: {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}}),
        ["original_max_position_embeddings must be a positive integer"],
    ),
    "tie: a text": (config(tie_word_embeddings="false"), ["tie_word_embeddings must be true or false"]),
    "dtype: a number": (config(dtype=16), ["dtype must be one of float32"]),
    "dtype: of integers": (config(torch_dtype="int8"), ["torch_dtype must be one of float32"]),
    "layer types: a number": (config(layer_types=1), ["layer_types must be a list of 1"]),
    "layer types: too many": (config(layer_types=["full_attention"] * 2), ["layer_types must be a list of 1"]),
    "window: a text": (
        config(use_sliding_window=True, max_window_layers="x"),
        ["max_window_layers must be an integer"],
    ),
    "eos: beyond the vocabulary": (config(eos_token_id=len(LETTERS)), ["eos_token_id of config.json", "below"]),
    "eos: a list of texts": (config(eos_token_id=["x"]), ["eos_token_id of config.json must be a token id"]),
    "bos: a list": (config(bos_token_id=[1]), ["bos_token_id must be one token id"]),
    "bos: negative": (config(bos_token_id=-1), ["bos_token_id of config.json must be a token id"]),
    # model.safetensors
    "header: longer than the file": (text(WEIGHTS, b"\xff" * 8 + b"{}"), ["model.safetensors is truncated"]),
    "header: longer than any": (
        text(WEIGHTS, (3_000_000).to_bytes(8, "little") + b" " * 3_000_000),
        ["headers of all weight files", "model.safetensors"],
    ),
    "header: a list": (header(lambda content: [1]), ["header of model.safetensors must hold a JSON object"]),
    "header: an entry that is none": (
        header(lambda content: content.update(x=3)),
        ["model.safetensors: the header entry of 'x'", "dtype, shape and data_offsets"],
    ),
    "header: a dtype that is a list": (entry(dtype=["F32"]), ["model.safetensors", "known dtype"]),
    "header: a shape of texts": (entry(shape=["8"]), ["model.safetensors", "shape of up to eight sizes"]),
    "header: a negative shape": (entry(shape=[-8]), ["model.safetensors", "shape of up to eight sizes"]),
    "header: offsets backwards": (entry(data_offsets=[32, 0]), ["model.safetensors", "data_offsets, in order"]),
    "header: offsets too close": (
        entry(shape=[9]),
        ["model.safetensors", "as far apart as F32 of its shape needs"],
    ),
    "header: a product beyond all": (entry(shape=[2**62, 2**62]), ["model.safetensors", "as far apart as"]),
    "header: tensors over each other": (
        header(
            lambda content: content.update({"model.norm.weight": content["model.layers.0.input_layernorm.weight"]})
        ),
        ["model.safetensors"],
    ),
    "weights: another dtype": (
        header(lambda content: content["model.norm.weight"].update(dtype="I32")),
        ["model.norm.weight must be one of F64"],
    ),
    # The index
    "index: leads out": (
        index(lambda names: names.update({EMBEDDING: "../model/a.safetensors"})),
        ["model.safetensors.index.json must name files of its own folder", "'../model/a.safetensors'"],
    ),
    "index: an absolute path": (
        index(lambda names: names.update({EMBEDDING: "/etc/a.safetensors"})),
        ["model.safetensors.index.json must name files of its own folder"],
    ),
    "index: a number": (
        index(lambda names: names.update({EMBEDDING: 3})),
        ["model.safetensors.index.json must name files of its own folder"],
    ),
    "index: another file": (
        index(lambda names: names.update({EMBEDDING: "config.json"})),
        ["model.safetensors.index.json must name files of its own folder"],
    ),
    "index: a shard that is not there": (
        index(lambda names: names.update({EMBEDDING: "c.safetensors"})),
        ["every shard that model.safetensors.index.json names must be there", "'c.safetensors'"],
    ),
    "index: a tensor in a shard without it": (
        index(lambda names: names.update({EMBEDDING: "a.safetensors"})),
        ["model.safetensors.index.json and", "must agree", EMBEDDING],
    ),
    "index: a tensor in two shards": (
        index(lambda names: None, also=EMBEDDING),
        ["model.safetensors.index.json and a.safetensors must agree", f"the file holds {EMBEDDING}"],
    ),
    # The tokenizer
    "tokenizer: missing": (lambda folder: (folder / TOKENIZER).unlink(), ["has a tokenizer.json"]),
    "tokenizer: not UTF-8": (text(TOKENIZER, b'{"a": "\xff"}'), ["tokenizer.json must be a tokenizer"]),
    "tokenizer: empty": (text(TOKENIZER, "{}"), ["tokenizer.json must be a tokenizer"]),
    "tokenizer: nested": (text(TOKENIZER, "[" * 9999), ["tokenizer.json must be a tokenizer"]),
    "tokenizer: many values": (
        text(TOKENIZER, '{"a":[' + "[]," * 999_999 + "0]}"),
        ["tokenizer.json must have at most 12 values for each"],
    ),
    "tokenizer: an id beyond the model's": (
        tokenizer(model={"type": "WordLevel", "vocab": {"<eos>": 0, "b": 10**9}, "unk_token": "<eos>"}),
        ["every token of tokenizer.json must be below the model's vocabulary", "1000000000"],
    ),
    "tokenizer: a text doubled forty times": (
        tokenizer(normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 40}),
        ["the normalizer of tokenizer.json must not make texts more than 4096 times as long", "1.1e+12 times"],
    ),
    "tokenizer: an answer doubled forty times": (
        tokenizer(decoder={"type": "Sequence", "decoders": [DOUBLING] * 40}),
        ["the decoder of tokenizer.json must not make texts more than 4096 times as long"],
    ),
    "tokenizer: a negative id": (
        tokenizer(model={"type": "WordLevel", "vocab": {"<eos>": -1}, "unk_token": "<eos>"}),
        ["tokenizer.json must be a tokenizer"],
    ),
    "tokenizer: no tokens": (
        tokenizer(model={"type": "WordLevel", "vocab": {}, "unk_token": "<eos>"}, added_tokens=[]),
        ["tokenizer.json must have tokens"],
    ),
    "tokenizer: an added token beyond": (
        added(id=len(LETTERS)),
        ["every token of tokenizer.json must be below the model's vocabulary"],
    ),
    "settings: a list": (text(SETTINGS, "[]"), ["tokenizer_config.json must hold a JSON object"]),
    "settings: an end that is a number": (
        text(SETTINGS, '{"eos_token": 7}'),
        ["eos_token of tokenizer_config.json"],
    ),
    "settings: half a character": (
        text(SETTINGS, '{"eos_token": "\\udfff"}'),
        ["tokenizer_config.json must be valid"],
    ),
    "settings: an empty object": (text(SETTINGS, '{"eos_token": {}}'), ["eos_token of tokenizer_config.json"]),
    "settings: a template of numbers": (
        text(SETTINGS, '{"chat_template": 7}'),
        ["chat_template of tokenizer_config.json must be a text"],
    ),
    "special tokens: not JSON": (
        text("special_tokens_map.json", "x"),
        ["special_tokens_map.json must be valid JSON"],
    ),
    "special tokens: a number": (
        text("special_tokens_map.json", '{"pad_token": 3}'),
        ["pad_token of special_tokens_map.json"],
    ),
    "generation: not JSON": (text("generation_config.json", "{"), ["generation_config.json must be valid JSON"]),
    "generation: an end beyond": (
        text("generation_config.json", '{"eos_token_id": [0, 99]}'),
        ["eos_token_id must be below the model's vocabulary of 40", "99"],
    ),
    "generation: an end that is a truth": (
        text("generation_config.json", '{"eos_token_id": true}'),
        ["eos_token_id of generation_config.json must be a token id"],
    ),
    # The chat template
    "template: not UTF-8": (text(TEMPLATE, b"\xff"), ["chat_template.jinja must be UTF-8"]),
    "template: not Jinja": (text(TEMPLATE, "{% for %}"), ["chat_template.jinja must be a Jinja template"]),
    "template: nested": (
        text(TEMPLATE, "{{" + "(" * 9000 + "}}"),
        ["chat_template.jinja must be a Jinja template"],
    ),
    "template: large": (text(TEMPLATE, "x" * 70_000), ["chat_template.jinja must not exceed 65536 characters"]),
    "template: long code": (
        text(TEMPLATE, "{{ " + "a ~ " * 9000 + "a }}"),
        ["chat_template.jinja must be a Jinja template", "more than 8192 words"],
    ),
    "template: endless": (text(TEMPLATE, LOOPS), ["chat_template.jinja must render within 2000000 steps"]),
    "template: fails": (
        text(TEMPLATE, "{{ messages[0].a.b }}"),
        ["chat_template.jinja must render these messages"],
    ),
    "template: refuses": (
        text(TEMPLATE, "{{ raise_exception('nobody') }}"),
        ["chat_template.jinja refuses these messages", "nobody"],
    ),
    "template: a pipe": (pipe(TEMPLATE), ["chat_template.jinja must be a regular file"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("case", CASES)
def test_a_fault_of_a_folder_is_told_with_its_place_within_two_seconds(folder: Path, case: str) -> None:
    check_policy(folder)
    damage, words = CASES[case]
    damage(folder)
    begun = time.thread_time()
    with pytest.raises(ModelFolderError) as caught:
        check_policy(folder)
    assert time.thread_time() - begun < 2
    said = str(caught.value)
    for word in words:
        assert word in said
    assert caught.value.exit_code == 2
    assert len(said) < 900


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_no_number_is_refused_by_name(folder: Path, value: float, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / WEIGHTS)
    tensors[name][3, 1] = value
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelFolderError, match="all weights must be finite") as caught:
        load_model(folder, dtype=dtype)
    assert caught.value.value == f"{name} in model.safetensors is not"


def test_weights_whose_sum_alone_is_infinite_are_accepted(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][:] = 3e38
    save_file(tensors, folder / WEIGHTS)
    assert load_model(folder).model.norm.weight.tolist() == [pytest.approx(3e38)] * 8


def test_a_weight_beyond_the_asked_type_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, folder / WEIGHTS)
    assert load_model(folder).model.norm.weight[0] == 1e6
    with pytest.raises(ModelFolderError, match="finite numbers in float16"):
        load_model(folder, dtype=torch.float16)


def test_a_folder_of_links_as_in_the_hubs_cache_is_accepted(folder: Path, tmp_path: Path) -> None:
    links = tmp_path / "snapshot"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    assert check_policy(links).vocab_size == len(LETTERS)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            config(num_hidden_layers=2 * 10**9),
            "num_hidden_layers of config.json must be at most the number of tensors",
        ),
        (text(CONFIG, "[]"), "config.json must hold a JSON object"),
        (entry(shape=[9]), "as far apart as F32"),
    ],
)
def test_a_folder_for_transformers_is_checked_as_far_as_can_be(folder: Path, damage: Damage, words: str) -> None:
    config(model_type="gpt_neox")(folder)
    check_files(folder)
    damage(folder)
    with pytest.raises(ModelFolderError, match=words):
        check_files(folder)


def test_a_long_or_deep_value_is_quoted_in_part() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, list(range(10**6)), deep, dict.fromkeys(range(1000), "y" * 1000), 10**4000):
        error = ModelFolderError("a rule", value, "a remedy")
        assert 10 < len(str(error)) < 300
    while deep:
        deep = deep[0]
    assert ModelFolderError("a rule", [1, "two"]).value == [1, "two"]

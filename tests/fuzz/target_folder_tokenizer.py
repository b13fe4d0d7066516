"""A model folder's tokenizer, its settings, special tokens and token ids. What is accepted encodes and decodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import folder_inputs
from folder_builders import LETTERS

from headrace.errors import ModelFolderError
from headrace.tokenizer import Tokenizer

declared = (ModelFolderError,)
longest = folder_inputs.LONGEST
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
)
dictionary = (
    b'"padding":{"strategy":{"Fixed":1000000000000},"direction":"Right","pad_id":0,"pad_type_id":0,"pad_token":"x"}',
    b'"truncation":{"direction":"Right","max_length":0,"strategy":"LongestFirst","stride":9}',
    b'"type":"BPE"',
    b'"type":"Unigram"',
    b'"type":"WordPiece"',
    b'"id":4294967295',
    b'"id":-1',
    b"NaN",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b'{"Regex":"(a+)+$"}',
    b'"normalizer":{"type":"NFKC"}',
    b'"unk_id":7',
    b'"byte_fallback":true',
    b'"decoder":{"type":"ByteLevel"}',
    b'"post_processor":{"type":"ByteLevel"}',
    b"[" * 200,
)


@contextmanager
def session() -> Iterator[None]:
    global _folder
    with folder_inputs.folders("folder") as (_folder,):
        yield


_folder = Path()


def corpus() -> list[bytes]:
    with folder_inputs.folders("folder") as (folder,):
        contents = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).exists()}
    settings = {"eos_token": "<eos>", "bos_token": {"content": "a"}, "chat_template": "{{ messages[0].content }}"}
    contents["tokenizer_config.json"] = json.dumps(settings).encode()
    contents["special_tokens_map.json"] = b'{"eos_token": "<eos>", "pad_token": {"content": "a", "lstrip": false}}'
    contents["generation_config.json"] = b'{"eos_token_id": [0, 3]}'
    return [*(bytes([_FILES.index(name)]) + content for name, content in contents.items()), *_kinds()]


def _kinds() -> list[bytes]:
    """A tokenizer.json of each kind, with all parts that it may have."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = {letter: place for place, letter in enumerate(LETTERS)}
    found = []
    for model in (
        models.BPE({**words, "ab": len(LETTERS)}, [("a", "b")], byte_fallback=True, unk_token="<eos>"),
        models.WordPiece(words, unk_token="<eos>"),
        models.Unigram([(letter, -1.0) for letter in LETTERS], 0, False),
    ):
        backend = Tokenizer(model)
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace("+", "="), normalizers.Strip()]
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()]
        )
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
        backend.add_special_tokens([AddedToken("<eos>", lstrip=True, normalized=False)])
        backend.enable_padding(length=8)
        backend.enable_truncation(4)
        found.append(b"\0" + backend.to_str().encode())
    return found


def run(data: bytes) -> None:
    name, content = folder_inputs.choose(data, _FILES)
    with folder_inputs.exchanged(_folder / name, content):
        tokenizer = Tokenizer(_folder, len(LETTERS))
        tokenizer.check(len(LETTERS))
        tokens = tokenizer.encode("1+1= two", special=True)
        assert all(0 <= token < len(LETTERS) for token in tokens), "a token that the model does not have"
        tokenizer.decode([*tokens, 0, len(LETTERS) - 1])


def mutate(data: bytes, random: Random) -> bytes:
    return folder_inputs.changed_json(data, random, dictionary)

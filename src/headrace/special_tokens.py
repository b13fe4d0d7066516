"""The special tokens that have a name, as transformers' `special_tokens_map` gives them to chat templates.

They come from tokenizer_config.json, from special_tokens_map.json where folders of before still need it, and where
neither names one from the class of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelFolderError

SETTINGS, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ENDOFTEXT = "<|endoftext|>"

CLASS_DEFAULTS: dict[str, dict[str, str]] = {
    "CodeLlamaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
    "CohereTokenizer": {
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": {"unk_token": _ENDOFTEXT, "bos_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT},
    "GPTNeoXTokenizer": {
        "unk_token": _ENDOFTEXT,
        "bos_token": _ENDOFTEXT,
        "eos_token": _ENDOFTEXT,
        "pad_token": "<|padding|>",
    },
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {"unk_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT, "pad_token": _ENDOFTEXT},
}
"""Of the classes that language models which chat have: the tokens that they have where nothing else is said."""
_CLASS_OF_MODEL = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer"}
"""The class of a folder that does not name one, by config.json's model_type."""


def named_tokens(settings: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, str | None]:
    """What tokenizer_config.json and special_tokens_map.json name; None where they say that there is no such token.

    Raises ModelFolderError for a token that is no text.
    """
    found = _texts(settings, SETTINGS)
    more = _texts(special, SPECIAL_TOKENS)
    # Since a tokenizer_config.json lists its tokens in full, the other file is out of use.
    return found if "added_tokens_decoder" in settings else {**found, **more}


def class_defaults(
    settings: Mapping[str, Any], config: Mapping[str, Any], *, byte_level: bool
) -> Mapping[str, str]:
    """What the tokenizer's class adds where no file says anything. `config` is the model's."""
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    model = str(config.get("model_type"))
    name = str(named or _CLASS_OF_MODEL.get(model)).removesuffix("Fast")
    if name == "LlamaTokenizer" and byte_level:
        # Tokens of Llama 3 are bytes, and its folders still name the class of those before.
        return {}
    return CLASS_DEFAULTS.get("Qwen2Tokenizer" if model == "qwen2" else name, {})


def _texts(settings: Mapping[str, Any], name: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    extra = settings.get("extra_special_tokens")
    for key, value in {**settings, **(extra if isinstance(extra, dict) else {})}.items():
        named = key in _NAMED
        if not named and not key.endswith("_token") and not (isinstance(extra, dict) and key in extra):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) or (named and value is None):
            found[key] = text
        elif named:
            raise ModelFolderError(
                f"{key} of {name} must be a text, or an object with its content", value, f"correct {name}"
            )
    return found

"""A tiny but complete model folder, a task file and a configuration that is in order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from headrace.models.config import ModelConfig
from headrace.models.shapes import parameter_shapes

LETTERS = ["<eos>", *"0123456789+= abcdefghijklmnopqrstuvwxyz"]

MODEL = {
    "model_type": "qwen2",
    "vocab_size": len(LETTERS),
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 0,
}


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    shapes = parameter_shapes(ModelConfig.from_hf(MODEL))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({letter: place for place, letter in enumerate(LETTERS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_project(root: Path) -> Path:
    """A folder with model/, tasks.jsonl and run.toml, all in order. Returns run.toml."""
    write_model(root / "model")
    (root / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = root / "run.toml"
    config.write_text(
        f'[model]\npath = "{root / "model"}"\n\n[tasks]\ntype = "jsonl"\npath = "{root / "tasks.jsonl"}"\n'
    )
    return config

"""A model folder's config.json, headers and index. What is accepted is loaded, and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import folder_inputs
import torch
from folder_builders import MODEL
from safetensors.torch import load_file, save_file

from headrace.errors import InputError, ModelFolderError
from headrace.models import PackedContext, load_model

declared = (ModelFolderError,)
longest = folder_inputs.LONGEST
_INDEX = "model.safetensors.index.json"
_KINDS = ("config", "sharded config", "header", "index", "weights")
dictionary = (
    b'"dtype":"F32"',
    b'"shape":[',
    b'"data_offsets":[',
    b"NaN",
    b"Infinity",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"1e999",
    b'"model_type":"llama"',
    b'"rope_scaling":{"type":"yarn","factor":2}',
    b"[" * 200,
    b'"a.safetensors"',
    b"../",
    (2**63).to_bytes(8, "little"),
    (100).to_bytes(8, "little"),
    b"9" * 30,
)


@contextmanager
def session() -> Iterator[None]:
    global _single, _sharded
    torch.set_num_threads(1)
    with _folders() as (_single, _sharded):
        # torch loads more of itself when it makes its first model.
        load_model(_single)
        yield


@contextmanager
def _folders() -> Iterator[list[Path]]:
    """One with a single file, and one of two shards with an index."""
    with folder_inputs.folders("single", "sharded") as (single, sharded):
        tensors = load_file(sharded / "model.safetensors")
        (sharded / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: f"{'ab'[place % 2]}.safetensors" for place, name in enumerate(names)}
        for file in ("a.safetensors", "b.safetensors"):
            save_file({name: tensors[name] for name in names if files[name] == file}, sharded / file)
        (sharded / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
        yield [single, sharded]


_single = _sharded = Path()


def corpus() -> list[bytes]:
    with _folders() as (single, sharded):
        weights = (single / "model.safetensors").read_bytes()
        header = weights[8 : 8 + int.from_bytes(weights[:8], "little")]
        index = (sharded / _INDEX).read_bytes()
    config = json.dumps(MODEL).encode()
    scaled = []
    for rope in (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32},
        {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
    ):
        scaled.append(json.dumps({**MODEL, "rope_scaling": rope}).encode())
    return [
        *(bytes([kind]) + content for kind in (0, 1) for content in (config, *scaled)),
        b"\2" + header,
        b"\3" + index,
        b"\4" + weights,
    ]


def run(data: bytes) -> None:
    kind, content = folder_inputs.choose(data, _KINDS)
    if kind == "config":
        folder, file = _single, "config.json"
    elif kind == "sharded config":
        folder, file = _sharded, "config.json"
    elif kind == "index":
        folder, file = _sharded, _INDEX
    else:
        folder, file = _single, "model.safetensors"
        if kind == "header":
            before = (folder / file).read_bytes()
            length = int.from_bytes(before[:8], "little")
            content = len(content).to_bytes(8, "little") + content + before[8 + length :]
    with folder_inputs.exchanged(folder / file, content):
        model = load_model(folder)
        tokens = torch.tensor([1, 2, 3])
        context = PackedContext([3])
        try:
            hidden = model(tokens, context.positions, context)
        except InputError:
            # Longer than its positions are good for.
            return
        assert torch.isfinite(hidden).all(), "a folder that was accepted computes what is no number"


def mutate(data: bytes, random: Random) -> bytes:
    return folder_inputs.changed_json(data, random, dictionary)

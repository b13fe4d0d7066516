"""Is this folder a model that can be loaded? Answered from headers alone, before anything heavy starts.

No torch, no weights: config.json, the index, each safetensors header and each file's size.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from headrace.errors import ModelFolderError
from headrace.models.config import ModelConfig
from headrace.models.shapes import HEAD, parameter_shapes

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
# Old Llama checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED_TENSOR = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def check_folder(path: str | Path) -> ModelConfig:
    """The folder's configuration, once it is certain that its files hold exactly that model.

    Raises ModelFolderError with the first rule broken. Reads only headers: milliseconds, whatever the size.
    """
    folder = Path(path)
    config = read_config(folder)
    _check_tensors(config, _read_headers(folder))
    return config


def read_config(folder: Path) -> ModelConfig:
    """Parse config.json alone; the weights may be missing."""
    if not folder.exists():
        raise ModelFolderError(
            "a model folder must exist", str(folder), "check the path, or download the model there"
        )
    if not folder.is_dir():
        raise ModelFolderError(
            "a model must be a folder, not a file", str(folder), "give the folder that holds config.json"
        )
    if not any(folder.iterdir()):
        raise ModelFolderError("a model folder must not be empty", str(folder), "download or save the model there")
    if not (folder / CONFIG_FILE).is_file():
        raise ModelFolderError(
            f"a model folder must hold a {CONFIG_FILE}",
            str(folder),
            "give the folder of a Hugging Face model itself; a save that was cut short also lacks this file",
        )
    return ModelConfig.from_hf(_read_json(folder / CONFIG_FILE))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in name order; each is certain to exist."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        raise ModelFolderError(
            f"a model folder must hold {SINGLE_FILE} or {INDEX_FILE}",
            pickled or sorted(file.name for file in folder.iterdir()),
            "convert the weights to safetensors (transformers: save_pretrained)"
            if pickled
            else "download the weights",
        )
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(
            f"{INDEX_FILE} must map each tensor to its file", weight_map, "download or save the model again"
        )
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelFolderError(
            f"every shard that {INDEX_FILE} names must be there", missing, "download the missing files"
        )
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFolderError(
            f"{file.name} must be valid JSON", str(error), f"repair or replace {file}"
        ) from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{file.name} must hold a JSON object", content, f"repair or replace {file}")
    return content


def _read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Every tensor's header entry, over all files."""
    tensors: dict[str, dict[str, Any]] = {}
    for file in weight_files(folder):
        tensors |= _read_header(file)
    return tensors


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    size = file.stat().st_size
    again = "download or save this file again"
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ModelFolderError(
                f"{file.name} is truncated: its header's length is missing", f"{size} bytes", again
            )
        (header_length,) = struct.unpack("<Q", prefix)
        if header_length > size - 8:
            raise ModelFolderError(
                f"{file.name} is truncated: its header alone needs {header_length} bytes",
                f"{size} bytes",
                again,
            )
        try:
            header = json.loads(stream.read(header_length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise ModelFolderError(f"{file.name} must have a safetensors header", str(error), again) from error
    expected = 8 + header_length + end
    if size != expected:
        fault = "truncated" if size < expected else "longer than its header says"
        raise ModelFolderError(f"{file.name} is {fault}: its tensors need {expected} bytes", f"{size} bytes", again)
    return tensors


def _check_tensors(config: ModelConfig, tensors: dict[str, dict[str, Any]]) -> None:
    wanted = parameter_shapes(config)
    missing = [name for name in wanted if name not in tensors]
    if missing == [HEAD]:
        raise ModelFolderError(
            "an untied model must have its own output head",
            HEAD,
            "set tie_word_embeddings to true in config.json if its head is the embedding",
        )
    if missing:
        raise ModelFolderError(
            "the weights must hold every tensor of the configuration",
            _some(missing),
            "these are missing: download the model again, or correct config.json",
        )
    unexpected = [name for name in tensors if name not in wanted and not is_redundant(name, config)]
    if unexpected:
        raise ModelFolderError(
            "the weights must hold only tensors of the configuration",
            _some(unexpected),
            "these belong to another model: correct config.json, or merge adapters first",
        )
    for name, shape in wanted.items():
        found = tensors[name]
        if tuple(found["shape"]) != shape:
            raise ModelFolderError(
                f"{name} must have the shape {shape}",
                tuple(found["shape"]),
                "config.json and the weights belong to different models",
            )
        if found["dtype"] not in _FLOAT_DTYPES:
            raise ModelFolderError(
                f"{name} must be one of {', '.join(_FLOAT_DTYPES)}", found["dtype"], "use unquantised weights"
            )


def is_redundant(name: str, config: ModelConfig) -> bool:
    """A tensor that some checkpoints hold although the model does without it."""
    return (name == HEAD and config.tie_embeddings) or _DERIVED_TENSOR.fullmatch(name) is not None


def _some(names: list[str], limit: int = 5) -> list[str]:
    shown = names[:limit]
    return shown if len(names) <= limit else [*shown, f"… and {len(names) - limit} more"]

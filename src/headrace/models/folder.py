"""Is this folder a model that can be run? Answered from headers and small files, before anything heavy starts.

No torch, no weights: config.json, the index, each safetensors header and each file's size; for a policy also what
belongs to its tokenizer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headrace.errors import ModelFolderError
from headrace.model_files import read_object
from headrace.models.config import ModelConfig
from headrace.models.shapes import HEAD, parameter_shapes
from headrace.models.tensor_files import INDEX_FILE, SINGLE_FILE, StoredTensor, some, stored_tensors, weight_files
from headrace.tokenizer import Tokenizer

__all__ = [
    "CONFIG_FILE",
    "INDEX_FILE",
    "SINGLE_FILE",
    "check_files",
    "check_folder",
    "check_policy",
    "is_redundant",
    "read_config",
    "weight_files",
]

CONFIG_FILE = "config.json"
_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
# Old Llama checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED_TENSOR = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_TENSORS_OF_A_LAYER = 9
_FEW_LAYERS = 64
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def check_policy(path: str | Path) -> ModelConfig:
    """What `check_folder` gives, once it is also certain that the tokenizer is there and fits the model."""
    config = check_folder(path)
    Tokenizer(path, config.vocab_size).check(config.vocab_size)
    return config


def check_folder(path: str | Path) -> ModelConfig:
    """The folder's configuration, once it is certain that its files hold exactly that model.

    Raises ModelFolderError with the first rule broken. Reads only headers: milliseconds, whatever the size.
    """
    folder = Path(path)
    config = read_config(folder)
    _check_tensors(config, stored_tensors(folder))
    return config


def check_files(path: str | Path) -> None:
    """The same for a model of any architecture that `transformers` is to run, as far as can be told without it."""
    folder = Path(path)
    raw = _raw_config(folder)
    held = len(stored_tensors(folder))
    for key in _LAYER_KEYS:
        layers = raw.get(key)
        if layers is not None and (type(layers) is not int or not 0 < layers <= held):
            raise ModelFolderError(
                f"{key} of {CONFIG_FILE} must be at most the number of tensors, {held}",
                layers,
                "correct config.json",
            )


def read_config(folder: Path) -> ModelConfig:
    """Parse config.json alone; the weights may be missing."""
    return ModelConfig.from_hf(_raw_config(folder))


def _raw_config(folder: Path) -> dict[str, Any]:
    try:
        raw = read_object(folder / CONFIG_FILE)
        if raw is not None:
            return raw
        if not folder.exists():
            raise ModelFolderError("a model folder must exist", str(folder), _how_to_get(folder))
        if not folder.is_dir():
            raise ModelFolderError(
                "a model must be a folder, not a file", str(folder), "give the folder that holds config.json"
            )
        if not any(folder.iterdir()):
            raise ModelFolderError(
                "a model folder must not be empty",
                str(folder),
                "download or save the model there: config.json, safetensors, tokenizer.json",
            )
    except OSError as error:
        raise ModelFolderError(
            "a model folder must be readable", str(error), "check the path and its rights"
        ) from error
    raise ModelFolderError(f"a model folder must hold a {CONFIG_FILE}", str(folder), _what_it_is_instead(folder))


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _how_to_get(folder: Path) -> str:
    name = str(folder)
    if _HUB_NAME.fullmatch(name) is None:
        return "check the path, or download the model there"
    return (
        f"for the model of that name on the hub: hf download {name} --local-dir {folder.name}, and name that folder"
    )


def _what_it_is_instead(folder: Path) -> str:
    names = {file.name for file in folder.iterdir()}
    if "adapter_config.json" in names:
        return "this is an adapter: merge it into its base model, and save that (peft: merge_and_unload)"
    if any(name.endswith(".gguf") for name in names):
        return "GGUF files are for other programs: download the model they were made of, in safetensors"
    return "give the folder of a Hugging Face model itself; a save that was cut short also lacks this file"


def _check_tensors(config: ModelConfig, tensors: dict[str, StoredTensor]) -> None:
    if config.num_layers > max(_FEW_LAYERS, len(tensors) // _TENSORS_OF_A_LAYER):
        # The names of what is missing could fill the memory.
        raise ModelFolderError(
            f"num_hidden_layers of {CONFIG_FILE} must be that of the weights, which are {len(tensors)} tensors",
            config.num_layers,
            "config.json and the weights belong to different models",
        )
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
            some(missing),
            "these are missing: download the model again, or correct config.json",
        )
    unexpected = [name for name in tensors if name not in wanted and not is_redundant(name, config)]
    if unexpected:
        raise ModelFolderError(
            "the weights must hold only tensors of the configuration",
            some(unexpected),
            "these belong to another model: correct config.json, or merge adapters first",
        )
    if HEAD in tensors and config.tie_embeddings:
        wanted[HEAD] = (config.vocab_size, config.hidden_size)
    for name, shape in wanted.items():
        found = tensors[name]
        if found.shape != shape:
            raise ModelFolderError(
                f"{name} must have the shape {shape}",
                found.shape,
                "config.json and the weights belong to different models",
            )
        if found.dtype not in _FLOAT_DTYPES:
            raise ModelFolderError(
                f"{name} must be one of {', '.join(_FLOAT_DTYPES)}", found.dtype, "use unquantised weights"
            )


def is_redundant(name: str, config: ModelConfig) -> bool:
    """A tensor that some checkpoints hold although the model does without it."""
    return (name == HEAD and config.tie_embeddings) or _DERIVED_TENSOR.fullmatch(name) is not None

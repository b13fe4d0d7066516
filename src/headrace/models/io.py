"""Models from and to Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace.errors import ModelFolderError
from headrace.models import tensor_files
from headrace.models.config import ModelConfig
from headrace.models.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    check_folder,
    is_redundant,
    weight_files,
)
from headrace.models.ops import Ops
from headrace.models.shapes import EMBEDDING, HEAD, parameter_shapes
from headrace.models.transformer import CausalLM

MAX_SHARD_BYTES = 5 * 10**9


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
) -> CausalLM:
    """The folder's model, its weights cast to `dtype` on `device`. The folder is checked first.

    The weights are copied out of the files, which may be replaced or deleted afterwards.
    """
    config = check_folder(folder)
    state: dict[str, Tensor] = {}
    for file in weight_files(Path(folder)):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (the file is no mapping)
                    if name == HEAD or not is_redundant(name, config):
                        state[name] = tensors.get_tensor(name).to(device=device, dtype=dtype, copy=True)
                        refuse_non_finite(name, state[name], file.name)
        except (OSError, SafetensorError) as error:
            # It was sound a moment ago.
            raise ModelFolderError(f"{file.name} must be readable as safetensors", str(error)) from error
    if config.tie_embeddings and HEAD in state and not torch.equal(state.pop(HEAD), state[EMBEDDING]):
        raise ModelFolderError(
            "a tied model's head must equal its embedding",
            HEAD,
            "set tie_word_embeddings to false in config.json to use the head that is stored",
        )
    return _model_of(config, state, ops)


def random_model(
    config: ModelConfig,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
) -> CausalLM:
    """A fresh model: matrices normal with `initializer_range`, norms one, biases zero.

    Drawn on the CPU in float32, so a seed gives the same weights on every device, up to the cast.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 2:
            drawn = torch.empty(shape, device="cpu").normal_(0.0, config.initializer_range, generator=generator)
        else:
            drawn = torch.zeros(shape, device="cpu") if name.endswith(".bias") else torch.ones(shape, device="cpu")
        state[name] = drawn.to(device=device, dtype=dtype)
    return _model_of(config, state, ops)


def save_model(
    model_or_state: nn.Module | Mapping[str, Tensor],
    config: ModelConfig,
    folder: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and the weights as safetensors, in shards with an index where one file is too big.
    They are written in `dtype`; None: each in its own.

    Replaces a model saved in that folder before; other files there stay. config.json is written last, so a
    save that was cut short is refused by `check_folder`. A caller that needs the folder to appear whole or
    not at all saves into a temporary one beside it and renames that.
    """
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    wanted = parameter_shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in state.items() if not is_redundant(name, config)}
    if found != wanted:
        different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise ModelFolderError(
            "the tensors saved must be exactly those of the configuration",
            different[:5],
            "merge and unload adapters before saving, or save with the model's own configuration",
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (CONFIG_FILE, SINGLE_FILE, INDEX_FILE):
        (folder / stale).unlink(missing_ok=True)
    for shard in folder.glob("model-*-of-*.safetensors"):
        shard.unlink()

    sizes = {name: state[name].numel() * (dtype or state[name].dtype).itemsize for name in wanted}
    shards = _shards(sizes, max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _written(name, state[name], dtype, file) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(sizes.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": file_of})
    stated = str(dtype or state[EMBEDDING].dtype).removeprefix("torch.")
    written = config.with_extra(dtype=stated).to_hf()
    written.pop("torch_dtype", None)  # the older name of the same key, now perhaps untrue
    _write_json(folder / CONFIG_FILE, written)


@torch.no_grad()
def refuse_non_finite(name: str, tensor: Tensor, where: str) -> None:
    """Raise ModelFolderError for a weight that is NaN or infinite, as it is after the cast to its dtype.

    One pass over the tensor and no memory: a sum is NaN or infinite where a summand is. Where large numbers alone
    made it so, a second pass tells.
    """
    if torch.isfinite(tensor.sum()):
        return
    if not all(torch.isfinite(part).all() for part in tensor.flatten().split(1 << 20)):
        raise ModelFolderError(
            f"all weights must be finite numbers in {str(tensor.dtype).removeprefix('torch.')}",
            f"{name} in {where} is not",
            "download the weights again, or use a dtype of wider range",
        )


def _model_of(config: ModelConfig, state: dict[str, Tensor], ops: Ops | None) -> CausalLM:
    with torch.device("meta"):  # no memory for weights that are replaced at once
        model = CausalLM(config, ops)
    model.load_state_dict(state, strict=True, assign=True)
    return model


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The type that most numbers of a folder's weights have; float32 where that is neither half-precision type."""
    found: torch.dtype = getattr(torch, tensor_files.stored_dtype(Path(folder)))
    return found


def _written(name: str, tensor: Tensor, dtype: torch.dtype | None, file: str) -> Tensor:
    """Contiguous and on the CPU. Raises ModelFolderError for a number that the type does not reach."""
    tensor = tensor.detach()
    if dtype is None or tensor.dtype == dtype:
        return tensor.cpu().contiguous()
    cast = tensor.to("cpu", dtype).contiguous()
    refuse_non_finite(name, cast, file)
    return cast


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, cut so that no shard exceeds `max_bytes` unless a single tensor does."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, own in sizes.items():
        if shards[-1] and size + own > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    return shards


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

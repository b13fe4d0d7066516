"""Which tensors a folder's safetensors files hold, and where: the index, and each file's header. No torch.

model.safetensors                                           ┐
or model.safetensors.index.json ── weight_map ── its shards ┴─ header ── name: dtype, shape, bytes from … to
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from headrace.errors import ModelFolderError
from headrace.model_files import MAX_JSON_BYTES, decoded, parse_object, read_object, shortened

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "download or save this file again"
_WHOLE = "download or save the model again"
_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "C64": 64, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in name order; each is certain to exist."""
    return sorted(_named_tensors(folder))


def stored_dtype(folder: Path) -> str:
    """The type that most numbers of a folder's weights have; float32 where that is neither half-precision type."""
    numbers: Counter[str] = Counter()
    for tensor in stored_tensors(folder).values():
        numbers[tensor.dtype] += prod(tensor.shape)
    ((most, _),) = numbers.most_common(1) or [("F32", 0)]
    return {"BF16": "bfloat16", "F16": "float16"}.get(most, "float32")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder, over all files. Index, headers and the files' sizes agree."""
    tensors: dict[str, StoredTensor] = {}
    spare = MAX_JSON_BYTES
    for file, expected in sorted(_named_tensors(folder).items()):
        header = _checked_header(file, spare)
        spare -= header.length
        if expected is not None and header.tensors.keys() != expected:
            name = min(header.tensors.keys() ^ expected)
            has = "does not hold" if name in expected else "holds"
            raise ModelFolderError(
                f"{INDEX_FILE} and {file.name} must agree on which tensors the file holds",
                f"the file {has} {shortened(name)}",
                _WHOLE,
            )
        tensors |= header.tensors
    return tensors


def _named_tensors(folder: Path) -> dict[Path, set[str] | None]:
    """The weight files, with the tensors that the index says each has; None where there is no index."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    index = read_object(folder / INDEX_FILE)
    if index is None:
        names = sorted(file.name for file in folder.iterdir())
        pickled = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
        raise ModelFolderError(
            f"a model folder must hold {SINGLE_FILE} or {INDEX_FILE}",
            pickled or names,
            "convert the weights to safetensors (transformers: save_pretrained)"
            if pickled
            else "download the weights",
        )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{INDEX_FILE} must map each tensor to its file", weight_map, _WHOLE)
    files: dict[Path, set[str] | None] = {}
    of_name: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise ModelFolderError(
                f"{INDEX_FILE} must name files of its own folder that end in {_SUFFIX}, without a path",
                name,
                _WHOLE,
            )
        of_name.setdefault(name, set()).add(tensor)
    missing = [name for name in sorted(of_name) if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(
            f"every shard that {INDEX_FILE} names must be there", some(missing), "download the missing files"
        )
    files.update((folder / name, tensors) for name, tensors in of_name.items())
    return files


def _is_plain(name: str) -> bool:
    """Whether it cannot lead out of the folder, on any system. Where a link of that name leads is its owner's."""
    return (
        name.endswith(_SUFFIX) and len(name) <= 200 and name.isprintable() and not any(c in name for c in '/\\:"')
    )


@dataclass(frozen=True)
class _Header:
    length: int
    tensors: dict[str, StoredTensor]


def _checked_header(file: Path, most: int) -> _Header:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise ModelFolderError(
                    f"{file.name} is truncated: its header's length is missing", f"{size} bytes", _AGAIN
                )
            if prefix + stream.read(len(_LFS_POINTER) - 8) == _LFS_POINTER:
                raise ModelFolderError(
                    f"{file.name} must hold the weights; it is a pointer of Git LFS to them",
                    f"{size} bytes",
                    "run `git lfs pull` in that folder, or download the model again",
                )
            stream.seek(8)
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                raise ModelFolderError(
                    f"{file.name} is truncated: its header alone needs {length} bytes", f"{size} bytes", _AGAIN
                )
            if length > most:
                raise ModelFolderError(
                    f"the headers of all weight files together must not exceed {MAX_JSON_BYTES} bytes",
                    f"{length} bytes in {file.name}",
                    "store the weights in fewer tensors",
                )
            text = stream.read(length)
    except OSError as error:
        raise ModelFolderError(
            f"{file.name} must be readable", str(error), "check the file and its rights"
        ) from error
    what = f"the safetensors header of {file.name}"
    content = parse_object(decoded(text, what), file.name, what)
    content.pop("__metadata__", None)
    tensors = {name: _stored_tensor(name, entry, file.name) for name, entry in content.items()}
    _check_layout(tensors, file.name, 8 + length, size)
    return _Header(length, tensors)


def _stored_tensor(name: str, entry: Any, file: str) -> StoredTensor:
    def refuse(rule: str, value: object) -> ModelFolderError:
        return ModelFolderError(f"{file}: the header entry of {shortened(name)!r} must {rule}", value, _AGAIN)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("be an object of dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise refuse("have a known dtype", dtype)
    if not _are_sizes(shape) or len(shape) > 8:
        raise refuse("have a shape of up to eight sizes", shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("have two data_offsets, in order", offsets)
    tensor = StoredTensor(dtype, tuple(shape), offsets[0], offsets[1])
    if 8 * (tensor.end - tensor.begin) != prod(shape) * _ITEM_BITS[dtype]:
        raise refuse(f"have data_offsets as far apart as {dtype} of its shape needs", (tensor.shape, offsets))
    return tensor


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and 0 <= one < 2**63 for one in values)


def _check_layout(tensors: dict[str, StoredTensor], file: str, start: int, size: int) -> None:
    """The tensors lie one after the other, without gaps, up to the end of the file."""
    ordered = sorted(tensors.items(), key=lambda named: (named[1].begin, named[1].end))
    end = max((tensor.end for _, tensor in ordered), default=0)
    if size != start + end:
        fault = "truncated" if size < start + end else "longer than its header says"
        raise ModelFolderError(f"{file} is {fault}: its tensors need {start + end} bytes", f"{size} bytes", _AGAIN)
    if ordered and ordered[0][1].begin:
        raise ModelFolderError(
            f"{file} must begin with its first tensor", f"a gap of {ordered[0][1].begin}", _AGAIN
        )
    for (name, before), (other, after) in pairwise(ordered):
        if before.end != after.begin:
            fault = "overlap" if before.end > after.begin else "leave a gap"
            raise ModelFolderError(
                f"the tensors of {file} must lie one after the other",
                f"{shortened(name)} and {shortened(other)} {fault}",
                _AGAIN,
            )


def some(names: list[str], limit: int = 3) -> list[str]:
    """Enough of many names to recognise them by."""
    shown = [shortened(name) for name in names[:limit]]
    return shown if len(names) <= limit else [*shown, f"… and {len(names) - limit} more"]

"""What a version's directory holds. Its files can be read without Headrace.

    manifest.json                                       what the version is, and what its bytes are
    model.safetensors                                   the whole image, or
    adapter_model.safetensors + adapter_config.json     that of an adapter, as PEFT has it, or
    delta.bin                                           what changed since the version `base`

A safetensors file is a header and then the image, byte for byte, so an image without gaps is all its tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.errors import SyncError
from headrace.sync.base import AdapterSpec, Manifest, TensorSpec
from headrace.sync.layout import ALIGN

MANIFEST_FILE = "manifest.json"
_FORMAT = "headrace version 1"
_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class Contents(NamedTuple):
    file: str
    """Where the stream goes."""
    head: bytes
    """What stands before it there."""
    others: dict[str, bytes]


def contents_of(draft: Manifest, who: str) -> Contents:
    """Of the directory for the last stream of `draft`."""
    others: dict[str, bytes] = {}
    if draft.streams[-1].base is not None:
        file, head = "delta.bin", b""
    elif draft.adapter is not None:
        file, head = "adapter_model.safetensors", safetensors_head(draft.tensors, who)
        others["adapter_config.json"] = _json(_peft_config(draft.adapter))
    else:
        file, head = "model.safetensors", safetensors_head(draft.tensors, who)
    others[MANIFEST_FILE] = _json(_description(draft, file, len(head)))
    return Contents(file, head, others)


def safetensors_head(tensors: Sequence[TensorSpec], who: str) -> bytes:
    """Padded, so that the image begins at a multiple of `ALIGN` in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec in tensors:
        if spec.dtype not in _SAFETENSORS_DTYPES:
            known = ", ".join(_SAFETENSORS_DTYPES)
            raise SyncError("announce", who, f"{spec.name} is {spec.dtype}; a safetensors file holds {known}")
        header[spec.name] = {
            "dtype": _SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [spec.offset, spec.offset + spec.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def _description(draft: Manifest, file: str, start: int) -> dict[str, Any]:
    stream = draft.streams[-1]
    return {
        "format": _FORMAT,
        "version": _plain(draft.version),
        "payload": draft.payload,
        "base": stream.base,
        "file": file,
        "start": start,
        "nbytes": stream.nbytes,
        "image_nbytes": draft.nbytes,
        "after": [os.path.basename(before.location["path"]) for before in draft.streams[:-1]],
        "adapter": None if draft.adapter is None else _plain(draft.adapter),
        "tensors": [_plain(spec) for spec in draft.tensors],
    }


def _peft_config(adapter: AdapterSpec) -> dict[str, Any]:
    whole = float(adapter.alpha).is_integer()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if whole else adapter.alpha,
        "target_modules": list(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _plain(record: msgspec.Struct) -> dict[str, Any]:
    """By names; on the wire records are arrays."""
    return {field: getattr(record, field) for field in record.__struct_fields__}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()

"""A tiny model folder of which an input exchanges one file: its first byte says which, the rest is the content."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from fuzz_mutations import havoc

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "config"))

from folder_builders import write_model

from headrace.errors import ModelFolderError

LONGEST = 1 << 15
_LONGEST_MESSAGE = 2000
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 40, 41, 2**31 - 1, 2**31, 2**63, 2**64, 10**40, 2 * 10**9, 0.0, -0.0, 0.5,
    1e-300, 1e300, -1.5, 1e999, "", "x", "silu", "qwen2", "llama", "qwen3", "default", "yarn", "llama3", "longrope",
    "dynamic", "linear", "F32", "BF16", "I8", "../x.safetensors", "/etc/passwd", "a\u0000b", "\ud800", "x" * 300,
    [], {}, [[]], [0], [1, 2], [-1], ["x"], {"a": 1}, {"content": "x"}, [None], [0, 10**12], [8, 16],
)  # fmt: skip
_ODD_KEYS = (
    "rope_scaling", "rope_parameters", "rope_type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "truncate",
    "attention_factor", "mscale", "mscale_all_dim", "rms_norm_eps", "head_dim", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
    "hidden_act", "quantization_config", "partial_rotary_factor", "bos_token_id", "eos_token_id", "dtype",
    "torch_dtype", "chat_template", "eos_token", "bos_token", "pad_token", "truncation", "padding", "normalizer",
    "pre_tokenizer", "post_processor", "decoder", "model", "vocab", "merges", "added_tokens", "__metadata__",
)  # fmt: skip


@contextmanager
def folders(*names: str) -> Iterator[list[Path]]:
    with TemporaryDirectory() as root:
        yield [write_model(Path(root) / name) for name in names]


@contextmanager
def exchanged(file: Path, content: bytes) -> Iterator[None]:
    """The file with another content for a while. Errors are as long as they may be, and can be printed."""
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(content)
    try:
        yield
    except ModelFolderError as error:
        check_message(str(error))
        raise
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)


def check_message(text: str) -> None:
    assert len(text) <= _LONGEST_MESSAGE, f"a message of {len(text)} characters"
    text.encode("utf-8", "backslashreplace")


def choose(data: bytes, files: Sequence[Any]) -> tuple[Any, bytes]:
    return files[data[0] % len(files)] if data else files[0], data[1:]


def changed_json(data: bytes, random: Random, dictionary: Sequence[bytes]) -> bytes:
    """A node of the JSON after the first byte is changed; of what is none, any byte."""
    try:
        tree = json.loads(data[1:])
    except (ValueError, RecursionError):
        return havoc(data, random, dictionary, (), LONGEST)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        tree = _changed(tree, random)
    return data[:1] + json.dumps(tree, ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")


def _changed(tree: Any, random: Random) -> Any:
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        key = random.choice(list(tree))
        kind = random.random()
        if kind < 0.7:
            return {**tree, key: _changed(tree[key], random)}
        if kind < 0.8:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, random.choice(_ODD_KEYS): random.choice((tree[key], random.choice(_ODD)))}
    if isinstance(tree, list) and tree and random.random() < 0.8:
        place = random.randrange(len(tree))
        middle = random.choice(([], [tree[place]] * 2, [_changed(tree[place], random)]))
        return [*tree[:place], *middle, *tree[place + 1 :]]
    if isinstance(tree, int) and random.random() < 0.4:
        return tree + random.choice((-1, 1, 8, 64))
    return random.choice(_ODD)

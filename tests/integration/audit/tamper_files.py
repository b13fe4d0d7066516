"""Forgeries of config.toml, kept versions and checkpoints; those of events that were known."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from forging import Line, Tampering, load, on_config, on_event, on_file, on_json, on_weights, save, together


def _flip_bytes(run: Path) -> None:
    """One byte of the data of every kept version, a mantissa's lowest."""
    for file in sorted((run / "versions").glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        content[-4 * 40] ^= 1
        file.write_bytes(content)


def _delete_kept(run: Path) -> None:
    for file in (run / "versions").glob("*.safetensors"):
        file.unlink()


def _publish_again(lines: list[Line]) -> None:
    again = next(e for e in lines if e["kind"] == "published" and e["version"] == 3)
    lines.append({**again, "checksum": again["checksum"] ^ 1})


KNOWN = [
    Tampering("events emptied", on_file("events.jsonl", lambda lines: []), False),
    Tampering(
        "a published checksum changed",
        on_event("published", lambda e: e.update(checksum=e["checksum"] ^ 1), 3),
        False,
    ),
    Tampering("all kept versions deleted", _delete_kept, False),
    Tampering("one byte flipped in every kept version", _flip_bytes, False),
    Tampering(
        "max_staleness raised in the configuration", on_config("max_staleness = 2", "max_staleness = 9"), False
    ),
    Tampering("a version published twice with different weights", on_file("events.jsonl", _publish_again), False),
]


# ── Configuration ───────────────────────────────────────────────────────────────────────────────────────


CONFIG = [
    Tampering(
        "max_staleness lowered below what was trained", on_config("max_staleness = 2", "max_staleness = 1"), True
    ),
    Tampering(
        "the buffer called unbounded",
        together(on_config("max_staleness = 2", ""), on_config('type = "bounded"', 'type = "unbounded"')),
        True,
    ),
    Tampering("the seed changed in the configuration", on_config("seed = 0", "seed = 1"), True),
    Tampering("the group's size raised in the configuration", on_config("group_size = 4", "group_size = 5"), True),
    Tampering(
        "groups_per_batch raised in the configuration",
        on_config("groups_per_batch = 4", "groups_per_batch = 8"),
        True,
    ),
    Tampering("epochs raised in the configuration", on_config("epochs = 1", "epochs = 2"), True),
    Tampering("steps raised in the configuration", on_config("steps = 14", "steps = 40"), True),
    Tampering("steps lowered in the configuration", on_config("steps = 14", "steps = 10"), True),
    Tampering(
        "the learning rate changed in the configuration",
        on_config("learning_rate = 0.001", "learning_rate = 0.01"),
        True,
    ),
    Tampering(
        "the advantage's normalisation changed in the configuration",
        on_config("normalise_std = true", "normalise_std = false"),
        True,
    ),
    Tampering("top_p changed in the configuration", on_config("top_p = 0.9", "top_p = 0.8"), True),
    Tampering("max_tokens lowered in the configuration", on_config("max_tokens = 12", "max_tokens = 6"), True),
    Tampering(
        "the interrupt changed in the configuration",
        on_config('interrupt = "keep"', 'interrupt = "recompute"'),
        True,
    ),
    Tampering(
        "the recorded fraction lowered in the configuration", on_config("episodes = 1.0", "episodes = 0.25"), True
    ),
    Tampering(
        "the kept versions' interval raised in the configuration",
        on_config("keep_versions_every = 1", "keep_versions_every = 100"),
        True,
    ),
    Tampering(
        "the scorer changed in the configuration",
        on_config('source = "user.py:moody"', 'source = "user.py:score"'),
        True,
    ),
    Tampering(
        "a coarser type in the configuration, so that more may differ",
        on_config('dtype = "float32"', 'dtype = "bfloat16"'),
        True,
    ),
    Tampering(
        "the engines' FP8 invented, so that more may differ",
        on_config('kv_dtype = "same"', 'kv_dtype = "fp8"'),
        True,
    ),
    Tampering("a second engine in the configuration", on_config("count = 1", "count = 2"), True),
]


# ── Weights ─────────────────────────────────────────────────────────────────────────────────────────────


def _version(run: Path, number: int) -> Path:
    return run / "versions" / f"{number:07d}.safetensors"


def _published_pair(run: Path) -> tuple[int, int]:
    """Two versions after each other that the last session published, so that tokens were sampled under them."""
    events = load(run / "events.jsonl")
    begun = max(place for place, event in enumerate(events) if event["kind"] == "started")
    numbers = [event["version"] for event in events[begun:] if event["kind"] == "published"]
    return next(pair for pair in pairwise(numbers) if pair[1] == pair[0] + 1)


def _copy_the_one_before(run: Path) -> None:
    before, after = _published_pair(run)
    shutil.copy(_version(run, before), _version(run, after))


def _exchange_versions(run: Path) -> None:
    one, other = (_version(run, number) for number in _published_pair(run))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _exchange_with_events(run: Path) -> None:
    """Two kept versions have each other's weights, and so it was published."""
    pair = _published_pair(run)
    _exchange_versions(run)
    events = load(run / "events.jsonl")
    one, other = (next(e for e in events if e["kind"] == "published" and e["version"] == v) for v in pair)
    one["checksum"], other["checksum"] = other["checksum"], one["checksum"]
    save(run / "events.jsonl", events)


def _all_the_same(run: Path) -> None:
    for file in sorted((run / "versions").glob("*.safetensors"))[1:]:
        shutil.copy(_version(run, 0), file)


def _round(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16().float()


def _nudge(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values())).view(-1)[0] += 1e-6


def _negate(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "q_proj" in name)
    tensors[name] = -tensors[name]


def _drop_tensor(tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if name.endswith("model.norm.weight"))]


def _keep_beyond(run: Path) -> None:
    shutil.copy(_version(run, 12), _version(run, 99))


WEIGHTS = [
    Tampering(
        "a kept version is a copy of the one before",
        _copy_the_one_before,
        True,
    ),
    Tampering("two kept versions exchanged", _exchange_versions, True),
    Tampering("two kept versions exchanged, their checksums in the events too", _exchange_with_events, True),
    Tampering("all kept versions are the first", _all_the_same, True),
    Tampering("one kept version deleted", lambda run: _version(run, _published_pair(run)[0]).unlink(), True),
    Tampering("a kept version invented that the ledger does not know", _keep_beyond, True),
    Tampering(
        "one weight of a kept version changed by a millionth",
        on_weights("versions/0000012.safetensors", _nudge),
        True,
    ),
    Tampering("a kept version rounded to bfloat16", on_weights("versions/0000012.safetensors", _round), True),
    Tampering("a projection of a kept version negated", on_weights("versions/0000012.safetensors", _negate), True),
    Tampering("a tensor of a kept version removed", on_weights("versions/0000012.safetensors", _drop_tensor), True),
    Tampering("an orphaned kept version changed", on_weights("versions/0000007.safetensors", _negate), True),
]


# ── Checkpoints ─────────────────────────────────────────────────────────────────────────────────────────

LAST = "checkpoints/step-000014"


def _settle_files(folder: Path) -> None:
    """Sizes and checksums in a checkpoint's state.json as its files are now."""
    state = json.loads((folder / "state.json").read_text())
    for name in state["files"]:
        content = (folder / name).read_bytes()
        state["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def _checkpoint(change: Callable[[dict[str, Any]], Any], file: str) -> Callable[[Path], None]:
    return together(on_weights(f"{LAST}/{file}", change), lambda run: _settle_files(run / LAST))


def _zero(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        tensor.zero_()


def _flip_in_checkpoint(run: Path) -> None:
    file = run / LAST / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-4 * 40] ^= 1
    file.write_bytes(content)


def _older_final(run: Path) -> None:
    """The final model is not the run's last version."""
    from safetensors.torch import load_file, save_file

    (file,) = (run / "checkpoints" / "final").glob("*.safetensors")
    save_file(load_file(_version(run, 12)), file)


CHECKPOINTS = [
    Tampering(
        "a checkpoint's version changed",
        on_json(f"{LAST}/state.json", lambda s: (s.update(version=3), s["state"].update(version=3))),
        True,
    ),
    Tampering(
        "a checkpoint's step changed",
        on_json(f"{LAST}/state.json", lambda s: (s.update(step=3), s["state"].update(step=3))),
        True,
    ),
    Tampering(
        "a checkpoint's place in the tasks changed",
        on_json(f"{LAST}/state.json", lambda s: s["state"]["tasks"].update(position=0)),
        True,
    ),
    Tampering(
        "a checkpoint's evaluations invented",
        on_json(f"{LAST}/state.json", lambda s: s["state"].update(best=0.99)),
        True,
    ),
    Tampering("a byte flipped in a checkpoint's weights", _flip_in_checkpoint, True),
    Tampering(
        "a projection of a checkpoint negated, its checksums settled",
        _checkpoint(_negate, "weights.safetensors"),
        True,
    ),
    Tampering(
        "a checkpoint's optimizer state zeroed, its checksums settled",
        _checkpoint(_zero, "optimizer.safetensors"),
        True,
    ),
    Tampering("the newest checkpoint deleted", lambda run: shutil.rmtree(run / LAST), True),
    Tampering("all checkpoints deleted", lambda run: shutil.rmtree(run / "checkpoints"), True),
    Tampering(
        "a checkpoint renamed to another step",
        lambda run: (run / "checkpoints/step-000010").rename(run / "checkpoints/step-000013") and None,
        True,
    ),
    Tampering("the final model is an older version", _older_final, True),
]

ALL = [*KNOWN, *CONFIG, *WEIGHTS, *CHECKPOINTS]

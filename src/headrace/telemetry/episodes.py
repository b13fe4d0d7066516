"""Trained episodes as JSON lines, and back: both ends of episodes/step-NNNNNN.jsonl.

A line has all that is needed to read an episode and to recompute its log-probabilities. Numbers come back
exactly: a float32 is written as the decimal form of the same number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.errors import RunFolderError
from headrace.records import Batch, Episode, Group, KvEvent, Routes, Sampling, Support, Task, Turn, text_before
from headrace.telemetry.folder import RunFolder

Decode = Callable[[list[int]], str]


class StoredEpisode(NamedTuple):
    """One trained episode, and how it was trained on."""

    episode: Episode
    group: str
    sequence: int
    admitted_version: int
    step: int
    """As in metrics.jsonl: the first training step is 1."""
    trained_version: int
    """The trainer's version when it consumed the episode."""
    produced_version: int
    advantage: float
    text: str | None
    """What the policy wrote, every turn of it; None when the run had no tokenizer to read it with."""
    teacher: int | None = None
    """In self-distillation: the version it was held against."""

    @property
    def lag(self) -> int:
        """Versions between its oldest token and the trainer."""
        oldest = self.episode.version_min
        return 0 if oldest is None else self.trained_version - oldest


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────


def is_kept(group_id: str, fraction: float) -> bool:
    """Whether a group belongs to the recorded sample: a property of its id, the same in every process."""
    return zlib.crc32(group_id.encode()) < fraction * 2**32


def episode_lines(
    batch: Batch,
    produced: int,
    keep: Callable[[Group], bool],
    decode: Decode | None,
    teacher: int | None = None,
) -> Iterator[bytes]:
    """One line for each episode of the groups to keep."""
    place = 0
    for group in batch.groups:
        for episode in group.episodes:
            advantage = float(batch.advantages[place])
            place += 1
            if not keep(group):
                continue
            line = {
                "id": episode.id,
                "group": group.id,
                "sequence": group.sequence,
                "admitted_version": group.admitted_version,
                "step": batch.step,
                "trained_version": batch.version,
                "produced_version": produced,
                "teacher": teacher,
                "task": _task(episode.task),
                "reward": _float(episode.reward),
                "advantage": _float(advantage),
                "text": _text(episode, decode),
                "metrics": episode.metrics,
                "started": episode.started,
                "finished": episode.finished,
                "turns": [_turn(turn) for turn in episode.turns],
            }
            yield msgspec.json.encode(line, enc_hook=_plain) + b"\n"


def _task(task: Task) -> dict[str, Any]:
    return {"id": task.id, "prompt": task.prompt, "answer": task.answer, "data": task.data}


def _text(episode: Episode, decode: Decode | None) -> str | None:
    if decode is None:
        return None
    return "\n".join(text_before(decode(turn.tokens.tolist()), turn.stop_string) for turn in episode.turns)


def _turn(turn: Turn) -> dict[str, Any]:
    written = {
        "context": turn.context.tolist(),
        "tokens": turn.tokens.tolist(),
        "logprobs": _floats(turn.logprobs),
        "versions": turn.versions.tolist(),
        "stop": turn.stop,
        "stop_string": turn.stop_string,
        "sampling": {name: getattr(turn.sampling, name) for name in Sampling.__struct_fields__},
        "lineage": [_event(event) for event in turn.lineage],
        "support": turn.support and {"ids": turn.support.ids.tolist(), "offsets": turn.support.offsets.tolist()},
        "routes": turn.routes and _routes(turn.routes),
        "parent": turn.parent,
        "joins": turn.joins,
        "seed": turn.seed,
        "policy": turn.policy,
        "adapter": turn.adapter,
        "engine": turn.engine,
    }
    return written | {"asked": turn.asked} if turn.asked else written


def _event(event: KvEvent) -> dict[str, Any]:
    written = {name: getattr(event, name) for name in KvEvent.__struct_fields__}
    if event.base is None:
        del written["base"]
    return written


def _routes(routes: Routes) -> dict[str, Any]:
    return {
        "shape": routes.experts.shape,
        "dtypes": [routes.experts.dtype.str, routes.gates.dtype.str],
        "experts": routes.experts.reshape(-1).tolist(),
        "gates": _floats(routes.gates.reshape(-1)),
    }


def _floats(column: np.ndarray) -> list[float | str]:
    values: list[float | str] = column.tolist()
    return values if np.isfinite(column).all() else [_float(value) for value in column.tolist()]


def _float(value: float | None) -> Any:
    """JSON has no infinity and no NaN: they are written as text."""
    return value if value is None or np.isfinite(value) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return repr(value)


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────


def read_episodes(folder: str | Path | RunFolder, step: int | None = None) -> Iterator[StoredEpisode]:
    """A run's recorded episodes, in the order they were trained on; of one step only when it is given."""
    place = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    for number, file in place.step_files():
        if step is None or number == step:
            yield from read_step_file(file)


def read_step_file(file: Path) -> Iterator[StoredEpisode]:
    """The episodes in one file, in its order."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield _stored(msgspec.json.decode(line))
            except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
                raise RunFolderError(
                    f"{file}, line {number} is one episode",
                    f"{type(error).__name__}: {error}",
                    "the file is damaged",
                ) from error


def _stored(line: dict[str, Any]) -> StoredEpisode:
    reward = line["reward"]
    episode = Episode(
        id=line["id"],
        task=Task(**line["task"]),
        turns=tuple(_read_turn(turn) for turn in line["turns"]),
        reward=None if reward is None else float(reward),
        metrics=line["metrics"],
        started=line["started"],
        finished=line["finished"],
    )
    return StoredEpisode(
        episode=episode,
        group=line["group"],
        sequence=line["sequence"],
        admitted_version=line["admitted_version"],
        step=line["step"],
        trained_version=line["trained_version"],
        produced_version=line["produced_version"],
        advantage=float(line["advantage"]),
        text=line["text"],
        # Runs from before it was written here have it in the ledger alone.
        teacher=line.get("teacher"),
    )


def _read_turn(turn: dict[str, Any]) -> Turn:
    support, routes = turn["support"], turn["routes"]
    return Turn(
        tokens=np.array(turn["tokens"], np.int32),
        logprobs=np.array(turn["logprobs"], np.float64).astype(np.float32),
        versions=np.array(turn["versions"], np.int32),
        context=np.array(turn["context"], np.int32),
        stop=turn["stop"],
        stop_string=turn.get("stop_string"),
        sampling=Sampling(**turn["sampling"]),
        lineage=tuple(KvEvent(**event) for event in turn["lineage"]),
        support=support
        and Support(ids=np.array(support["ids"], np.int32), offsets=np.array(support["offsets"], np.int64)),
        routes=routes and _read_routes(routes),
        parent=turn["parent"],
        joins=tuple(turn["joins"]),
        seed=turn["seed"],
        policy=turn["policy"],
        adapter=turn["adapter"],
        engine=turn["engine"],
        asked=tuple(turn.get("asked", ())),
    )


def _read_routes(routes: dict[str, Any]) -> Routes:
    shape = tuple(routes["shape"])
    experts, gates = (np.dtype(dtype) for dtype in routes["dtypes"])
    return Routes(
        experts=np.array(routes["experts"], experts).reshape(shape),
        gates=np.array(routes["gates"], np.float64).astype(gates).reshape(shape),
    )

"""Payload × transport × schedule: whole runs, after whose every publication the engine says what it serves.

A version's bits are known from three sides that must agree: the trainer's own file of it (`versions/`), the seal of
what was published, and the checksums of the parameters that the engine's passes read after the acknowledgement.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from covering import pairs_of, pairwise
from integration_project import CONFIG, USER_CODE
from safetensors.torch import load_file

from headrace import load_config, train
from headrace.audit import run_audit
from headrace.config.load import read_config
from headrace.config.run import RunConfig
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import load_model
from headrace.records import Batch, Episode, Group, Task, WeightVersion
from headrace.scoring.advantages import group_advantages
from headrace.sync import open_channel, open_receiver, open_sender, version_digest
from headrace.sync.base import Destination
from headrace.sync.digest import digests
from headrace.telemetry.folder import RunFolder
from headrace.training.backends.base import open_backend
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig
from headrace.training.trainer import LocalTrainer

VERSIONS = 20
# A batch has no token older than the version before, so of each two versions one is served.
STEPS = 2 * VERSIONS

PAYLOADS = ("full", "delta", "adapter")
TRANSPORTS = ("shared_memory", "files", "http", "collective")
SCHEDULES = (
    *(("never_stop", interrupt) for interrupt in ("keep", "recompute", "resume", "retry", "drain")),
    *(("blocking", interrupt) for interrupt in ("keep", "recompute", "resume", "retry")),
)


class Cell(NamedTuple):
    payload: str
    transport: str
    schedule: tuple[str, str]

    def __str__(self) -> str:
        return "-".join((self.payload, self.transport, *self.schedule))


CELLS = [Cell(*cell) for cell in pairwise(PAYLOADS, TRANSPORTS, SCHEDULES)]
QUICK = [
    Cell("full", "shared_memory", ("never_stop", "drain")),
    Cell("full", "http", ("never_stop", "resume")),
    Cell("delta", "files", ("blocking", "keep")),
    Cell("adapter", "collective", ("never_stop", "recompute")),
]


def test_a_cover_has_every_pair_and_few_cells():
    for axes in (
        (PAYLOADS, TRANSPORTS, SCHEDULES),
        ("ab", "cd", "ef", "gh"),
        ("abc", "d"),
        ("abcd", "abcd", "abcd"),
    ):
        cells = pairwise(*axes)
        wanted = {
            ((i, one), (j, other))
            for (i, first), (j, second) in combinations(enumerate(axes), 2)
            for one, other in product(first, second)
        }
        assert set().union(*map(pairs_of, cells)) == wanted
        assert cells == pairwise(*axes)
        largest, second = sorted(map(len, axes))[-1:-3:-1]
        assert len(cells) <= 1.5 * largest * second
    assert len(CELLS) <= 40
    assert {cell[:2] for cell in CELLS} == set(product(PAYLOADS, TRANSPORTS))
    assert set(QUICK) <= set(CELLS)


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=str(c), marks=[] if c in QUICK else pytest.mark.full) for c in CELLS]
)
def test_after_every_acknowledgement_the_engine_serves_that_versions_bits(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch, record_property, cell: Cell
):
    config = written(tmp_path, small_model, monkeypatch, cell)
    summary = train(config, folder=tmp_path / "run", progress=False)
    assert (summary["steps"], summary["finished"]) == (STEPS, True)

    run = RunFolder(tmp_path / "run")
    published = run.read_events("published")
    dtype = read_config(run.config).engine.dtype
    order = list(open_backend(small_model, config.training).parameters())
    for event in published:
        kept = load_file(run.versions / f"{event['version']:07d}.safetensors")
        assert event["checksum"] == checksum({name: kept[name] for name in order}, dtype)
        assert event["served"] == {"engine-0": event["checksum"]}
    versions = [event["version"] for event in published]
    assert versions == sorted(set(versions))
    assert len(versions) >= VERSIONS
    record_property("versions", len(versions))
    assert len({event["checksum"] for event in published}) == len(published), "every version is another"
    assert run.read_events("sync_failed") == []
    if cell.payload == "delta":
        whole = published[0]["bytes"]
        assert sum(event["bytes"] < 0.5 * whole for event in published) >= len(published) - 1
    assert run_audit(tmp_path / "run").violations == []


@pytest.mark.parametrize("payload", PAYLOADS)
def test_within_one_process_too(small_model: Path, payload: str):
    """A loop of the primitives, since a run has a process for each role."""
    lora = LoraConfig(rank=4) if payload == "adapter" else None
    dtype = "bfloat16" if payload == "delta" else "float32"
    training = TrainingConfig(
        steps=VERSIONS, lora=lora, optimizer=OptimizerConfig(learning_rate=1e-4), device="cpu"
    )
    trainer = LocalTrainer(training, model=small_model, max_staleness=0)
    settings = NativeEngineConfig(
        device="cpu", dtype=dtype, max_context=32, max_adapters=0 if lora is None else 1, max_adapter_rank=4
    )
    engine = NativeEngine(load_model(small_model, dtype=getattr(torch, dtype)), settings, version=-1)
    channel = open_channel("in_process")
    sender, receiver = open_sender(channel, payload=payload, dtype=dtype), open_receiver(channel)
    adapter = None if trainer.adapter is None else trainer.adapter.name
    offered = set()
    for number in range(VERSIONS + 1):
        version = WeightVersion(number=number, parent=number - 1, step=number)
        has = engine.version
        to = [Destination(name=engine.name, version=has)]
        manifest, seal = sender.send(version, trainer.tensors(), adapter=trainer.adapter, to=to)
        standby = engine.standby if manifest.adapter is None else engine.adapter_standby(manifest.adapter)
        receiver.receive(manifest, standby, has=has, refresh=engine.refresh_standby)
        receiver.verify(manifest, seal, standby)
        engine.swap(number) if adapter is None else engine.swap_adapter(adapter, number)
        assert tuple(receiver.fingerprint(manifest, engine.live(adapter)).checksums) == seal.checksums
        expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in trainer.tensors().items()}
        served = engine.live(adapter)
        assert served.keys() == expected.keys()
        assert all(torch.equal(served[name], expected[name]) for name in expected)
        offered.add(manifest.streams[-1].base is None)
        if number < VERSIONS:
            trainer.train(sampled(engine, number, adapter))
    assert offered == ({True, False} if payload == "delta" else {True})


def sampled(engine: NativeEngine, version: int, adapter: str | None) -> Batch:
    """A batch of this version's tokens, with rewards."""
    for place in range(8):
        context = np.array([1, 2 + place % 2], np.int32)
        engine.add(
            SampleRequest(id=place, context=context, max_tokens=6, seed=10 * version + place, adapter=adapter)
        )
    turns = {}
    while engine.has_work:
        turns |= dict(engine.step())
    task = Task(id="t", prompt="")
    episodes = tuple(
        Episode(id=f"{version}/{i}", task=task, turns=(turns[i],), reward=float(i % 3)) for i in sorted(turns)
    )
    group = Group(id=str(version), sequence=version, task=task, episodes=episodes, admitted_version=version)
    advantages = group_advantages([group], normalise_std=True)
    return Batch(step=version + 1, version=version, groups=(group,), advantages=advantages)


def written(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> RunConfig:
    (folder / "model").symlink_to(model)
    (folder / "user.py").write_text(USER_CODE)
    (folder / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    schedule, interrupt = cell.schedule
    settings = {
        "sync.check_served": "true",
        "sync.transport": cell.transport,
        "sync.schedule": schedule,
        "sync.interrupt": interrupt,
        "training.steps": STEPS,
        "training.groups_per_batch": 2,
        "training.checkpoint_every": STEPS,
        "buffer.max_staleness": 1,
        "recording.keep_versions_every": 1,
        "environment.workers": 1,
        "scorer.workers": 1,
    }
    if cell.payload == "adapter":
        settings["training.lora"] = "{rank = 4}"
    else:
        settings["sync.payload"] = cell.payload
    if cell.payload == "delta":
        # So that a step changes the stored bits of some weights and not of all.
        settings |= {"engine.dtype": "bfloat16", "training.optimizer.learning_rate": 1e-4}
    return load_config("config.toml", [f"{key}={value}" for key, value in settings.items()])


def checksum(tensors: dict[str, torch.Tensor], dtype: str) -> int:
    """What a version of these tensors has, computed from them alone."""
    kind = getattr(torch, dtype)
    cast = {name: tensor.to(kind) for name, tensor in tensors.items()}
    return version_digest(dict(zip(cast, digests(list(cast.values())), strict=True)))

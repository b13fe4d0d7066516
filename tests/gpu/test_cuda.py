"""The same code on a GPU: run where there is one, with `python -m pytest tests/gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_builders import SMALL, publish

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import random_model
from headrace.records import WeightVersion
from headrace.sync import open_channel, open_receiver, open_sender

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("dtype", "mean", "most", "head_dim"),
    [("float32", 1e-5, 1e-4, 32), ("bfloat16", 0.02, 0.5, 32), ("bfloat16", 0.02, 0.5, 64)],
)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_log_probs_sampled_on_the_gpu_replay_there_through_swaps(dtype, mean, most, head_dim, kv):
    """Heads of 32 go Triton's way in bfloat16, those of 64 that of `hopper_decode`."""
    kind, shape = getattr(torch, dtype), replace(SMALL, head_dim=head_dim)
    models = {number: random_model(shape, number, dtype=kind, device="cuda") for number in range(4)}
    config = NativeEngineConfig(device="cuda", dtype=dtype, max_context=96, max_running=64)
    engine = NativeEngine(random_model(shape, 0, dtype=kind, device="cuda"), config, version=0)
    dice, contexts, turns = np.random.default_rng(0), {}, {}
    for i in range(192):
        contexts[i] = dice.integers(0, 512, dice.integers(4, 24)).astype(np.int32)
        engine.add(SampleRequest(id=i, context=contexts[i], max_tokens=60, seed=i))
    steps = 0
    while engine.has_work:
        turns.update(engine.step())
        steps += 1
        if steps % 40 == 0 and engine.version < 3:
            publish(engine, engine.version + 1, models[engine.version + 1], kv)
    apart = np.concatenate(
        [abs(replay_logprobs(models.__getitem__, contexts[i], turn) - turn.logprobs) for i, turn in turns.items()]
    )
    assert len(apart) >= 10_000
    assert apart.mean() < mean
    assert apart.max() < most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_reach_a_gpu_engines_standby_bit_for_bit(dtype):
    channel = open_channel("shared_memory")
    sent = random_model(SMALL, 1, device="cuda")
    standby = dict(random_model(SMALL, 2, dtype=getattr(torch, dtype), device="cuda").named_parameters())
    standby = {name: parameter.detach() for name, parameter in standby.items()}
    tensors = {name: parameter.detach() for name, parameter in sent.named_parameters()}
    manifest, seal = open_sender(channel, dtype=dtype).send(WeightVersion(number=1, parent=0, step=1), tensors)
    receiver = open_receiver(channel)
    receiver.check(manifest, standby)
    receiver.receive(manifest, standby)
    receiver.verify(manifest, seal, standby)
    for name, tensor in tensors.items():
        assert torch.equal(standby[name], tensor.to(standby[name].dtype)), name


def test_the_quickstart_learns_on_the_gpu(tmp_path):
    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("examples/quickstart/prepare.py", str(tmp_path / "model"))
    config = "examples/quickstart/quickstart.toml"
    chosen = (f"model.path={tmp_path / 'model'}", *(f"{side}.device=cuda" for side in ("engine", "training")))
    chosen += tuple(f"{side}.dtype=float32" for side in ("engine", "training"))
    sets = [word for one in chosen for word in ("--set", one)]
    summary = run("-m", "headrace.cli.main", "train", config, "--run", str(tmp_path / "run"), "--json", *sets)
    assert json.loads(summary)["eval_before"] < 0.5
    assert json.loads(summary)["eval_after"] > 0.8
    audit = json.loads(
        run("-m", "headrace.cli.main", "audit", str(tmp_path / "run"), "--recompute", "50", "--json")
    )
    assert audit["ok"]
    assert audit["recomputed"]["max_abs_diff"] < 1e-4

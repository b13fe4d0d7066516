"""Makes a newcomer's mistake in a folder (newcomer_mistakes.toml) and hears what Headrace says of it.

Everything runs in this process, by the functions that the command line and the workers call, so that a hundred
mistakes take seconds: only what starts a run's processes is replaced, by what those do first.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import sys
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration_project import CONFIG, USER_CODE

import headrace
import headrace.orchestration.local as local
from headrace.cli.main import main
from headrace.config.advice import advice
from headrace.config.run import RunConfig
from headrace.records import Task
from headrace.rollout.config import EnvironmentConfig
from headrace.rollout.prompts import CHECKED_TASKS, check_lengths, check_prompt
from headrace.rollout.tasks import load_tasks
from headrace.rollout.worker import RunEpisode, SampleCall, SampleReply, _Episodes
from headrace.scoring.config import ScorerConfig
from headrace.scoring.worker import ScoreCall, ScoreTurn, _Scoring
from headrace.telemetry.folder import RunFolder
from headrace.tokenizer import Tokenizer
from headrace.workers import Job, JobFailed, _failed, current_job

TABLE = Path(__file__).with_name("newcomer_mistakes.toml")
PYTHON_TASKS = 'type = "python"\nsource = "user.py:tasks"'


def mistakes() -> list[dict[str, Any]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))["mistake"]


@dataclass
class Told:
    """What Headrace made of a mistake."""

    text: str
    code: int
    started: bool = False
    """Nothing was refused: processes would run, or an episode came to its end."""
    value: Any = None


class Started(Exception):
    """The run's processes have started, and nothing is wrong with what they load."""


def make(mistake: dict[str, Any], place: Path, model: Path) -> None:
    """The folder of a project, with the mistake in it."""
    config = CONFIG
    for right, wrong in mistake.get("replace", ()):
        assert right in config, right
        config = config.replace(right, wrong)
    if "tasks" in mistake:
        config = config.replace(PYTHON_TASKS, f'type = "jsonl"\npath = "{mistake["tasks"]}"')
    (place / "config.toml").write_text(config)
    (place / "user.py").write_text(USER_CODE)
    if "model" in mistake:
        make_damaged_model(mistake["model"], place / "model", model)
    else:
        (place / "model").symlink_to(model)
    for name in mistake.get("folders", ()):
        (place / name).mkdir()
    for name, text in mistake.get("files", {}).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for name, digits in mistake.get("bytes", {}).items():
        (place / name).write_bytes(bytes.fromhex(digits))


def make_damaged_model(kind: str, folder: Path, model: Path) -> None:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"

    def rewrite(**keys: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    if kind in ("empty", "gguf", "adapter"):
        for file in folder.iterdir():
            file.unlink()
        if kind == "gguf":
            (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\0\0\0")
        if kind == "adapter":
            (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
            (folder / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    elif kind == "no_tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "no_weights":
        weights.unlink()
    elif kind == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "quantised":
        rewrite(quantization_config={"quant_method": "gptq", "bits": 4})
    elif kind == "lfs":
        weights.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")
    elif kind == "missing_shard":
        from safetensors import safe_open

        with safe_open(weights, "np") as opened:
            names = list(opened.keys())
        weights.rename(folder / "model-00001-of-00002.safetensors")
        shards = {name: f"model-0000{1 if name != names[0] else 2}-of-00002.safetensors" for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "gpt2":
        rewrite(model_type="gpt2", architectures=["GPT2LMHeadModel"])
    elif kind == "bert":
        rewrite(model_type="bert", architectures=["BertForMaskedLM"])
    elif kind == "not_causal":
        rewrite(is_causal=False)
    elif kind == "broken_config":
        (folder / "config.json").write_text('{"model_type": "qwen3",')
    else:
        raise AssertionError(kind)


def tell(mistake: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Do what the newcomer did, in the current folder."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(local, "run", _load_as_processes_do)
    if "missing" in mistake:
        monkeypatch.setitem(sys.modules, mistake["missing"], None)
    if "held" in mistake:
        RunFolder(place / mistake["held"]).hold()
    if "reward" in mistake:
        return _scored(mistake["reward"])
    if "rollout" in mistake:
        return _rolled_out(mistake["rollout"])
    if "code" in mistake:
        return _called(mistake["code"])
    return _commanded(mistake.get("words", ["train", "config.toml"]), monkeypatch)


def _load_as_processes_do(config: RunConfig, folder: Path, **options: Any) -> Any:
    """What a run says at its start, and what its workers do before its first episode."""
    for sentence in advice(config):
        print(sentence)
    tokenizer = Tokenizer(Path(config.model.path))
    episodes = _Episodes(config.environment, tokenizer)
    _Scoring(config.scorer, tokenizer)
    template, environment = config.environment.template, episodes._environment
    first = load_tasks(config.tasks)[:CHECKED_TASKS]
    lengths = [check_prompt(task, environment, tokenizer, template, "tasks") for task in first]
    check_lengths(lengths, "tasks", config.engine.max_context)
    if config.evaluation.tasks is not None:
        load_tasks(config.evaluation.tasks, config.evaluation.limit)
    raise Started


def _commanded(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(sys, "argv", ["headrace", *words])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            return Told(said.getvalue(), code, started="unexpected Started" in said.getvalue())
    return Told(said.getvalue(), 0)


def _called(code: str) -> Told:
    """A cell of a notebook: its names are those of `__main__`, which has no file."""
    names: dict[str, Any] = {"__name__": "__main__", "headrace": headrace}
    try:
        exec(compile(code, "<cell>", "exec"), names)
    except Started:
        return Told("", 0, started=True)
    except headrace.errors.HeadraceError as error:
        return Told(str(error), error.exit_code)
    except Exception:
        return Told(traceback.format_exc(), 1)
    return Told("", 0)


def _scored(reward: str) -> Told:
    code = f"async def _later():\n    return 1.0\n\ndef score(task, attempt):\n    return {reward}\n"
    Path("reward.py").write_text(code)
    scoring = _Scoring(ScorerConfig(source="reward.py:score"), Tokenizer(Path("model")))
    turn = ScoreTurn(context=np.array([1]), tokens=np.array([2, 17]), stop="eos")
    return _answered(scoring.handle, ScoreCall(task=Task("t", "w1"), turns=(turn,), metrics={}), "scorer")


def _rolled_out(body: str) -> Told:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    Path("env.py").write_text(f"class Environment:\n    async def rollout(self, task, policy):\n{lines}")
    episodes = _Episodes(EnvironmentConfig(source="env.py:Environment"), Tokenizer(Path("model")))
    return _answered(episodes.handle, RunEpisode(task=Task("t", "w1")), "environment")


def _answered(handle: Any, body: Any, kind: str) -> Told:
    """What the controller hears of a job: its value, or a reason and its detail as `events.jsonl` has them."""

    async def ask(call: Any) -> Any:
        assert isinstance(call, SampleCall)
        return SampleReply(turn=0, tokens=np.array([2, 17], np.int32), stop="eos")

    async def main() -> Told:
        current_job.set(1)
        try:
            return Told("", 0, started=True, value=await handle(body, ask))
        except Exception as error:
            failed: JobFailed = _failed(Job(id=1, body=None), error, kind)  # type: ignore[arg-type]
            return Told(f"{failed.reason}: {failed.detail}", 1)

    return asyncio.run(main())

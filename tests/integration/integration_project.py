"""Real runs in a scratch folder: a small random model, a small task, real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

USER_CODE = '''
import asyncio, os, time
from headrace import Task

def tasks(count=64, long_prompts=()):
    for i in range(count):
        words = 200 if i in long_prompts else 3
        yield Task(id=f"t{i}", prompt=" ".join(f"w{(i * 7 + j) % 16}" for j in range(words)), answer=f"w{i % 16}")

def score(task, attempt):
    return sum(token % 2 for token in attempt.turns[-1].tokens) / 8

async def troubled(task, attempt):
    """What can go wrong in a scorer, by task."""
    if task.id == "t1":
        raise ValueError("no reward for this one")
    if task.id == "t3":
        os._exit(9)
    if task.id == "t5":
        while True:
            pass
    if task.id == "t7":
        return float("nan")
    return score(task, attempt)

class Fragile:
    """Kills its process now and then, after the policy has answered."""

    def __init__(self):
        self.rest = 20

    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        self.rest -= 1
        if self.rest == 0:
            os._exit(9)

def stuck(task, attempt):
    """Blocks in a thread that cannot be interrupted."""
    if task.id == "t3":
        time.sleep(3600)
    return score(task, attempt)
'''

CONFIG = """
[model]
path = "model"
[tasks]
type = "python"
source = "user.py:tasks"
[environment]
max_tokens = 8
[scorer]
source = "user.py:score"
[engine]
max_context = 32
max_running = 64
[buffer]
max_staleness = 2
[training]
steps = 12
groups_per_batch = 4
group_size = 4
checkpoint_every = 3
[training.optimizer]
learning_rate = 1e-3
[recording]
keep_versions_every = 2
"""


def make_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from headrace.models import ModelConfig, random_model, save_model

    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 18,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "eos_token_id": 17,
        }
    )
    folder.mkdir()
    save_model(random_model(config, 0), config, folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(17)} | {"<end>": 17}, "w16"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


class Project:
    """A user's folder, and the command line run in it."""

    def __init__(self, path: Path):
        self.path = path
        self.run = path / "runs" / "config"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "headrace.cli.main", *words]

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words), cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def headrace(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words), cwd=self.path, capture_output=True, text=True, timeout=timeout)

    def train(self, *words: str) -> dict[str, Any]:
        done = self.headrace("train", "config.toml", "--json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def audit(self, *words: str, run: Path | None = None) -> dict[str, Any]:
        done = self.headrace("audit", str(run or self.run), "--json", *words)
        assert done.returncode in (0, 1), done.stderr
        found = json.loads(done.stdout)
        assert (done.returncode == 0) == found["ok"]
        return found

    def steps_done(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def children(self) -> dict[str, psutil.Process]:
        """The run's living processes by name."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                if "headrace.orchestration.child" in words and process.cwd() == str(self.path):
                    found[words[words.index("headrace.orchestration.child") + 1]] = process
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)

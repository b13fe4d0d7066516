"""The learning study: how staleness changes what is learned, and what corrections give back.

    python benchmarks/learning/study.py prepare runs/learning             models, once
    python benchmarks/learning/study.py run runs/learning --seconds 500   cells that are not done yet, side by side
    python benchmarks/learning/study.py report runs/learning > benchmarks/results/learning.json
    python benchmarks/learning/study.py picture benchmarks/results/learning.json > docs/images/learning.png

From the repository's root; on a GPU many cells fit side by side (`--together`), best with CUDA's MPS running.

A cell is one run of `learning.toml` with its own staleness, correction and seed: the seed is of the order of tasks
and of the sampling, while the model that cells begin with, the facts and the tasks are the same for all. Each that
ends adds a line to cells.jsonl in the study's folder; `run` begins with those that have none, and may be stopped at
any time. One that was stopped on its way begins anew: resumed, it would have lost what was in flight, and with it
its staleness. All lines of a folder are of the same models and settings; others are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from chains import MOST, WORDS, Chain, lazy, prompt, thinking, unseen
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.bench import commit, hardware
from headrace.models import CausalLM, ModelConfig, PackedContext, random_model, save_model

HERE = Path(__file__).parent
END = "<end>"
LONGEST = (MOST + 2) + (MOST + 2) + 1
"""Words of a prompt, of a completion that thinks, and the end."""
RATE, LAST_STEPS, SKEW = 1e-3, 50, 3.0
"""Of the warm start: its learning rate, its last steps, in which the rate falls, and how much likelier some moves
are (`chains.draw`)."""
STUDENT_KNOWS, TEACHER_KNOWS = 0.3, 0.8
"""Share of chains that they think through without a mistake before the last steps."""
EVENLY_FROM = 0.4
"""The share from which on all moves are practised alike."""
SEEDS, LAGS = range(5), (0, 1, 4, 16)
WAYS = {
    "none": "[]",
    "tis": '[{type = "tis"}]',
    "decoupled": '[{type = "decoupled", proximal = "interpolated"}]',
}


class Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    steps: int
    """Of the warm start, at most, before its last ones."""
    batch: int


SIZES = {
    "student": Size(512, 6, 8, 2000, 512),
    "teacher": Size(768, 8, 12, 3000, 512),
    "small": Size(256, 4, 4, 2000, 128),
}


class Cell(NamedTuple):
    lag: int
    way: str
    seed: int
    teacher: bool = False

    @property
    def kind(self) -> str:
        return f"{'distilled-' if self.teacher else ''}lag{self.lag}-{self.way}"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"


def cells() -> list[Cell]:
    """Seed after seed, so that an unfinished study has whole rows. At lag 0 there is nothing to correct, at lag 1
    little."""
    ways = {0: ("none",), 1: ("none", "tis")}
    kinds = [(lag, way) for lag in LAGS for way in ways.get(lag, tuple(WAYS))]
    return [
        cell
        for seed in SEEDS
        for cell in (*(Cell(*kind, seed) for kind in kinds), Cell(0, "none", seed, teacher=True))
    ]


# ── prepare: a tokenizer and models that know the task a little ──────────────────────────────────────────


def make_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", END, *WORDS])}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def make_model(size: Size, tokenizer: Tokenizer, device: str) -> CausalLM:
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": size.hidden,
            "intermediate_size": 3 * size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.heads // 2,
            "head_dim": size.hidden // size.heads,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "initializer_range": size.hidden**-0.5,
            "eos_token_id": tokenizer.token_to_id(END),
        }
    )
    model = random_model(config, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config.num_layers) ** -0.5)
    return model.to(device)


def warm_start(
    model: CausalLM, tokenizer: Tokenizer, size: Size, thinking_share: float, knows: float, name: str
) -> float:
    """Supervised steps on worked examples, half of which think, until so large a share of chains is thought through
    without a mistake; then some more on examples of which so many think. Returns the share at the end.

    At first examples have some moves more often than others: those show what thinking is, and the rarer a move, the
    less is known of it.
    """
    dice, ids = random.Random(0), tokenizer.get_vocab()
    skewed, evenly = unseen(1, SKEW), unseen(3)
    all_alike = [(chain, True) for chain in islice(unseen(2), size.batch)]
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    share, left, right, step = 0.5, math.inf, 0.0, 0
    while left > 0:
        step, left = step + 1, left - 1
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, step / 50, max(0.05, left / LAST_STEPS))
        examples = skewed if right < EVENLY_FROM else evenly
        told = [(chain, dice.random() < share) for chain in islice(examples, size.batch)]
        loss, _ = _supervised(model, ids, told)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10:
            continue
        with torch.no_grad():
            right = _supervised(model, ids, all_alike)[1].item()
        seen = f"loss {loss.item():.3f}, {right:.1%} right"
        print(f"warm start of {name}, step {step}: {seen}", file=sys.stderr, flush=True)
        if left == math.inf and right >= knows:
            share, left = thinking_share, LAST_STEPS
        elif left == math.inf and step >= size.steps:
            raise SystemExit(f"after {step} steps {right:.1%} are right, not {knows:.0%}")
    return right


def _supervised(
    model: CausalLM, ids: dict[str, int], told: list[tuple[Chain, bool]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss over what is said, how likely those that think are right once they think) of chains, and whether each
    is to think."""
    device = model.head_weight.device
    sequences, learned = [], []
    for chain, thinks in told:
        asked, said = prompt(chain).split(), (thinking if thinks else lazy)(chain).split()
        words = [*asked, *said, END]
        # All of one length, so that attention is one call; what follows the end is not learned.
        sequences.append([ids[word] for word in words + [END] * (LONGEST - len(words))])
        learned.append([len(asked) <= place < len(words) for place in range(LONGEST)])
    tokens, kept = torch.tensor(sequences, device=device), torch.tensor(learned, device=device)
    context = PackedContext([LONGEST] * len(told), device)
    hidden = model(tokens.flatten(), context.positions, context).view(len(told), LONGEST, -1)[:, :-1]
    logprobs, _ = model.ops.token_logprobs(hidden.flatten(0, 1), model.head_weight, tokens[:, 1:].flatten())
    said = logprobs.view(len(told), -1).where(kept[:, 1:], torch.zeros((), device=device))
    thinkers = [i for i, (_, thinks) in enumerate(told) if thinks]
    # But for the first word, which is also the choice to think.
    right = said.detach()[thinkers, len(asked) :].sum(-1).exp().mean()
    return -said.sum() / kept.sum(), right


def prepare(study: Path, sizes: dict[str, str], device: str) -> None:
    """The student thinks in one of five examples and knows little, its teacher thinks in all and knows most. Both
    are made at once, as one alone is bound by its launches."""
    asked = [("model", 0.2, STUDENT_KNOWS), ("teacher", 1.0, TEACHER_KNOWS)]
    asked = [one for one in asked if not (study / one[0] / "config.json").exists()]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(make, study / name, sizes[name], share, knows, device) for name, share, knows in asked]
        for one in made:
            one.result()


def make(folder: Path, size: str, share: float, knows: float, device: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    model = make_model(SIZES[size], tokenizer, device)
    right = warm_start(model, tokenizer, SIZES[size], share, knows, folder.name)
    print(f"{folder.name}: {right:.1%} right where it thinks", file=sys.stderr, flush=True)
    save_model(model.cpu(), model.config, folder)


# ── run: cells side by side ──────────────────────────────────────────────────────────────────────────────


class Running(NamedTuple):
    cell: Cell
    process: subprocess.Popen[bytes]


def begin(study: Path, cell: Cell, sets: list[str]) -> Running:
    folder = study / "cells" / cell.name
    own = [
        f"model.path={study / 'model'}",
        f"seed={cell.seed}",
        f"buffer.max_staleness={cell.lag}",
        f"training.corrections={WAYS[cell.way]}",
        *([f"training.distillation.teacher={study / 'teacher'}"] if cell.teacher else []),
    ]
    if torch.cuda.is_available():
        own.append("sync.transport=cuda_ipc")
    command = [sys.executable, "-m", "headrace", "train", str(HERE / "learning.toml"), "--run", str(folder)]
    command += ["--overwrite", *(word for one in (*own, *sets) for word in ("--set", one))]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Its processes have neighbours.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (study / "cells" / f"{cell.name}.log").open("wb") as log:
        # In a session of its own, so that Ctrl-C reaches it once, from here.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    return Running(cell, process)


def told(study: Path, cell: Cell) -> dict[str, Any]:
    """What is kept of a finished cell."""
    folder = study / "cells" / cell.name
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "time_s", "reward_mean", "staleness_mean", "kl", "entropy", "effective_sample_frac")
    return {
        **cell._asdict(),
        "name": cell.name,
        "accuracy": summary["eval_after"],
        "accuracy_before": summary["eval_before"],
        "seconds": summary["seconds"],
        "tokens": summary["ledger"]["tokens"]["trained"],
        "evaluations": [[e["step"], e["pass_1"]] for e in summary["evaluations"]],
        # Some fifty of them, the last one among them.
        "curve": [[round(line[key], 5) for key in keys] for line in lines[:: -max(1, len(lines) // 50)][::-1]],
        "hardware": hardware(),
        "commit": commit(),
    }


def in_common(study: Path, sets: list[str]) -> dict[str, Any]:
    """What all cells of a study have in common: the settings given, and digests of the models' weights."""
    digests = {}
    for name in ("model", "teacher"):
        weights = sorted((study / name).glob("*.safetensors"))
        if not weights:
            raise SystemExit(f"{study / name} has no weights: run `prepare` first")
        digest = hashlib.sha256()
        for file in weights:
            digest.update(file.read_bytes())
        digests[name] = digest.hexdigest()[:16]
    return {"sets": sets, "models": digests}


def refuse_others(lines: list[dict[str, Any]]) -> None:
    """Lines that say nothing of what was asked, as older ones do, agree only with each other."""
    common = [{key: line.get(key) for key in ("sets", "models")} for line in lines]
    for line, one in zip(lines, common, strict=True):
        if one != common[0]:
            raise SystemExit(
                "cells of one folder have the same settings and models, but "
                f"{lines[0]['name']} has {json.dumps(common[0])} and {line['name']} has {json.dumps(one)}: "
                "take another folder for one of them"
            )


def done(study: Path) -> dict[str, dict[str, Any]]:
    file = study / "cells.jsonl"
    # What follows the last line's end was cut off while it was written: that cell is not done.
    whole, _, cut = (file.read_bytes() if file.exists() else b"").rpartition(b"\n")
    if cut:
        print(f"{file}: its last line is unfinished and left out", file=sys.stderr, flush=True)
    lines = [json.loads(line) for line in whole.splitlines()]
    refuse_others(lines)
    return {line["name"]: line for line in lines}


def keep(study: Path, line: dict[str, Any]) -> None:
    """Adds a line, in the place of an unfinished one."""
    with (study / "cells.jsonl").open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def run(study: Path, together: int, seconds: float, sets: list[str], most: int | None) -> list[str]:
    """Names of the cells that failed."""
    until = time.monotonic() + seconds
    lines = done(study)
    common = in_common(study, sets)
    refuse_others([*lines.values(), {"name": "this run", **common}])
    waiting = [cell for cell in cells() if cell.name not in lines][:most]
    running: list[Running] = []
    failed: list[str] = []
    terminated: list[int] = []
    # Only noted: raised in `begin`, it would miss the cell that is about to run.
    before = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    try:
        while (waiting or running) and time.monotonic() < until and not terminated:
            while waiting and len(running) < together:
                running.append(begin(study, waiting.pop(0), sets))
            time.sleep(0.2)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                if one.process.returncode:
                    log = study / "cells" / f"{one.cell.name}.log"
                    print(f"{one.cell.name} failed: see {log}", file=sys.stderr, flush=True)
                    failed.append(one.cell.name)
                    continue
                line = told(study, one.cell) | common
                keep(study, line)
                seen = f"{line['accuracy']:.3f} in {line['seconds']:.0f} s"
                print(f"{one.cell.name}: {seen}", file=sys.stderr, flush=True)
    finally:
        for one in running:
            one.process.send_signal(signal.SIGINT)
        for one in running:
            try:
                one.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(one.process.pid, signal.SIGKILL)
        signal.signal(signal.SIGTERM, before)
    if terminated:
        raise SystemExit(128 + signal.SIGTERM)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["prepare", "run", "report", "picture"])
    parser.add_argument("study", type=Path, help="its folder; for `picture` the report's file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--student", default="student", choices=SIZES)
    parser.add_argument("--teacher", default="teacher", choices=SIZES)
    parser.add_argument("--together", type=int, default=4, help="cells side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no longer than this")
    parser.add_argument("--most", type=int, help="of the cells that are not done yet")
    parser.add_argument("--set", action="append", default=[], help="further settings of every cell")
    given = parser.parse_args()
    if given.what == "prepare":
        prepare(given.study, {"model": given.student, "teacher": given.teacher}, given.device)
    elif given.what == "run":
        if failed := run(given.study, given.together, given.seconds, given.set, given.most):
            raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")
    elif given.what == "report":
        print(json.dumps(report.of(done(given.study))))
    else:
        sys.stdout.buffer.write(report.picture(given.study))


if __name__ == "__main__":
    main()

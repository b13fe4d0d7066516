"""docs/coming-from.md: each figure is computed again, the others' formulas in plain Python; keys it names exist."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from pathlib import Path

import numpy as np
import pytest

from headrace.config.load import read_config
from headrace.config.schema import all_keys
from headrace.records import Episode, Group, Task, Turn
from headrace.scoring.advantages import compared
from headrace.training.algorithms import Algorithm, GrpoConfig, PpoConfig, ReinforcePlusPlusConfig
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.optimizer import learning_rate

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
TASK = Task(id="t", prompt="p")


def group(rewards: list[float], lengths: list[int] | None = None) -> Group:
    def episode(reward: float, length: int) -> Episode:
        turn = Turn(
            context=np.zeros(1, np.int32),
            tokens=np.zeros(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            stop="end",
        )
        return Episode(id="e", task=TASK, turns=(turn,), reward=reward)

    pairs = zip(rewards, lengths or [1] * len(rewards), strict=True)
    return Group(id="g", sequence=0, task=TASK, episodes=tuple(episode(*pair) for pair in pairs))


def ours(algorithm: Algorithm, *groups: Group) -> list[float]:
    return compared(groups, TrainingConfig(algorithm=algorithm).comparison).tolist()


def whitened_over_tokens(rewards: list[float], lengths: list[int]) -> list[float]:
    """As verl and OpenRLHF do: every token has its episode's reward, and all of them are one sample."""
    tokens = [reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)]
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    return [(reward - mean) / deviation for reward in rewards]


def test_the_sizes_of_groups_deviations() -> None:
    for size, said in ((8, "1.07"), (2, "1.41")):
        rewards = [1.0] * (size // 2) + [0.0] * (size // 2)
        theirs = (1.0 - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-4)
        assert f"{ours(GrpoConfig(), group(rewards))[0] / theirs:.2f}" == said
        assert f"{said} times" in PAGE
        assert ours(GrpoConfig(unbiased_std=True, std_eps=1e-4), group(rewards))[0] == pytest.approx(theirs)


def test_the_size_of_what_is_added_to_a_deviation() -> None:
    rewards = [1.0] + [0.0] * 7
    small, large = (1 / (statistics.stdev(rewards) + eps) for eps in (1e-6, 1e-4))
    assert f"{100 * (small / large - 1):.2f} %" == "0.03 %"
    assert "0.03 % with one right of 8" in PAGE


def test_whitening_over_episodes_and_over_tokens() -> None:
    rewards, lengths = [1.0] * 3 + [0.0] * 5, [1] * 3 + [3] * 5
    theirs = whitened_over_tokens(rewards, lengths)
    for episodes, tokens in (
        (PpoConfig(), PpoConfig(whiten="tokens")),
        (ReinforcePlusPlusConfig(), ReinforcePlusPlusConfig(whiten="tokens")),
    ):
        found = ours(episodes, group(rewards, lengths))
        assert f"{found[0]:.2f} and {found[-1]:.2f} here".replace("-", "−") == "1.29 and −0.77 here"
        assert ours(tokens, group(rewards, lengths)) == pytest.approx(theirs, rel=1e-5)
    assert f"{theirs[0]:.2f} and {theirs[-1]:.2f} there".replace("-", "−") == "2.24 and −0.45 there"
    assert "1.29 and −0.77 here, 2.24 and −0.45 there" in PAGE


def test_a_group_of_equal_rewards_where_tokens_are_whitened() -> None:
    mixed, lengths = [5 / 8] * 3 + [-3 / 8] * 5 + [0.0] * 8, [1] * 3 + [3] * 5 + [1] * 8
    theirs = whitened_over_tokens(mixed, lengths)
    groups = group([1.0] * 3 + [0.0] * 5, [1] * 3 + [3] * 5), group([1.0] * 8)
    assert ours(ReinforcePlusPlusConfig(), *groups)[-1] == 0
    assert ours(ReinforcePlusPlusConfig(whiten="tokens"), *groups) == pytest.approx(theirs, rel=1e-5)
    assert f"their advantage is {theirs[-1]:.2f} " in PAGE


def test_the_first_step_of_a_warm_up() -> None:
    config = OptimizerConfig(learning_rate=1e-6, warmup_steps=4)
    rates = [learning_rate(step, config, 100) / 1e-6 for step in range(6)]
    theirs = [min(1.0, step / 4) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates.index(1.0) + 1 == 4
    assert theirs.index(1.0) + 1 == 5
    assert theirs[0] == 0


def test_what_weight_decay_takes_from_an_embedding() -> None:
    assert f"{1 - (1 - 1e-6 * 0.01) ** 1000:.0e}" == "1e-05"
    assert "after 1,000 steps at 1e-6 with 0.01: 1e-5 of an embedding" in PAGE


def test_what_a_lag_costs_on_the_way() -> None:
    study = json.loads((ROOT / "benchmarks/results/learning.json").read_text())
    kinds = ("lag 0, none", "lag 4, none", "lag 4, tis", "lag 16, none")

    def first(kind: str, level: float) -> int:
        curve = study["curves"][kind]
        return next(s for s, r in zip(curve["step"], curve["reward"], strict=True) if r >= level)

    text = " ".join(PAGE.split())
    plain, lag, tis, far = (first(kind, 0.4) for kind in kinds)
    assert (
        f"first reached 0.4 after {plain} steps at lag 0, {lag} at lag 4 ({tis} with TIS) and {far} at lag" in text
    )
    plain, lag, tis, far = (first(kind, 0.5) for kind in kinds)
    assert f"and 0.5 after {plain}, {lag} ({tis}) and {far}." in text
    ends = [100 * study["curves"][kind]["held_out"][-1][1] for kind in kinds]
    assert f"was {ends[0]:.1f} % at lag 0 and {ends[1]:.1f} % at lag 4 ({ends[2]:.1f} % with TIS)" in text
    seconds = [study["curves"][kind]["seconds"][-1] for kind in kinds]
    assert f"{seconds[1] / seconds[0]:.2f} of the time" in text


def test_the_keys_that_it_names_exist() -> None:
    known = {re.sub(r"\[[^]]*\]", "", key.path) for key in all_keys()} | {"training.algorithm.type"}
    named = set()
    for row in PAGE.splitlines():
        first = row.split("|")[1] if row.startswith("| ") else row
        named |= set(re.findall(r"`((?:training|buffer|environment|scorer|engine|sync)\.[a-z_.]+)", first))
    named = {name for name in named if not name.endswith(".toml")}
    assert len(named) > 35
    tables = {path.rsplit(".", 1)[0] for path in known}
    assert named - known - tables == set()


def test_the_configurations_that_it_shows_are_read(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        tomllib.loads(block)
        (tmp_path / "c.toml").write_text('model.path = "m"\ntasks = {type = "jsonl", path = "t"}\n' + block)
        read_config(tmp_path / "c.toml")
    assert read_config(tmp_path / "c.toml").training.comparison.over == "tokens"


def test_the_defaults_that_it_states_are_the_defaults() -> None:
    defaults = {key.path: key.default for key in all_keys()}
    for path, shown in (
        ("training.optimizer.learning_rate", "1e-5"),
        ("training.optimizer.betas", "0.9, 0.95"),
        ("training.optimizer.weight_decay", "0"),
        ("training.optimizer.max_grad_norm", "1"),
        ("training.optimizer.final_fraction", "0"),
        ("training.optimizer.no_decay", "norms, biases, embeddings"),
    ):
        assert f"`{path}` ({shown})" in PAGE
        value = re.sub(r"[()']", "", defaults[path])
        same = shown == value if re.search("[a-z], |, [0-9]", shown) else float(shown) == float(value)
        assert same, path
    assert "`buffer.max_staleness` (2)" in PAGE
    assert TrainingConfig().optimizer.schedule == "constant"

"""`headrace audit` on a real run, and on the same run with something planted in it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from integration_project import CONFIG, USER_CODE, Project
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    """A finished run whose episodes saw swaps in mid-sequence."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "model").symlink_to(small_model)
    (folder / "user.py").write_text(USER_CODE)
    (folder / "config.toml").write_text(CONFIG)
    project = Project(folder)
    project.train()
    return project


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    """Likewise, with keys and values and projections in FP8."""
    folder = tmp_path_factory.mktemp("fp8")
    (folder / "model").symlink_to(small_model)
    (folder / "user.py").write_text(USER_CODE)
    (folder / "config.toml").write_text(
        CONFIG.replace("[engine]", '[engine]\nkv_dtype = "fp8"\nweight_dtype = "fp8"')
    )
    project = Project(folder)
    project.train()
    return project


@pytest.fixture
def tampered(finished: Project, tmp_path: Path) -> Callable[..., dict]:
    """Audit a copy of the run after something was done to it."""

    def audit(tamper: Callable[[Path], None], *words: str) -> dict:
        copy = tmp_path / "copy"
        shutil.copytree(finished.run, copy)
        tamper(copy)
        return finished.audit(*words, run=copy)

    return audit


def sql(statement: str) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        with sqlite3.connect(run / "ledger.sqlite") as db:
            assert db.execute(statement).rowcount > 0

    return tamper


def edit_episode(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Change the first stored episode of the seventh step."""

    def tamper(run: Path) -> None:
        file = run / "episodes" / "step-000007.jsonl"
        first, *rest = file.read_text().splitlines()
        episode = json.loads(first)
        change(episode)
        file.write_text("\n".join([json.dumps(episode), *rest]) + "\n")

    return tamper


def laws(report: dict) -> set[str]:
    assert report["ok"] is False
    return {violation["law"] for violation in report["violations"]}


def test_the_untampered_copy_passes(tampered):
    report = tampered(lambda run: None, "--recompute", "40")
    assert report["ok"] is True
    assert report["recomputed"]["episodes"] == 40
    assert report["recomputed"]["tokens"] >= 200
    assert report["recomputed"]["max_abs_diff"] < 1e-4


def test_a_token_trained_beyond_the_bound_is_found(tampered):
    last = "(SELECT MAX(id) FROM episodes WHERE state = 'trained')"
    report = tampered(sql(f"UPDATE episodes SET trained_at = trained_at + 4 WHERE id = {last}"))
    assert "staleness bound" in laws(report)


def test_a_lost_episode_is_found(tampered):
    assert "ledger" in laws(tampered(sql("DELETE FROM episodes WHERE id = 'g0000009/2'")))


def test_an_episode_left_in_flight_is_found(tampered):
    statement = "UPDATE episodes SET state = 'in_flight' WHERE id = 'g0000009/2'"
    assert "ledger" in laws(tampered(sql(statement)))


def test_an_episode_trained_twice_is_found(tampered):
    assert "ledger" in laws(tampered(sql("UPDATE episodes SET times_trained = 2 WHERE id = 'g0000009/2'")))


def test_a_dropped_episode_without_reason_is_found(tampered):
    statement = "UPDATE episodes SET state = 'dropped' WHERE id = 'g0000009/2'"
    assert "ledger" in laws(tampered(sql(statement)))


def test_a_token_with_the_wrong_version_is_found(tampered):
    def change(episode: dict) -> None:
        episode["turns"][0]["versions"][-1] += 1

    assert "provenance" in laws(tampered(edit_episode(change)))


def test_a_wrong_log_prob_is_found_by_recomputing(tampered):
    def everywhere(run: Path) -> None:
        for file in (run / "episodes").glob("*.jsonl"):
            episodes = [json.loads(line) for line in file.read_text().splitlines()]
            for episode in episodes:
                episode["turns"][0]["logprobs"][-1] -= 0.01
            file.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))

    assert "provenance" in laws(tampered(everywhere, "--recompute", "5"))


def test_a_swap_in_mid_pass_is_found_by_recomputing(tampered):
    """Weights of which one half is of the next version: what a forward pass sees when a swap is not atomic."""

    def mix(run: Path) -> None:
        files = sorted((run / "versions").glob("*.safetensors"))
        for older, newer in pairwise(files[3:]):
            mixed = load_file(older)
            other = load_file(newer)
            mixed.update({name: other[name] for name in mixed if ".layers.1." in name})
            save_file(mixed, older)

    assert "provenance" in laws(tampered(mix, "--recompute", "60"))


def test_with_fp8_a_run_passes_and_versions_that_are_one_too_old_are_found(fp8):
    report = fp8.audit("--recompute", "150")
    assert report["ok"] is True
    assert report["recomputed"]["tokens"] >= 500
    files = sorted((fp8.run / "versions").glob("*.safetensors"), key=lambda file: int(file.stem))
    for older, newer in reversed(list(pairwise(files))):
        shutil.copy(older, newer)
    assert "provenance" in laws(fp8.audit("--recompute", "150"))


def test_a_reused_version_number_is_found(tampered):
    def reuse(run: Path) -> None:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        again = next(event for event in events if event["kind"] == "published" and event["version"] == 3)
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({**again, "checksum": again["checksum"] ^ 1}) + "\n")

    assert "atomic swap" in laws(tampered(reuse))


def test_a_version_the_ledger_does_not_know_is_found(tampered):
    assert "ledger" in laws(tampered(sql("DELETE FROM versions WHERE number = 5")))


def test_less_recomputation_than_was_asked_for_fails(tampered):
    def forget(run: Path) -> None:
        for file in (run / "versions").glob("*.safetensors"):
            file.unlink()

    report = tampered(forget, "--recompute", "5")
    assert "provenance" in laws(report)
    assert (report["recomputed"]["asked"], report["recomputed"]["episodes"]) == (5, 0)
    assert "0 of the 5 asked for" in report["violations"][0]["what"]
    assert "deleted since" in report["unchecked"]["weights of kept versions"]


def test_a_run_that_ended_while_it_started_is_told_apart_from_one_that_lost_its_ledger(finished, tmp_path):
    (tmp_path / "config.toml").write_bytes((finished.run / "config.toml").read_bytes())
    done = finished.headrace("audit", str(tmp_path))
    assert done.returncode == 2
    assert "ended while it was starting" in done.stderr
    assert "--resume" in done.stderr
    (tmp_path / "metrics.jsonl").write_bytes((finished.run / "metrics.jsonl").read_bytes())
    assert "has lost it" in finished.headrace("audit", str(tmp_path)).stderr


TWO_REWARDS = """[[scorer.rewards]]
source = "user.py:score"
weight = 2.0
[[scorer.rewards]]
source = "user.py:brief"
weight = -0.5
name = "length"
"""
MORE_CODE = """
def brief(task, attempt):
    if int(task.id[1:]) % 4 == 3 and attempt.turns[0].tokens[0] % 3 == 0:
        raise ValueError("not this one")
    return len(attempt.turns[0].tokens) / 24
"""


@pytest.fixture(scope="module")
def with_choices(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    """A run that leaves truncated episodes out, whitens over tokens, and has two scorers of which one may fail."""
    folder = tmp_path_factory.mktemp("choices")
    (folder / "model").symlink_to(small_model)
    (folder / "user.py").write_text(USER_CODE + MORE_CODE)
    more = '[training]\ntruncated = "exclude"\nalgorithm = {type = "reinforce++", whiten = "tokens"}'
    config = CONFIG.replace("max_tokens = 8", "max_tokens = 24").replace("max_context = 32", "max_context = 64")
    config = config.replace('[scorer]\nsource = "user.py:score"', TWO_REWARDS)
    (folder / "config.toml").write_text(config.replace("[training]", more))
    project = Project(folder)
    project.train()
    return project


def test_a_run_that_leaves_truncated_episodes_out_is_sound_and_adds_up(with_choices: Project) -> None:
    report = with_choices.audit()
    assert report["ok"] is True, report["violations"]
    lines = [json.loads(line) for line in (with_choices.run / "metrics.jsonl").read_text().splitlines()]
    assert any(0 < line["masked_frac"] < 1 for line in lines)
    for line in lines:
        stored = (with_choices.run / "episodes" / f"step-{line['step']:06d}.jsonl").read_text().splitlines()
        episodes = [json.loads(one) for one in stored]
        cut = [one["turns"][-1]["stop"] == "length" for one in episodes]
        assert line["masked_frac"] == sum(cut) / len(cut)
        assert not any(one["advantage"] for one, is_cut in zip(episodes, cut, strict=True) if is_cut)
        assert line["tokens_trained"] == sum(len(one["turns"][0]["tokens"]) for one in episodes)
    with sqlite3.connect(with_choices.run / "ledger.sqlite") as db:
        (trained,) = db.execute("SELECT SUM(tokens) FROM episodes WHERE state = 'trained'").fetchone()
    assert trained == sum(line["tokens_trained"] for line in lines)


def test_an_advantage_given_to_an_episode_that_was_left_out_is_found(with_choices: Project, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(with_choices.run, copy)
    file = copy / "episodes" / "step-000005.jsonl"
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    left_out = next(one for one in episodes if one["turns"][-1]["stop"] == "length")
    left_out["advantage"] = 0.5
    file.write_text("".join(json.dumps(one) + "\n" for one in episodes))
    found = [(one["where"], one["what"]) for one in with_choices.audit(run=copy)["violations"]]
    assert (left_out["id"], "its advantage is 0.5, and the rewards of its batch give 0") in found


def test_a_forged_share_of_masked_episodes_is_found(with_choices: Project, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(with_choices.run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[4]["masked_frac"] = 0.0
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = with_choices.audit(run=copy)["violations"]
    assert any(one["what"].startswith("metrics.jsonl has masked_frac 0.0") for one in found), found


def test_an_episode_keeps_what_each_scorer_gave_and_its_reward_is_their_sum(with_choices: Project) -> None:
    for file in (with_choices.run / "episodes").glob("step-*.jsonl"):
        for one in map(json.loads, file.read_text().splitlines()):
            (turn,) = one["turns"]
            odd, length = sum(token % 2 for token in turn["tokens"]) / 8, len(turn["tokens"]) / 24
            assert one["metrics"] == {"reward/score": odd, "reward/length": length}
            assert one["reward"] == 2.0 * odd - 0.5 * length
    events = [json.loads(line) for line in (with_choices.run / "events.jsonl").read_text().splitlines()]
    failed = [one for one in events if one.get("reason") == "scorer_error"]
    assert {one["detail"].split(" (")[0] for one in failed} == {"length: ValueError: not this one"}


def test_a_reward_that_its_scorers_did_not_give_is_found(with_choices: Project, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(with_choices.run, copy)
    file = copy / "episodes" / "step-000005.jsonl"
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    episodes[0]["metrics"]["reward/length"] += 1.0
    del episodes[1]["metrics"]["reward/score"]
    file.write_text("".join(json.dumps(one) + "\n" for one in episodes))
    found = {one["where"]: one["what"] for one in with_choices.audit(run=copy)["violations"]}
    reward = episodes[0]["reward"]
    assert found[episodes[0]["id"]] == (
        f"its reward is {reward:.6g}, and what its scorers gave makes {reward - 0.5:.6g}"
    )
    assert found[episodes[1]["id"]] == "what score gave it is not recorded"


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    """A run whose environment asks for sampling parameters of its own in some of its calls."""
    folder = tmp_path_factory.mktemp("asking")
    (folder / "model").symlink_to(small_model)
    (folder / "user.py").write_text(USER_CODE + ASKING)
    sampling = '[environment]\nsource = "user.py:Asking"\nsampling = {temperature = 0.9, top_p = 0.9}'
    config = CONFIG.replace("[environment]", sampling).replace("max_context = 32", "max_context = 64")
    (folder / "config.toml").write_text(config.replace("steps = 12", "steps = 6"))
    project = Project(folder)
    project.train()
    return project


ASKING = """
class Asking:
    async def rollout(self, task, policy):
        first = await policy.sample(task.prompt, temperature=1.5, top_p=1.0)
        second = await policy.sample("w1", after=first, top_k=4)
        await policy.sample("w2", after=second)
"""


def test_turns_are_sampled_recorded_and_trained_with_what_their_calls_asked_for(asking: Project) -> None:
    report = asking.audit("--recompute", "30")
    assert report["ok"] is True, report["violations"]
    assert report["recomputed"]["max_abs_diff"] < 1e-4
    expected = [
        ({"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, ["temperature", "top_p"]),
        ({"temperature": 0.9, "top_k": 4, "top_p": 0.9, "min_p": 0.0}, ["top_k"]),
        ({"temperature": 0.9, "top_k": 0, "top_p": 0.9, "min_p": 0.0}, []),
    ]
    for file in (asking.run / "episodes").glob("step-*.jsonl"):
        for one in map(json.loads, file.read_text().splitlines()):
            assert [(turn["sampling"], turn.get("asked", [])) for turn in one["turns"]] == expected
            assert one["turns"][0]["support"] is None
            offsets = one["turns"][1]["support"]["offsets"]
            assert max(end - start for start, end in pairwise(offsets)) <= 4
    # The trainer's log-probs are of the same distributions: where nothing was trained in between they agree.
    lines = [json.loads(line) for line in (asking.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["lag_0_frac"] == 1
    assert lines[0]["mismatch_kl"] < 1e-8

"""audit, show, doctor and bench say what they found, to people and to programs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from batch_builders import make_turn
from cli_answer import Answer
from folder_builders import LETTERS

from headrace.audit.findings import Findings, Violation
from headrace.config.dump import dump_config
from headrace.config.load import read_config
from headrace.memory_plan import Machine
from headrace.orchestration.folder import resolved
from headrace.records import Batch, Episode, Group, Task, Turn
from headrace.telemetry.writer import FolderTelemetry

Headrace = Callable[..., Answer]


def ids(text: str) -> np.ndarray:
    return np.array([LETTERS.index(letter) for letter in text], np.int32)


def episode(name: str, text: str, versions: list[int], reward: float, seconds: float) -> Episode:
    turn = make_turn(
        0,
        tokens=ids(text),
        logprobs=np.zeros(len(text), np.float32),
        versions=np.array(versions, np.int32),
        context=ids("1+1="),
    )
    task = Task(id="t", prompt="1+1=", answer="2")
    return Episode(id=name, task=task, turns=(turn,), reward=reward, started=1.0, finished=1.0 + seconds)


@pytest.fixture
def run(project: Path) -> Path:
    """A run of two steps and three episodes, the last of them held against a teacher."""
    folder = project.parent / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(read_config(project)))
    telemetry = FolderTelemetry(folder, decode=lambda tokens: "".join(LETTERS[token] for token in tokens))
    batches = [
        [episode("right", "2", [4], 1.0, 0.5), episode("wrong", "three", [2, 2, 3, 3, 3], 0.0, 2.0)],
        [episode("half", "almost 2", [5] * 8, 0.5, 1.0)],
    ]
    for step, episodes in enumerate(batches):
        group = Group(id=f"group-{step}", sequence=step, task=episodes[0].task, episodes=tuple(episodes))
        advantages = np.array([one.reward - 0.5 for one in episodes], np.float32)
        batch = Batch(step=step + 1, version=5, groups=(group,), advantages=advantages)
        telemetry.batch(batch, produced=6, teacher=[None, 4][step])
    asyncio.run(telemetry.close())
    return folder


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ["right", "wrong", "half"]),
        (["-n", "1"], ["half"]),
        (["--best", "-n", "2"], ["right", "half"]),
        (["--worst", "-n", "1"], ["wrong"]),
        (["--slowest"], ["wrong", "half", "right"]),
        (["--stalest", "-n", "2"], ["wrong", "right"]),
        (["--step", "2"], ["half"]),
        (["--group", "group-0", "--worst"], ["wrong", "right"]),
    ],
)
def test_show_chooses_and_orders_episodes(
    run: Path, headrace: Headrace, options: list[str], names: list[str]
) -> None:
    answer = headrace("show", run, "--json", *options)
    assert answer.code == 0, answer.err
    assert [one["id"] for one in json.loads(answer.out)["episodes"]] == names


def test_show_as_json_has_the_facts_of_an_episode(run: Path, headrace: Headrace) -> None:
    [one] = json.loads(headrace("show", run, "--stalest", "-n", "1", "--json").out)["episodes"]
    assert one == {
        "id": "wrong",
        "group": "group-0",
        "step": 1,
        "task": "t",
        "prompt": "1+1=",
        "answer": "2",
        "text": "three",
        "reward": 0.0,
        "advantage": -0.5,
        "trained_version": 5,
        "teacher": None,
        "versions": [2, 3],
        "lag": 3,
        "stop": ["end"],
        "stop_string": [None],
        "tokens": 5,
        "turns": 1,
        "seconds": 2.0,
        "metrics": {},
        "contexts": ["1+1="],
        "completions": ["three"],
    }


def test_show_prints_prompt_completion_reward_versions_and_lag(run: Path, headrace: Headrace) -> None:
    out = headrace("show", run, "--worst", "-n", "1").out
    for words in ("1+1=", "three", "reward 0", "advantage -0.500", "5 tokens, end", "lag 3", "versions 2, 3"):
        assert words in out


def test_show_names_the_teacher_of_an_episode_that_had_one(run: Path, headrace: Headrace) -> None:
    found = json.loads(headrace("show", run, "--json").out)["episodes"]
    assert {one["id"]: one["teacher"] for one in found} == {"right": None, "wrong": None, "half": 4}
    assert "lag 0, teacher version 4, produced by version 5" in headrace("show", run, "-n", "1").out
    assert "lag 3, produced by versions 2, 3" in headrace("show", run, "--worst", "-n", "1").out


def test_show_colours_tokens_by_the_version_that_wrote_them(run: Path) -> None:
    from headrace.cli.show import _completion
    from headrace.telemetry.episodes import read_episodes

    stored = next(one for one in read_episodes(run) if one.episode.id == "wrong")
    text = _completion(
        stored, 0, stored.episode.turns[0], [2, 3], lambda tokens: "".join(LETTERS[token] for token in tokens)
    )
    assert text.plain == "three"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(0, 2, "green"), (2, 5, "yellow")]


def conversation() -> Episode:
    """A tool is asked, answers, and a second policy looks at the whole afresh; then the first turn is forked."""

    def turn(context: str, tokens: str, **changes: Any) -> Turn:
        columns = {"logprobs": np.zeros(len(tokens), np.float32), "versions": np.full(len(tokens), 5, np.int32)}
        return make_turn(0, tokens=ids(tokens), context=ids(context), **columns, **changes)

    turns = (
        turn("be brief 1+1=", "add"),
        turn(" tool says 2 ", "two", parent=0),
        turn("be brief 1+1=ad", "x", parent=None, joins=(0,)),
        turn("be kind", "", policy="judge"),
    )
    task = Task(id="t", prompt=[{"role": "user", "content": "1+1="}], answer="2")
    return Episode(id="talk", task=task, turns=turns, reward=1.0, metrics={"tool_calls": 3.0, "brief": 0.25})


@pytest.fixture
def talk(project: Path) -> Path:
    return recorded(project, [conversation()])


def recorded(project: Path, episodes: list[Episode]) -> Path:
    folder = project.parent / "runs" / "talk"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(read_config(project)))
    telemetry = FolderTelemetry(folder, decode=lambda tokens: "".join(LETTERS[token] for token in tokens))
    group = Group(id="group", sequence=0, task=episodes[0].task, episodes=tuple(episodes))
    advantages = np.zeros(len(episodes), np.float32)
    telemetry.batch(Batch(step=1, version=5, groups=(group,), advantages=advantages), produced=6)
    asyncio.run(telemetry.close())
    return folder


def test_show_prints_what_the_environment_said_before_every_turn_and_nothing_twice(
    talk: Path, headrace: Headrace
) -> None:
    lines = [line.strip(" │") for line in headrace("show", talk).out.splitlines()]
    for once in (
        "be brief 1+1=",
        "add",
        " tool says 2".strip(),
        "two",
        "x",
        "be kind",
        "(no text but special tokens)",
    ):
        assert lines.count(once) == 1, (once, lines)
    rules = [line.strip(" ─") for line in lines if "turn " in line]
    assert rules == [
        "turn 1",
        "turn 2, after turn 1, 13 new tokens of context",
        "turn 3, after turn 1, 0 new tokens of context",
        "turn 4 of judge, 7 new tokens of context",
    ]


def test_show_prints_the_metrics_of_environment_and_scorer(talk: Path, headrace: Headrace) -> None:
    assert "metrics: brief 0.25, tool_calls 3" in headrace("show", talk).out


def test_show_as_json_has_metrics_contexts_and_completions_by_turn(talk: Path, headrace: Headrace) -> None:
    [one] = json.loads(headrace("show", talk, "--json").out)["episodes"]
    assert one["metrics"] == {"brief": 0.25, "tool_calls": 3.0}
    assert one["contexts"] == ["be brief 1+1=", " tool says 2 ", "", "be kind"]
    assert one["completions"] == ["add", "two", "x", ""]


def test_show_shortens_long_texts_and_says_by_how_much_unless_all_is_asked_for(
    project: Path, headrace: Headrace
) -> None:
    said, wrote = "s" * 1_999 + "e", "a" * 5_000 + "z"
    columns = {"logprobs": np.zeros(len(wrote), np.float32), "versions": np.full(len(wrote), 5, np.int32)}
    turn = make_turn(0, tokens=ids(wrote), context=ids(said), **columns)
    run = recorded(project, [Episode(id="long", task=Task(id="t", prompt="s"), turns=(turn,), reward=0.0)])
    [short] = json.loads(headrace("show", run, "--json").out)["episodes"]
    assert short["contexts"] == [
        "s" * 1_000 + " [… 500 characters left out, --full shows them …] " + "s" * 499 + "e"
    ]
    assert short["completions"][0].endswith("left out, --full shows them …] " + "a" * 1_333 + "z")
    assert "1,001 characters left out" in short["completions"][0]
    [whole] = json.loads(headrace("show", run, "--json", "--full").out)["episodes"]
    assert (whole["contexts"], whole["completions"]) == ([said], [wrote])
    assert "500 characters left out" in headrace("show", run).out
    shown = headrace("show", run, "--full").out
    assert "left out" not in shown
    assert shown.count("a") >= 5_000


def test_show_does_not_obey_what_a_model_wrote_for_terminals() -> None:
    from headrace.cli.show import _plain

    assert _plain("a\x1b[2Jb\r\x07\tc\n\x9b") == "a\\x1b[2Jb\\x0d\\x07\tc\n\\x9b"


def test_show_still_reads_a_run_whose_model_is_gone(run: Path, headrace: Headrace) -> None:
    (run.parents[1] / "model" / "tokenizer.json").unlink()
    assert "almost 2" in headrace("show", run, "-n", "1").out


def test_show_says_what_there_is_when_nothing_matches(run: Path, headrace: Headrace) -> None:
    answer = headrace("show", run, "--step", "9")
    assert answer.code == 2
    assert "steps 1 to 2 are recorded" in answer.err
    assert "group-1" in headrace("show", run, "--group", "no").err


# ── audit ────────────────────────────────────────────────────────────────────────────────────────────────


def fake_audit(monkeypatch: pytest.MonkeyPatch, violations: list[dict[str, str]]) -> list[tuple[Path, int]]:
    calls: list[tuple[Path, int]] = []

    def run_audit(folder: Path, recompute: int, *, strict: bool) -> Any:
        calls.append((folder, recompute))
        return SimpleNamespace(
            ok=not violations,
            ledger={"admitted": 3, "trained": 3, "in_flight": 0, "dropped": {}},
            violations=(found := [Violation(**violation) for violation in violations]),
            findings=Findings(violations=found, unchecked={"prompts": "the chat template shows the date"}),
            recomputed={"episodes": recompute, "tokens": 14, "max_abs_diff": 2e-6, "mean_abs_diff": 1e-7},
        )

    monkeypatch.setattr("headrace.audit.run_audit", run_audit, raising=False)
    return calls


def test_a_clean_audit_exits_with_0(run: Path, headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_audit(monkeypatch, [])
    answer = headrace("audit", run, "--recompute", "2")
    assert answer.code == 0
    assert calls == [(run, 2)]
    assert "all hold" in answer.out
    assert "prompts: the chat template shows the date" in answer.out
    assert "14 tokens of 2 episodes recomputed: differ by 1e-07 on average, 2e-06 at most" in answer.out


def test_a_failed_audit_exits_with_1_and_lists_the_violations(
    run: Path, headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    violation = {"law": "staleness", "where": "step 3", "what": "token of version 1 trained at 9"}
    fake_audit(monkeypatch, [violation])
    answer = headrace("audit", run, "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["ok"] is False
    assert json.loads(answer.out)["violations"] == [violation]
    assert "token of version 1 trained at 9" in headrace("audit", run).out


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_doctor_examines_the_machine(headrace: Headrace) -> None:
    answer = headrace("doctor", "--json")
    assert answer.code == 0
    found = msgspec.json.decode(answer.out)
    import torch

    assert found["versions"]["python"] == sys.version.split()[0]
    assert torch.__version__.startswith(found["versions"]["torch"].split("+")[0])
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    assert found["cpu_cores"] >= 1
    assert 0 < found["memory_gib"]["available"] <= found["memory_gib"]["total"]
    assert found["extras"]["reasoning-gym"]["install"] == "pip install 'headrace[reasoning-gym]'"
    assert any("CPU" in line for line in found["can_run"])


def test_the_doctor_names_what_is_missing_and_still_exits_with_0(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.doctor._installed", lambda package: None)
    monkeypatch.setattr("headrace.cli.doctor._cuda", lambda: {"devices": [], "problem": "No module named 'torch'"})
    answer = headrace("doctor")
    assert answer.code == 0
    assert "pip install 'headrace[math]'" in answer.out
    assert "torch does not work here: No module named 'torch'" in answer.out


def test_the_doctor_shows_the_memory_plan_of_a_configuration(headrace: Headrace, project: Path) -> None:
    answer = headrace("doctor", project, "--json")
    assert answer.code == 0
    plan = msgspec.json.decode(answer.out)["memory_plan"]
    assert plan["fits"] is True
    assert plan["chosen"]["training.micro_batch_tokens"] == 16384
    host = [need["bytes"] for need in plan["needs"] if need["where"] == "host"]
    assert sum(host) == plan["used_bytes"]["host"] > 0
    told = headrace("doctor", project)
    assert "Memory plan" in told.out
    assert 'chosen: placement = "side_by_side"' in told.out


def test_a_run_that_does_not_fit_is_refused_by_the_doctor_and_before_it_starts(
    headrace: Headrace, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine(host_bytes=1 << 29, disk_bytes=1 << 40)
    monkeypatch.setattr("headrace.orchestration.planning.this_machine", lambda folder: small)
    monkeypatch.setattr("headrace.orchestration.folder.this_machine", lambda folder, own_files: small)
    for words in (("doctor", project), ("train", project, "--run", tmp_path / "run")):
        answer = headrace(*words)
        assert answer.code == 2
        assert "a run fits into host memory; this one needs" in answer.err
        assert "use a smaller model or a machine with more memory" in answer.err
    assert not (tmp_path / "run").exists()


# ── bench ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*, steps: int = 3, buffer: str = "bounded") -> dict[str, Any]:
        rows = [{"side": "trainer", "idle": 0.125, "steps": steps}]
        return {
            "bench": "loop",
            "hardware": {"cpu": "x"},
            "commit": "abc",
            "rows": rows,
            "figures": {"speedup": 1.5},
        }

    module = ModuleType("headrace.bench.loop")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.bench.loop", module)


@pytest.mark.usefixtures("fake_bench")
def test_a_benchmark_prints_a_table_or_json(headrace: Headrace) -> None:
    answer = headrace("bench", "loop", "--json", "--set", "steps=7")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["rows"] == [{"side": "trainer", "idle": 0.125, "steps": 7}]
    assert json.loads(answer.out)["figures"] == {"speedup": 1.5}
    table = headrace("bench", "loop").out
    for words in ("trainer", "0.125", "speedup", "1.5", "abc"):
        assert words in table


@pytest.mark.usefixtures("fake_bench")
def test_an_unknown_option_of_a_benchmark_is_refused(headrace: Headrace) -> None:
    answer = headrace("bench", "loop", "--set", "stepz=7")
    assert answer.code == 2
    assert "known: steps, buffer" in answer.err


# ── report and config ────────────────────────────────────────────────────────────────────────────────────


def test_report_draws_the_picture_again_and_says_where(run: Path, headrace: Headrace) -> None:
    answer = headrace("report", run)
    assert (answer.code, "metrics.jsonl" in answer.err) == (2, True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "reward_mean": 0.75}\n')
    (run / "report.png").write_text("old")
    answer = headrace("report", run)
    assert (answer.code, answer.out) == (0, f"{run}/report.png\n"), answer.err
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(headrace("report", run, "--json").out) == {"report": f"{run}/report.png"}


def test_config_says_where_each_value_comes_from(
    project: Path, headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    project.write_text(project.read_text() + '[training]\nsteps = 40\ncorrections = [{ type = "tis" }]\n')
    sets = ["--set", "training.groups_per_batch=2", "--set", "buffer={type = 'double'}"]
    answer = headrace("config", "run.toml", *sets, "--json")
    found = json.loads(answer.out)["values"]
    wanted = {
        "seed": (0, "default"),
        "training.steps": (40, "run.toml"),
        "training.groups_per_batch": (2, "--set"),
        "buffer.type": ("double", "--set"),
        "tasks.type": ("jsonl", "run.toml"),
        "training.lora": (None, "default"),
        "engine.dtype": ("float32", "chosen at the start"),
    }
    assert {key: (found[key]["value"], found[key]["origin"]) for key in wanted} == wanted
    assert found["training.corrections"]["value"][0]["type"] == "tis"

    text = headrace("config", "run.toml", *sets).out
    again = project.parent / "again.toml"
    again.write_text(text)
    assert read_config(again) == resolved(read_config(project, sets[1::2]))
    assert "steps = 40                                          # run.toml\n" in text
    assert (headrace("config", "run.toml", "--set", "seed=x").code, headrace("config", "no.toml").code) == (2, 2)

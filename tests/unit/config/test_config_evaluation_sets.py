"""Evaluation sets are tables with names of the user's own: read, refused and written like any other key."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.changes import forbidden_changes
from headrace.config.dump import dump_config
from headrace.config.load import read_config
from headrace.errors import ConfigError
from headrace.rollout.config import JsonlTasks, SamplingConfig

GOOD = """
model.path = "m"
tasks = { type = "jsonl", path = "t" }
[evaluation.sets.hard]
tasks = { type = "jsonl", path = "hard" }
samples = 4
[evaluation.sets.easy.tasks]
type = "python"
source = "a:b"
options = { split = "test" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(GOOD)
    return path


def test_a_dumped_configuration_has_its_sets(file: Path, tmp_path: Path) -> None:
    config = read_config(file, ["evaluation.sets.hard.sampling.temperature=0.6"])
    assert config.evaluation.sets["hard"].sampling == SamplingConfig(temperature=0.6)
    assert config.evaluation.by_name["hard"].tasks == JsonlTasks(path="hard")
    again = tmp_path / "again.toml"
    again.write_text(dump_config(config))
    assert read_config(again) == config


@pytest.mark.parametrize(
    ("override", "rule", "value", "remedy"),
    [
        (
            "evaluation.sets.hard.limti=3", "only known keys", "evaluation.sets.hard.limti",
            "did you mean evaluation.sets.hard.limit?",
        ),
        (
            "evaluation.sets.hard.limit=0", "evaluation.sets.hard.limit is an integer >= 1", 0,
            "--set evaluation.sets.hard.limit=0",
        ),
        (
            "evaluation.sets.easy.tasks.type=csv", 'evaluation.sets.easy.tasks.type is one of "jsonl"', "csv",
            "evaluation.sets.easy.tasks.type=csv",
        ),
        (
            "evaluation.sets.new.limit=3", "evaluation.sets.new.tasks is required", None,
            "add a table [evaluation.sets.new.tasks]",
        ),
        ("evaluation.sets.hard=3", "evaluation.sets.hard is a table", 3, "--set evaluation.sets.hard=3"),
        ("evaluation.sets=3", "evaluation.sets is a table", 3, "--set evaluation.sets=3"),
        ('evaluation.sets."a.b".limit=0', "evaluation.sets.a.b.limit is an integer >= 1", 0, '"a.b".limit=0'),
        ("evaluation.best=soft", "names one of the sets", "soft", "choose among hard, easy"),
        ("evaluation.sets.hard.sampling.top_p=nan", "evaluation.sets.hard.sampling.top_p", "nan", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_set_is_named_in_full(
    file: Path, override: str, rule: str, value: object, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(file, [override])
    assert rule in caught.value.rule
    assert str(caught.value.value) == str(value)
    assert remedy in str(caught.value.remedy)


def test_a_resumed_run_may_have_other_sets(file: Path) -> None:
    other = read_config(file, ["evaluation.sets.hard.limit=7"])
    assert other != read_config(file)
    assert forbidden_changes(read_config(file), other) == []

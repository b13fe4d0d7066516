"""A configuration is refused with its rule, the offending value and a remedy, or read exactly."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.config.changes import edited
from headrace.config.dump import dump_config, dump_toml
from headrace.config.load import config_of, read_config
from headrace.config.overrides import apply_overrides, parse_override
from headrace.config.run import RunConfig
from headrace.errors import ConfigError
from headrace.rollout.config import JsonlTasks, PythonTasks
from headrace.training.algorithms import GrpoConfig, PpoConfig
from headrace.training.config import LoraConfig
from headrace.training.correction_config import TisConfig, VersionDropConfig

GOOD = 'model.path = "m"\ntasks = { type = "jsonl", path = "t" }\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(GOOD)
    return path


def refusal(file: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_config(file, overrides)
    return caught.value


def test_a_minimal_file_leaves_every_default_in_place(file: Path) -> None:
    config = read_config(file)
    assert config.model.path == "m"
    assert config.tasks == JsonlTasks(path="t")
    assert (config.training.steps, config.buffer.type, config.buffer.staleness_bound) == (100, "bounded", 2)


@pytest.mark.parametrize(
    ("override", "value", "remedy"),
    [
        ("bufer.depth=40", "bufer", "did you mean buffer?"),
        ("buffer.dept=40", "buffer.dept", "did you mean buffer.depth?"),
        (
            "tasks.extra.deep=1",
            "tasks.extra",
            "known in tasks: answer_column, id_column, path, prompt_column, type",
        ),
        ("tasks.pth=x", "tasks.pth", "did you mean tasks.path?"),
        ("tasks.dataset=x", "tasks.dataset", 'dataset belongs to tasks.type = "reasoning_gym"'),
        ("max_staleness=3", "max_staleness", "did you mean buffer.max_staleness?"),
        ("training.optimizer.epz=1", "training.optimizer.epz", "did you mean training.optimizer.eps?"),
        (
            "limits.zork=1",
            "limits.zork",
            "known in limits: batch_s, close_s, commit_s, engine_restarts, restarts, start_s, step_s",
        ),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_nearest_known_one(
    file: Path, override: str, value: str, remedy: str
) -> None:
    error = refusal(file, override)
    assert error.rule == "a configuration has only known keys"
    assert error.value == value
    assert remedy in (error.remedy or "")
    assert f"--set {override}" in (error.remedy or "")


@pytest.mark.parametrize(
    ("override", "rule", "value"),
    [
        ("buffer.depth=-1", "buffer.depth is an integer >= 1", -1),
        ("buffer.depth=lots", "buffer.depth is an integer >= 1", "lots"),
        ("buffer.depth=1.5", "buffer.depth is an integer >= 1", 1.5),
        ("buffer.depth=true", "buffer.depth is an integer >= 1", True),
        ("training.algorithm.clip_low=1.5", "training.algorithm.clip_low is a number > 0 and < 1", 1.5),
        ("recording.tensorboard=1", "recording.tensorboard is true or false", 1),
        (
            "training.optimizer.betas=[0.9]",
            "training.optimizer.betas is an array of 2: a number >= 0 and < 1, a number >= 0 and < 1",
            [0.9],
        ),
        ('training.optimizer.betas=[0.9,"a"]', "training.optimizer.betas[1] is a number >= 0 and < 1", "a"),
        ("environment.stop_strings=[1]", "environment.stop_strings[0] is a text", 1),
        ("environment.options=[1]", "environment.options is a table", [1]),
        ("buffer=3", "buffer is a table", 3),
        (
            "tasks=3",
            'tasks is a table of type "jsonl" or "parquet" or "datasets" or "reasoning_gym" or "python"',
            3,
        ),
        ("seed=-1", "seed is an integer >= 0 and < 4294967296", -1),
        ("training.optimizer.eps=inf", "training.optimizer.eps is a finite number", float("inf")),
        ("name=../x", "name is that of one folder", "../x"),
    ],
)
def test_a_wrong_value_is_refused_with_what_the_key_accepts(
    file: Path, override: str, rule: str, value: object
) -> None:
    error = refusal(file, override)
    assert (error.rule, error.value) == (rule, value)
    assert error.remedy


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("tasks.type=csv", 'tasks.type is one of "jsonl", "parquet", "datasets", "reasoning_gym", "python"'),
        (
            "evaluation.tasks.type=csv",
            'evaluation.tasks.type is one of "jsonl", "parquet", "datasets", "reasoning_gym", "python"',
        ),
        ("engine.type=vllm", 'engine.type is one of "native"'),
        (
            "training.algorithm.type=a2c",
            'training.algorithm.type is one of "grpo", "dr_grpo", "rloo", "reinforce++", "dapo", "gspo", "ppo"',
        ),
        ("buffer.type=ring", 'buffer.type is one of "bounded", "double", "none", "unbounded"'),
    ],
)
def test_an_unknown_variant_is_refused_with_those_known(file: Path, override: str, rule: str) -> None:
    error = refusal(file, override)
    assert error.rule == rule
    assert error.value == override.partition("=")[2]


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("", "model is required", "add a table [model] with path"),
        ("[model]\n[tasks]\n", "model.path is required", "set model.path to a text"),
        (
            'model.path = "m"',
            "tasks is required",
            'add a table [tasks] with type, one of "jsonl", "parquet", "datasets", "reasoning_gym", "python"',
        ),
        (
            'model.path = "m"\ntasks.path = "x"',
            "tasks.type is required",
            'set tasks.type to one of "jsonl", "parquet", "datasets", "reasoning_gym", "python"',
        ),
        ('model.path = "m"\ntasks.type = "python"', "tasks.source is required", "set tasks.source to a text"),
    ],
)
def test_what_is_missing_is_named_with_what_to_add(file: Path, text: str, rule: str, remedy: str) -> None:
    file.write_text(text)
    error = refusal(file)
    assert (error.rule, error.remedy) == (rule, remedy)


def test_contradicting_values_are_refused_by_the_node_that_holds_them(file: Path) -> None:
    assert "training.min_group is at most training.group_size" in str(refusal(file, "training.min_group=9"))
    assert 'buffer.window belongs to buffer.order = "windowed"' in str(refusal(file, "buffer.window=64"))
    assert "buffer.depth holds at least one batch" in str(refusal(file, "buffer.depth=2"))
    assert "a temperature is 0 or lies in" in str(refusal(file, "environment.sampling.temperature=1e-9"))
    assert "less than 1 in float32 too" in str(refusal(file, "environment.sampling.top_p=0.99999999"))


def test_an_adapter_is_configured_by_its_table_and_contradictions_are_refused(file: Path) -> None:
    assert read_config(file).training.lora is None
    file.write_text(GOOD + "[training.lora]\n")
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert read_config(file).training.lora == LoraConfig(rank=16, alpha=32.0, targets=projections)
    chosen = read_config(file, ["training.lora.rank=4", 'training.lora.targets=["q_proj"]']).training.lora
    assert chosen == LoraConfig(rank=4, targets=("q_proj",))
    assert "training.lora.targets names at least one" in str(refusal(file, "training.lora.targets=[]"))
    assert 'training.numerics = "exact" is for training without training.lora' in str(
        refusal(file, "training.numerics=exact")
    )
    assert refusal(file, "training.lora.rank=0").rule == "training.lora.rank is an integer >= 1"
    assert refusal(file, "training.lora=16").rule == "training.lora is a table"
    assert "did you mean training.lora.targets?" in str(refusal(file, "training.lora.target=1"))


def test_malformed_toml_is_refused_with_its_line(file: Path) -> None:
    file.write_text(GOOD + "steps = = 3\n")
    error = refusal(file)
    assert "line 3" in str(error.value)
    assert error.remedy == "correct line 3: steps = = 3"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.toml").rule == "the configuration file does not exist"
    assert refusal(tmp_path).rule == "the configuration file is a folder, not a file"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal(binary).rule


# ── Overrides ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "parts", "value"),
    [
        ("a.b=3", ("a", "b"), 3),
        ("a=1e-5", ("a",), 1e-5),
        ("a=true", ("a",), True),
        ("a=none", ("a",), "none"),
        ("a=env.py:Env", ("a",), "env.py:Env"),
        ('a="x y"', ("a",), "x y"),
        ("a=x=y", ("a",), "x=y"),
        ("a=[1, 2]", ("a",), [1, 2]),
        ("a={b=1}", ("a",), {"b": 1}),
        ('a."b.c"=1', ("a", "b.c"), 1),
        ("a=1\nb=2", ("a",), "1\nb=2"),
        ("a=", ("a",), ""),
    ],
)
def test_an_override_is_a_toml_value_or_else_text(text: str, parts: tuple[str, ...], value: object) -> None:
    assert parse_override(text)[:2] == (parts, value)


@pytest.mark.parametrize("text", ["steps", "=3", "a..b=3", "a b=3", "a\nb=3"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"an override is written a\.b=value"):
        parse_override(text)


def test_overrides_reach_into_tables_and_replace_them_when_given_whole(file: Path) -> None:
    config = read_config(
        file,
        ["training.optimizer.learning_rate=1e-3", 'tasks={type="python", source="a:b"}', "tasks.options.n=5"],
    )
    assert config.training.optimizer.learning_rate == 1e-3
    assert config.tasks == PythonTasks(source="a:b", options={"n": 5})


def test_an_override_below_a_single_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is a single value, not a table"):
        apply_overrides({"model": {"path": "m"}}, ["model.path.x=1"])


def test_digits_are_text_where_the_configuration_holds_text(file: Path) -> None:
    assert read_config(file, ["name=2024"]).name == "2024"


def test_the_file_wins_over_the_base_and_overrides_win_over_the_file(file: Path) -> None:
    file.write_text(GOOD + "seed = 2\n")
    base = {"seed": 1, "training": {"steps": 7, "group_size": 3}}
    config = read_config(file, ["training.steps=8"], base)
    assert (config.seed, config.training.steps, config.training.group_size) == (2, 8, 3)


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_table_without_a_type_has_the_one_that_is_there_by_default(file: Path) -> None:
    algorithm = read_config(file, ["training.algorithm.clip_high=0.28"]).training.algorithm
    assert algorithm == GrpoConfig(clip_high=0.28)
    chosen = ["training.algorithm.clip_high=0.28", "training.algorithm.type=ppo"]
    assert read_config(file, chosen).training.algorithm == PpoConfig(clip_high=0.28)


def test_corrections_are_tables_in_an_array_and_read_back_equal(file: Path) -> None:
    given = 'training.corrections=[{type="tis",level="turn"},{type="version_drop",max_lag=3}]'
    config = read_config(file, [given])
    assert config.training.corrections == (TisConfig(level="turn"), VersionDropConfig(max_lag=3))
    file.write_text(dump_config(config))
    assert read_config(file) == config


@pytest.mark.parametrize(
    ("corrections", "rule", "value"),
    [
        ('[{type="tis",cap=-1}]', "training.corrections[0].cap is a number >= 1", -1),
        ('[{type="opsm"},{cap=1.0}]', "training.corrections.1.type is required", None),
        ('[{type="tis",kap=1}]', "a configuration has only known keys", "training.corrections.0.kap"),
        (
            '[{type="mis",low=3}]',
            "the low bound of the correction 'mis' is at most 1, or it drops what is on-policy",
            3.0,
        ),
        ('[{type="kimi",tau=inf}]', "training.corrections[0].tau is a finite number", float("inf")),
    ],
)
def test_a_wrong_correction_is_refused_by_its_place(file: Path, corrections: str, rule: str, value: object) -> None:
    error = refusal(file, f"training.corrections={corrections}")
    assert (error.rule, error.value) == (rule, value)


def test_a_key_of_another_correction_is_said_to_be_so(file: Path) -> None:
    error = refusal(file, 'training.corrections=[{type="tis",high=2}]')
    assert (error.rule, error.value) == ("a configuration has only known keys", "training.corrections.0.high")
    assert 'high belongs to training.corrections.0.type = "mis"' in (error.remedy or "")


def test_a_list_is_set_as_a_whole(file: Path) -> None:
    file.write_text(GOOD + '[[training.corrections]]\ntype = "tis"\n')
    error = refusal(file, "training.corrections.0.cap=3")
    assert error.rule == "training.corrections is set as a whole"
    assert "--set 'training.corrections=[{ … }, …]'" in (error.remedy or "")


def test_a_dumped_configuration_reads_back_equal(file: Path) -> None:
    config = read_config(
        file,
        [
            r'environment.options={a=1, "b.c"=[1, {x="é\n\u0001\"\\"}], d=1979-05-27T07:32:00Z, e={}, f=1e300}',
            r'environment.stop_strings=["\n\n", "#"]',
            "scorer.options.deep.er=1.0",
            'evaluation.tasks={type="reasoning_gym", dataset="chain_sum"}',
            "buffer.max_staleness=4",
            "training.lora.alpha=8",
            "name=quick",
        ],
    )
    file.write_text(dump_config(config))
    again = read_config(file)
    assert again == config
    assert again.environment.options["d"] == datetime.datetime(1979, 5, 27, 7, 32, tzinfo=datetime.UTC)


def test_every_default_can_be_left_out_of_a_dump(file: Path) -> None:
    """TOML has no null, so a key that may be None must be None by default."""
    config = read_config(file)
    text = dump_config(config)
    assert "None" not in text
    assert "depth" not in text
    file.write_text(text)
    assert read_config(file) == config


def test_toml_is_written_as_people_write_it() -> None:
    text = dump_toml({"a": True, "b": {"c": 1e-05, "d": {"e": "x"}}, "f": [1, "two"]})
    assert text == 'a = true\nf = [1, "two"]\n\n[b]\nc = 1e-05\n\n[b.d]\ne = "x"\n'


def test_what_toml_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"scorer\.options can be written as TOML"):
        dump_toml({"scorer": {"options": None}})


# ── From Python ──────────────────────────────────────────────────────────────────────────────────────────

TABLES = {
    "model": {"path": Path("m")},
    "tasks": {"type": "jsonl", "path": "t"},
    "training": {"steps": np.int64(7), "optimizer": {"betas": (0.8, 0.9)}, "lora": None},
    "buffer": {"max_staleness": 3},
}


def test_tables_of_python_are_read_as_those_of_a_file(file: Path) -> None:
    sets = ["training.steps=7", "training.optimizer.betas=[0.8, 0.9]", "buffer.max_staleness=3"]
    wanted = read_config(file, sets)
    assert RunConfig.from_dict(TABLES) == wanted
    assert RunConfig(**TABLES) == wanted
    assert config_of(TABLES) == config_of(wanted) == config_of(str(file), sets) == wanted
    assert RunConfig.from_dict(TABLES, ["seed=4"]).seed == 4


@pytest.mark.parametrize(
    ("key", "table", "rule", "value"),
    [
        ("model", {"pth": "m"}, "a configuration has only known keys", "model.pth"),
        ("model", "m", "model is a table", "m"),
        ("training", {"steps": 2.5}, "training.steps is an integer >= 1", 2.5),
        ("training", {"optimizer": {"eps": {1}}}, "training.optimizer.eps is a number > 0", {1}),
        ("sync", {"interval": 9}, "at least every buffer.max_staleness + 1 steps", "sync.interval = 9, max_sta"),
        ("trainig", {}, "a configuration has only known keys", "trainig"),
    ],
)
def test_wrong_tables_of_python_are_refused_as_those_of_a_file(
    key: str, table: object, rule: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({**TABLES, key: table})
    assert rule in caught.value.rule
    assert str(caught.value.value).startswith(str(value))


def test_an_object_with_a_wrong_value_is_refused_before_it_runs(file: Path) -> None:
    """Its class does not look at types; `headrace.train` does."""
    wrong = msgspec.structs.replace(read_config(file), seed="x")
    with pytest.raises(ConfigError, match=r"seed is an integer >= 0"):
        config_of(wrong)
    with pytest.raises(ConfigError, match=r"a dict of tables like a file's"):
        config_of(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        # What an override had changed stays, whatever the file says, while the file says the same.
        ({"seed": 1}, {"seed": 1}, {"seed": 5}),
        ({"seed": 1}, {"seed": 2}, {"seed": 2}),
        ({}, {"seed": 2}, {"seed": 2}),
        # A key that was taken out has its default again, unless an override has set it since.
        ({"seed": 5}, {}, {}),
        ({"seed": 1}, {}, {"seed": 5}),
        # Within tables.
        ({"t": {"a": 1}}, {"t": {"a": 1, "b": 8}}, {"seed": 5, "t": {"type": "x", "a": 3, "b": 8}}),
        ({"t": {"type": "x", "a": 3}}, {"t": {"type": "x"}}, {"seed": 5, "t": {"type": "x"}}),
        # A table of another type is another table; one that was taken out is gone.
        ({"t": {"a": 1}}, {"t": {"type": "y", "c": 1}}, {"seed": 5, "t": {"type": "y", "c": 1}}),
        ({"t": {"type": "x", "a": 1}}, {}, {"seed": 5}),
    ],
)
def test_only_what_was_edited_in_a_file_changes_what_is_stored(
    before: dict[str, Any], now: dict[str, Any], wanted: dict[str, Any]
) -> None:
    stored = {"seed": 5, "t": {"type": "x", "a": 3}}
    untouched = {} if "t" in {**before, **now} else {"t": stored["t"]}
    assert edited(stored, before, now) == untouched | wanted

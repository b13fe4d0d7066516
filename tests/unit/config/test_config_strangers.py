"""Any bytes, and any override, give a configuration or an InputError: soon, and in few words."""

from __future__ import annotations

import json
import math
import re
import time
import tracemalloc
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config.dump import dump_config
from headrace.config.load import load_config, read_config
from headrace.config.toml import MAX_BYTES, MAX_KEY_PARTS
from headrace.errors import ConfigError, InputError
from headrace.rollout.config import JsonlTasks
from headrace.rollout.tasks import load_tasks

GOOD = b'model.path = "m"\ntasks = { type = "jsonl", path = "t" }\n'
DIGITS = b"1" * 5000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_bytes(GOOD)
    return path


def refusal(file: Path, *overrides: str) -> str:
    """What the error says. It comes within two seconds, in at most 16 MiB and 2,000 characters."""
    begun = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read_config(file, overrides)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - begun < 2.0
    assert peak < 16 << 20
    text = str(caught.value)
    assert len(text) < 2000
    return text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a = " + b"[" * 5000, "is valid TOML .*nested too deep"),
        (b"a = " + b"{a=" * 5000, "is valid TOML .*nested too deep"),
        (b"a" + b".a" * 60_000 + b" = 1", f"a key has at most {MAX_KEY_PARTS} parts .at line 1.*; correct line 1"),
        (b"\n\n[" + b"a . " * 1000 + b"a]", f"a key has at most {MAX_KEY_PARTS} parts .at line 3"),
        (b"x" * MAX_BYTES, "is valid TOML"),
        (b"x" * (MAX_BYTES + 1), f"has at most {MAX_BYTES:,} bytes"),
        (b"seed = " + DIGITS, "is valid TOML .*Exceeds the limit"),
        (b"seed = 2001-02-30", "is valid TOML"),
        (b"a = 1\xff", "is UTF-8 text .*byte 0xff at 5"),
        (b"\xef\xbb\xbf" + GOOD, "is valid TOML .*line 1"),
        (b"\xff\xfe" + GOOD.decode().encode("utf-16-le"), "is UTF-8 text"),
        (b"\0", "is valid TOML"),
        (b"a = 1\nb = \n", "correct line 2: b ="),
        (b'a = "\xc2\x85"\nb\n', "correct line 2: b"),
        (b'a = """', "is valid TOML"),
        (GOOD + b"seed = 0x" + b"f" * 20_000, "seed is an integer .*too large to be written"),
        (GOOD + b"seed = 1979-05-27", "seed is an integer"),
        (GOOD + b"limits.start_s = nan", "limits.start_s is a"),
        (GOOD + b"limits.start_s = inf", "limits.start_s is a finite number"),
        (GOOD + b"limits.start_s = 1e300", "limits.start_s is at most 1,000,000,000 .got 1e.300.; lower"),
        (GOOD + b"limits.start_s = " + b"1" * 400, "limits.start_s"),
        (GOOD + b"training.optimizer.learning_rate = " + b"9" * 400, "learning_rate"),
        (GOOD + b"training.steps = 9007199254740993", "training.steps is at most 9,007,199,254,740,992"),
        (GOOD + b"engine.count = 1_000_000_000", "engine.count is an integer >= 1 and <= 1024 .got 1000000000"),
        (GOOD + b"environment.workers = 1_000_000_000", "environment.workers is an integer >= 1 and <= 1024"),
        (GOOD + b"engine.max_running = 1_000_000_000", "engine.max_running is an integer >= 1 and <= 65536"),
        (
            GOOD + b"environment.options.x = 18446744073709551616",
            "environment.options.x is an integer of at most 64",
        ),
        (GOOD + b"environment.options.x = " + b"[" * 120 + b"]" * 120, "is nested at most 100 deep"),
        (GOOD + b'name = "a\\u0000b"', "name is"),
        (b'model.path = "a\\u0000b"\ntasks = { type = "jsonl", path = "t" }', "model.path is a text without NUL"),
        (GOOD + b'"buffer.depth" = 3', "only known keys .got 'buffer.depth'"),
        (GOOD + b'"a\\nb`" = 3', "configuration"),
        (GOOD + b'buffer."x[0].y" = 3', "only known keys"),
        (GOOD + b"training.optimizer.betas.x = 3", "training.optimizer.betas is an array of 2"),
        (GOOD + b'training.lora.targets = ["a", 1979-05-27]', "training.lora.targets"),
        (GOOD + b'training.backend = "' + b"x" * 50_000 + b'"', "training.backend is one of .*characters"),
        (GOOD + b"k" * 50_000 + b" = 1", "only known keys"),
    ],
    ids=lambda value: value[-40:].decode("ascii", "replace") if isinstance(value, bytes) else "",
)
def test_a_strange_file_is_refused(file, content, says):
    file.write_bytes(content)
    assert re.search(says, refusal(file), re.DOTALL)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=\ud800", "an override is UTF-8 text"),
        ("\udcff=1", "an override is UTF-8 text"),
        ("seed=" + "1" * 5000, "an override's value is TOML, or text"),
        ("environment.options.x=" + "[" * 5000, "nested too deep"),
        ("a" + ".a" * 60_000 + "=1", "an override is written a.b=value"),
        ("x" * 100_000, "an override is written a.b=value"),
        ("=" * 100_000, "an override is written a.b=value"),
        ("training.optimizer.betas.x=1", "training.optimizer.betas"),
        ("training.optimizer.betas.7=1", "training.optimizer.betas"),
        ("seed.x.y=1", "seed"),
        ("environment.stop_strings=[1]", "environment.stop_strings"),
    ],
    ids=lambda value: ascii(value[:40]),
)
def test_a_strange_override_is_refused(file, override, says):
    assert says in refusal(file, override)


def test_an_override_beneath_a_list_in_the_file_is_refused(file):
    file.write_bytes(GOOD + b"training.optimizer.betas = [0.9, 0.95]\n")
    assert "is set as a whole" in refusal(file, "training.optimizer.betas.x=1")


def test_what_is_accepted_is_dumped_and_read_back(file, tmp_path):
    options = (
        b'\n[environment.options]\n"a.b" = nan\n'
        b'"\\"q\\"" = [1979-05-27, 07:32:00, -0.0, 1e-300, "\\u0085\\u007f\\n"]\n'
        b'"" = {"\xc3\xa9" = [[], {}], big = 18446744073709551615, low = -9223372036854775808}\n'
    )
    file.write_bytes(GOOD + options)
    config = read_config(file)
    other = tmp_path / "other.toml"
    other.write_text(dump_config(config), encoding="utf-8")
    back = read_config(other)
    assert dump_config(back) == dump_config(config)
    assert math.isnan(back.environment.options.pop("a.b"))
    assert math.isnan(config.environment.options.pop("a.b"))
    assert back == config


def test_a_path_that_no_system_has_is_an_input_error(project):
    for override in (f"tasks.path={'x' * 5000}", f"scorer.source={'x' * 5000}.py:f", f"model.path={'x' * 5000}"):
        with pytest.raises(InputError) as caught:
            load_config(project, [override])
        assert len(str(caught.value)) < 2000
    with pytest.raises(ConfigError, match="can be read"):
        read_config(Path("x" * 5000))


@pytest.mark.parametrize("line", ['{"prompt": ' + "[" * 100_000, '{"prompt": "p", "n": ' + "1" * 5000 + "}"])
def test_a_strange_task_file_is_refused_before_the_run_and_in_it(project, tmp_path, line):
    (tmp_path / "tasks.jsonl").write_text(line)
    with pytest.raises(ConfigError, match="is one JSON object"):
        load_config(project)
    with pytest.raises(ConfigError, match="is one JSON object"):
        load_tasks(JsonlTasks(path=str(tmp_path / "tasks.jsonl")))


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"n": 2**64}, "a task holds what a message can carry"),
        ({"text": "\ud800"}, "a task holds what a message can carry"),
        ({"deep": json.loads("[" * 400 + "]" * 400)}, "a task holds what a message can carry"),
        ({"prompt": [{"role": [{}]}, 3]}, 'number 1 has a "role" that is a text'),
    ],
)
def test_a_task_that_cannot_travel_is_named(tmp_path, more, rule):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "fine"}\n' + json.dumps({"prompt": "p"} | more) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_tasks(JsonlTasks(path=str(file)))
    assert caught.value.rule.startswith(f"{file}, line 2: ")
    assert caught.value.rule.endswith(rule)


def test_the_command_line_answers_with_exit_code_2(file, monkeypatch, capsys):
    file.write_bytes(b"a = " + b"[" * 5000)
    monkeypatch.setattr("sys.argv", ["headrace", "train", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is valid TOML" in capsys.readouterr().err

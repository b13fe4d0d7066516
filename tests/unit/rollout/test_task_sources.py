from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.errors import BadReference, ConfigError
from headrace.records import Task, decode, encode
from headrace.rollout.config import JsonlTasks, PythonTasks, ReasoningGymTasks
from headrace.rollout.tasks import TaskList, load_tasks


def written(tmp_path: Path, *lines: str) -> JsonlTasks:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return JsonlTasks(path=str(file))


def plain(tasks: tuple[Task, ...]) -> list[dict]:
    return [msgspec.structs.asdict(task) for task in tasks]


# ── jsonl ────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_line_becomes_a_task_and_other_keys_its_data(tmp_path):
    config = written(
        tmp_path,
        json.dumps({"prompt": "2 + 2 =", "answer": 4, "level": "easy", "tags": ["sum", 1]}),
        "",
        json.dumps({"id": "b7", "prompt": [{"role": "user", "content": "Γειά 你好"}]}, ensure_ascii=False),
    )
    assert plain(load_tasks(config)) == [
        {"id": "0", "prompt": "2 + 2 =", "answer": "4", "data": {"level": "easy", "tags": ["sum", 1]}},
        {"id": "b7", "prompt": [{"role": "user", "content": "Γειά 你好"}], "answer": None, "data": {}},
    ]


def test_a_limit_takes_the_first_tasks_and_reads_no_further(tmp_path):
    config = written(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}', "not JSON")
    assert [task.prompt for task in load_tasks(config, limit=2)] == ["a", "b"]


def test_a_malformed_line_is_named_by_file_and_line(tmp_path):
    config = written(tmp_path, '{"prompt": "a"}', "", '{"prompt": "b"')
    with pytest.raises(ConfigError) as caught:
        load_tasks(config)
    assert caught.value.rule == f"{config.path}, line 3: a line is one JSON object"


@pytest.mark.parametrize("line", ['{"question": "a"}', '["prompt"]', '"prompt"', "7"])
def test_a_line_without_a_prompt_is_refused(tmp_path, line):
    with pytest.raises(ConfigError, match=r'tasks.jsonl, line 1: a task has a "prompt"'):
        load_tasks(written(tmp_path, line))


def test_a_file_without_tasks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one task"):
        load_tasks(written(tmp_path, "", "  "))


# ── reasoning_gym ────────────────────────────────────────────────────────────────────────────────────────


def test_a_reasoning_gym_data_set_gives_its_own_questions_and_answers():
    import reasoning_gym

    config = ReasoningGymTasks(dataset="chain_sum", size=6, seed=3, options={"min_terms": 2, "max_terms": 2})
    entries = list(reasoning_gym.create_dataset("chain_sum", size=6, seed=3, min_terms=2, max_terms=2))
    tasks = load_tasks(config)
    assert [(t.id, t.prompt, t.answer) for t in tasks] == [
        (str(i), entry["question"], entry["answer"]) for i, entry in enumerate(entries)
    ]
    options = {"min_terms": 2, "max_terms": 2}
    recipe = {"dataset": "chain_sum", "size": 6, "seed": 3, "options": options, "index": 5}
    assert tasks[5].data["reasoning_gym"] == recipe
    assert len(load_tasks(config, limit=4)) == 4


@pytest.mark.parametrize("dataset", ["knights_knaves", "arc_agi", "spell_backward", "n_queens"])
def test_reasoning_gym_tasks_travel_between_processes(dataset):
    tasks = load_tasks(ReasoningGymTasks(dataset=dataset, size=3))
    assert plain(decode(encode(TaskList(tasks=tasks))).tasks) == plain(tasks)


def test_an_unknown_reasoning_gym_data_set_is_named():
    with pytest.raises(ConfigError, match="chain_summ") as caught:
        load_tasks(ReasoningGymTasks(dataset="chain_summ"))
    assert caught.value.exit_code == 2


def test_an_option_that_the_data_set_does_not_have_is_named():
    with pytest.raises(ConfigError, match="no_such_option"):
        load_tasks(ReasoningGymTasks(dataset="chain_sum", options={"no_such_option": 1}))


# ── python ───────────────────────────────────────────────────────────────────────────────────────────────

MODULE = """
from headrace.records import Task

def some(count):
    yield Task(id="own", prompt="mine", answer="1")
    for i in range(count):
        yield {"prompt": f"p{i}", "answer": i, "pair": (i, {"deep": {3}}), "odd": complex(0, 1)}

def endless():
    while True:
        yield {"prompt": "again"}

def broken():
    return 7

def empty():
    return []
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "my_tasks.py"
    file.write_text(MODULE)
    return str(file)


def test_a_function_yields_tasks_or_objects_whose_values_become_plain(source):
    tasks = load_tasks(PythonTasks(source=f"{source}:some", options={"count": 2}))
    assert plain(tasks) == [
        {"id": "own", "prompt": "mine", "answer": "1", "data": {}},
        {"id": "1", "prompt": "p0", "answer": "0", "data": {"pair": [0, {"deep": [3]}], "odd": "1j"}},
        {"id": "2", "prompt": "p1", "answer": "1", "data": {"pair": [1, {"deep": [3]}], "odd": "1j"}},
    ]
    assert plain(decode(encode(TaskList(tasks=tasks))).tasks) == plain(tasks)


def test_an_endless_function_is_read_up_to_the_limit(source):
    assert [t.id for t in load_tasks(PythonTasks(source=f"{source}:endless"), limit=3)] == ["0", "1", "2"]


def test_a_function_that_returns_no_tasks_is_refused(source):
    with pytest.raises(ConfigError, match=r"returns or yields tasks .*'int'"):
        load_tasks(PythonTasks(source=f"{source}:broken"))
    with pytest.raises(ConfigError, match="at least one task"):
        load_tasks(PythonTasks(source=f"{source}:empty"))
    with pytest.raises(BadReference, match="sum"):
        load_tasks(PythonTasks(source=f"{source}:sum"))

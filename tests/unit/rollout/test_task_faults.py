"""Every fault of a task names its file and line, or its function and number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.records import Task
from headrace.rollout.config import Columns, JsonlTasks, PythonTasks
from headrace.rollout.task_checks import Row, checked_tasks
from headrace.rollout.tasks import load_tasks


def of_bytes(tmp_path: Path, content: bytes) -> JsonlTasks:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content)
    return JsonlTasks(path=str(file))


def refusal(*values: Any, columns: Columns | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        list(
            checked_tasks(
                Row(f"f, line {number}", value, columns or Columns()) for number, value in enumerate(values, 1)
            )
        )
    return caught.value


def test_a_byte_order_mark_is_no_part_of_the_first_task(tmp_path: Path) -> None:
    config = of_bytes(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [task.prompt for task in load_tasks(config)] == ["a", "b"]


def test_a_byte_that_is_not_utf_8_is_named_by_its_line_and_place(tmp_path: Path) -> None:
    config = of_bytes(tmp_path, b'{"prompt": "a"}\n\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ConfigError) as caught:
        load_tasks(config)
    assert caught.value.rule == f"{config.path}, line 3: a task file is UTF-8 text"
    assert caught.value.value == "byte 0xe9 at 16 of the line"


@pytest.mark.parametrize(
    ("prompt", "rule", "got"),
    [
        (5, "a prompt is text or a list of messages", 5),
        (None, "a prompt is text or a list of messages", "null"),
        ({"role": "user"}, "a prompt is text or a list of messages", {"role": "user"}),
        ("", "a prompt is not empty", ""),
        ([], "a prompt is not empty", "[]"),
        (["hello"], "a prompt that is a list holds messages, and number 1 is an object with a role", "hello"),
        (
            [{"role": "user", "content": "a"}, 7],
            "a prompt that is a list holds messages, and number 2 is an object with a role",
            7,
        ),
        (
            [{"content": "a"}],
            'a prompt that is a list holds messages, and number 1 has a "role" that is a text',
            {"content": "a"},
        ),
        (
            [{"role": "user", "content": 3}],
            'a prompt that is a list holds messages, and number 1 has a "content" that is text',
            {"role": "user", "content": 3},
        ),
    ],
)
def test_a_prompt_of_a_wrong_kind_is_refused_where_it_stands(prompt: Any, rule: str, got: Any) -> None:
    error = refusal({"prompt": "fine"}, {"prompt": prompt})
    assert (error.rule, error.value) == (f"f, line 2: {rule}", got)
    assert error.remedy


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": []},
    ],
)
def test_messages_of_the_usual_kinds_are_tasks(message: dict[str, Any]) -> None:
    [task] = checked_tasks([Row("f, line 1", {"prompt": [message]})])
    assert task.prompt == [message]


def test_a_task_object_is_named_by_its_number_and_id(tmp_path: Path) -> None:
    error = refusal(Task(id="a", prompt="p"), Task(id="b", prompt=5))  # type: ignore[arg-type]
    assert error.rule == 'f, line 2 ("b"): a prompt is text or a list of messages'


def test_one_id_for_two_different_tasks_is_refused_and_a_task_may_come_twice() -> None:
    error = refusal({"id": "a", "prompt": "p"}, {"id": "a", "prompt": "q"})
    assert error.rule == ('f, line 2: tasks of one id are the same task; another with the id "a" is f, line 1')
    twice = [Row(f"f, line {n}", {"id": "a", "prompt": "p"}) for n in (1, 2)]
    assert [task.id for task in checked_tasks(twice)] == ["a", "a"]


def test_columns_have_the_names_that_the_configuration_says() -> None:
    columns = Columns(prompt_column="question", answer_column="solution", id_column="key")
    value = {"question": "p", "solution": 7, "key": 3, "answer": "of another kind", "id": 9}
    [task] = checked_tasks([Row("f, line 1", value, columns)])
    assert (task.id, task.prompt, task.answer) == ("3", "p", "7")
    assert task.data == {"answer": "of another kind", "id": 9}
    error = refusal({"question": "p"}, columns=columns)
    assert (error.rule, error.value) == ('f, line 1: a task has a "solution"', ["question"])
    error = refusal({"problem": "p"}, columns=JsonlTasks(path="f"))
    assert error.remedy == 'say which it is: prompt_column = "problem"'


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="different columns"):
        Columns(prompt_column="a", answer_column="a").check()


FUNCTIONS = """
def raises():
    yield {"prompt": "a"}
    raise KeyError("gold")

def needs(split):
    yield {"prompt": split}

def text():
    return "prompt"

async def later():
    return []
"""


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("raises", {}, ["its task 2 raised", "KeyError: 'gold' (mine.py, line 4)"]),
        ("needs", {}, ["missing a required argument: 'split'", "give split in tasks.options"]),
        ("needs", {"splt": 1}, ["correct tasks.options; it takes split"]),
        ("text", {}, ["returns or yields tasks (got 'str')"]),
        ("later", {}, ["returns or yields tasks (got 'coroutine')"]),
    ],
)
def test_a_function_that_gives_no_tasks_is_told_of_in_our_words(
    tmp_path: Path, name: str, options: dict[str, Any], says: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    with pytest.raises(Exception) as caught:
        load_tasks(PythonTasks(source=f"{tmp_path}/mine.py:{name}", options=options))
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    for text in says:
        assert text in str(caught.value)


def test_a_task_without_an_answer_is_refused_where_the_scorer_compares_with_one() -> None:
    rows = [Row("f, line 1", {"prompt": "p", "answer": 0}), Row("f, line 2", {"prompt": "q"})]
    with pytest.raises(ConfigError) as caught:
        list(checked_tasks(rows, "rules:ExactMatch"))
    assert caught.value.rule == 'f, line 2: a task has an "answer", which the scorer rules:ExactMatch compares with'
    assert [task.answer for task in checked_tasks(rows)] == ["0", None]

"""A prompt becomes tokens; the first tasks' prompts are looked at before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from headrace.errors import ConfigError
from headrace.records import Task
from headrace.rollout.config import TemplateConfig
from headrace.rollout.prompts import check_lengths, check_prompt, prompt_tokens, shown_messages
from headrace.rollout.single_turn import SingleTurn
from headrace.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }} "
    "{% endfor %}{{ mood }} {{ tools|length }}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    backend = Backend(models.WordLevel({"?": 0, "a": 1, "b": 2, "calm": 3, "1": 4}, "?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(tmp_path)


SETTINGS = TemplateConfig(variables={"mood": "calm"}, tools=({"name": "now"},))


def test_text_tokens_and_messages_become_tokens_and_messages_with_the_templates_settings(tokenizer):
    assert prompt_tokens("a b", tokenizer, SETTINGS) == [1, 2]
    assert prompt_tokens([7, 8], tokenizer, SETTINGS) == [7, 8]
    assert prompt_tokens([], tokenizer, SETTINGS) == []
    assert prompt_tokens([{"role": "user", "content": "b"}], tokenizer, SETTINGS) == [2, 3, 4]


def test_a_prompt_that_cannot_be_rendered_is_refused_with_its_messages_and_the_templates_words(tokenizer):
    prompt = [{"role": "user", "content": "a" * 200}, {"role": "tool", "content": "b", "name": "now"}]
    task = Task(id="t5", prompt=prompt)
    with pytest.raises(ConfigError) as caught:
        check_prompt(task, SingleTurn(system="a"), tokenizer, SETTINGS, "evaluation.tasks")
    told = str(caught.value)
    assert "and not those of task 't5' of evaluation.tasks" in told
    assert "which are {role: 'system', content: 'a'}, {role: 'user', content: '" + "a" * 79 + "…}" in told
    assert "{role: 'tool', content: 'b', name: 'now'} (got" in told
    assert "refuses these messages: no tools" in told
    assert caught.value.exit_code == 2


def test_a_prompt_in_order_and_a_users_environment_are_let_through(tokenizer):
    class Mine(SingleTurn):
        pass

    task = Task(id="0", prompt=[{"role": "tool", "content": "b"}])
    assert check_prompt(task, Mine(), tokenizer, SETTINGS, "tasks") is None
    assert check_prompt(task, None, tokenizer, SETTINGS, "tasks") is None
    assert check_prompt(Task(id="0", prompt="a"), SingleTurn(chat=True), tokenizer, SETTINGS, "tasks") == 3


def test_prompts_are_refused_where_none_of_the_first_leaves_room_for_a_token():
    check_lengths([40, 31, 50], "tasks", 32)
    check_lengths([40, None], "tasks", 32)
    check_lengths([], "tasks", 32)
    with pytest.raises(ConfigError) as caught:
        check_lengths([40, 32], "evaluation.tasks", 32)
    assert (
        caught.value.value
        == "the first prompts of evaluation.tasks have 32 tokens and more, engine.max_context = 32"
    )


def test_long_conversations_are_shown_by_their_beginning():
    many = [{"role": "user", "content": str(i)} for i in range(11)]
    assert shown_messages(many).endswith("{role: 'user', content: '7'}, and 3 more")
    assert shown_messages(["a"]) == "'a'"
    assert shown_messages("a") == "'a'"

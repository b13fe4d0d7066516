"""What a configuration says of the model's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.dump import dump_config
from headrace.config.load import config_of_text, load_config
from headrace.errors import ConfigError, InputError
from headrace.rollout.config import TemplateConfig

TEMPLATES = {"chat_template.jinja": "plain", "additional_chat_templates/rag.jinja": "rag"}


def add_templates(project: Path) -> None:
    folder = project.parent / "model"
    (folder / "additional_chat_templates").mkdir()
    for name, text in TEMPLATES.items():
        (folder / name).write_text(text)


def refusal(project: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(project, overrides)
    return str(caught.value)


def test_variables_tools_and_documents_are_read_and_written_down(project: Path) -> None:
    add_templates(project)
    given = [
        "environment.template.variables.enable_thinking=false",
        "environment.template.name=rag",
        "environment.template.tools=[{name='now', parameters={type='object', required=[]}}]",
        "environment.template.documents=[]",
    ]
    config = load_config(project, given)
    wanted = {
        "name": "rag",
        "variables": {"enable_thinking": False},
        "tools": [{"name": "now", "parameters": {"type": "object", "required": []}}],
        "documents": [],
    }
    assert config.environment.template.options() == wanted
    assert config_of_text(dump_config(config), "here") == config


def test_nothing_is_said_by_default() -> None:
    assert TemplateConfig().options() == {"name": None, "variables": {}, "tools": None, "documents": None}


@pytest.mark.parametrize("key", ["messages", "tools", "documents", "add_generation_prompt"])
def test_a_variable_does_not_stand_in_for_what_has_its_own_place(project: Path, key: str) -> None:
    add_templates(project)
    assert f"the template's own (got '{key}')" in refusal(project, f"environment.template.variables.{key}=[]")


def test_a_name_that_no_template_has_is_refused(project: Path) -> None:
    add_templates(project)
    told = refusal(project, "environment.template.name=rga")
    assert "is that of a chat template of the model folder (got 'rga'); it has default, rag" in told


def test_settings_of_a_template_that_is_not_there_are_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match="whose folder has a chat template"):
        load_config(project, ["environment.template.variables.enable_thinking=true"])

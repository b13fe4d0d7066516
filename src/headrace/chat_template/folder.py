"""The chat templates of a model folder, by name: where they are kept, and which one a conversation takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelFolderError
from headrace.model_files import read_text

TEMPLATE, MORE_TEMPLATES, SETTINGS = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
MAX_TEMPLATES = 64
"""A folder has at most as many templates beside its default one. The most in use are three."""


def template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The templates' text and the file that each is from, by their names. Raises ModelFolderError.

    Files outrank tokenizer_config.json, whose content is `settings`.
    """
    found: dict[str, tuple[str, str]] = {}
    if (text := read_text(folder / TEMPLATE)) is not None:
        found[DEFAULT] = (text, TEMPLATE)
    for file in _more_files(folder / MORE_TEMPLATES):
        if (text := read_text(file)) is not None:
            found[file.name.removesuffix(".jinja")] = (text, f"{MORE_TEMPLATES}/{file.name}")
    return found or {name: (text, SETTINGS) for name, text in _in_settings(settings).items()}


def choose_template(known: Mapping[str, tuple[str, str]], name: str | None, *, tools: bool) -> str | None:
    """The name of the template that transformers takes. None: the folder has no templates.

    It is the one asked for; else, with tools, the one for tools if it exists; else the default.
    """
    if name is not None and name not in known:
        raise ModelFolderError(
            "environment.template.name is that of a chat template of the model folder",
            name,
            f"it has {', '.join(sorted(known)) or 'none'}",
        )
    if name is None and known:
        name = WITH_TOOLS if tools and WITH_TOOLS in known else DEFAULT
        if name not in known:
            raise ModelFolderError(
                "of several chat templates one is the default, or environment.template.name chooses",
                sorted(known),
                "set environment.template.name",
            )
    return name


def _more_files(folder: Path) -> list[Path]:
    try:
        files = sorted(folder.glob("*.jinja"))
    except OSError as error:
        raise ModelFolderError(f"{MORE_TEMPLATES} must be readable", str(error), "check its rights") from error
    if len(files) > MAX_TEMPLATES:
        raise ModelFolderError(
            f"{MORE_TEMPLATES} must have at most {MAX_TEMPLATES} templates", len(files), "remove some"
        )
    return files


def _in_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    given = settings.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    named = given
    if isinstance(given, list):
        pairs = [(one.get("name"), one.get("template")) for one in given if isinstance(one, dict)]
        named = (
            dict(pairs) if len(pairs) == len(given) and all(isinstance(name, str) for name, _ in pairs) else None
        )
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise ModelFolderError(
            f"chat_template of {SETTINGS} must be a text, or objects of name and template",
            given,
            f"correct {SETTINGS}",
        )
    return named

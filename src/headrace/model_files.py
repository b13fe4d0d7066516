"""A model folder's small files, which a stranger may have written: read within limits, and told apart from junk.

Every reader of config.json, tokenizer_config.json, an index or a header goes through this module. What is wrong
with a file is a ModelFolderError, and finding it takes little memory beside the file's own size.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from headrace.errors import ModelFolderError

MAX_JSON_BYTES = 2 * 2**20
MAX_JSON_VALUES = 1 << 17
"""Parsed, a value may take a hundred times the bytes that it is written with."""
MAX_ID = 2**31 - 1
_MAX_DEPTH = 64
_TOO_DEEP = f"it is nested deeper than {_MAX_DEPTH} levels"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a character, by an escape: in pairs they are one, alone no text."""
_REPLACE = "download or save this file again"


def read_bytes(file: Path, most: int) -> bytes | None:
    """The file's content; None where there is no such file. Pipes and devices are refused: reading may not end.

    A link is followed wherever it leads, as in the hub's cache, whose folders consist of links.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelFolderError(f"{file.name} must be a regular file", str(file), "replace it")
        if found.st_size > most:
            raise ModelFolderError(f"{file.name} must not exceed {most} bytes", f"{found.st_size} bytes", _REPLACE)
        with file.open("rb") as stream:
            # Files of /proc say that they are empty.
            content = stream.read(min(found.st_size or most, most) + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file.name} must be readable", str(error), "check its name and rights") from error
    if len(content) > most:
        raise ModelFolderError(f"{file.name} must not exceed {most} bytes", str(file), _REPLACE)
    return content


def read_text(file: Path, most: int = MAX_JSON_BYTES) -> str | None:
    """The file's text; None where there is no such file."""
    content = read_bytes(file, most)
    return None if content is None else decoded(content, file.name)


def decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFolderError(f"{name} must be UTF-8 text", str(error), _REPLACE) from error


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file."""
    text = read_text(file)
    return None if text is None else parse_object(text, file.name)


def parse_object(text: str, name: str, what: str | None = None) -> dict[str, Any]:
    """`what` is said to be invalid where it is not the whole file `name`."""
    what = what or name

    def refuse(problem: str) -> NoReturn:
        raise ModelFolderError(f"{what} must be valid JSON", problem, f"repair or replace {name}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            once: set[str] = set()
            twice = ""
            for twice, _ in pairs:
                if twice in once:
                    break
                once.add(twice)
            refuse(f"the key {shortened(twice)!r} is there twice")
        return found

    if values_in(text) > MAX_JSON_VALUES:
        raise ModelFolderError(f"{what} must have at most {MAX_JSON_VALUES} values", values_in(text), _REPLACE)
    try:
        content = json.loads(
            text, object_pairs_hook=unique, parse_constant=lambda word: refuse(f"{word} is no number")
        )
    except RecursionError:
        refuse(_TOO_DEEP)
    except ValueError as error:
        refuse(str(error))
    if _SURROGATE.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except (UnicodeEncodeError, RecursionError) as error:
            refuse(str(error))
    if _depth(content) > _MAX_DEPTH:
        refuse(_TOO_DEEP)
    if not isinstance(content, dict):
        raise ModelFolderError(f"{what} must hold a JSON object", content, f"repair or replace {name}")
    return content


def values_in(text: str) -> int:
    """As many as there may be in a text of JSON; what is quoted in strings counts, too."""
    return text.count(",") + text.count("[") + text.count("{")


def _depth(content: Any) -> int:
    """At most one more than the deepest level allowed."""
    level, depth = [content], 0
    while depth <= _MAX_DEPTH:
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
        depth += 1
        if not level:
            break
    return depth


def token_ids(value: Any, key: str, name: str, vocabulary: int | None = None) -> tuple[int, ...]:
    """Token ids as `key` of the file `name` has them: one, a list, or none."""
    ids = () if value is None else value if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_ID:
            raise ModelFolderError(
                f"{key} of {name} must be a token id or a list of them", value, f"correct {name}"
            )
        if vocabulary is not None and token >= vocabulary:
            raise ModelFolderError(
                f"{key} of {name} must be below the model's vocabulary of {vocabulary}", token, f"correct {name}"
            )
    return tuple(ids)


def shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[:most]}…"

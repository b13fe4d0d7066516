"""Every mistake of a newcomer (newcomer_mistakes.toml) is answered in our own words, before anything starts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mistakes import make, mistakes, tell

from headrace.config import schema

LONGEST_S = 10.0


@pytest.mark.parametrize("mistake", [pytest.param(one, id=one["name"]) for one in mistakes()])
def test_a_mistake_is_told_with_what_was_wrong_and_what_to_do(
    mistake: dict[str, Any],
    tmp_path: Path,
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    trial: Callable[..., None],
) -> None:
    when = mistake.get("when", "start")
    trial("newcomer-mistakes", name=mistake["name"], when=when)
    make(mistake, tmp_path, small_model)
    before = time.process_time()
    told = tell(mistake, tmp_path, monkeypatch)
    assert time.process_time() - before < LONGEST_S

    if when == "fine":
        assert told.value.reward == mistake["is"]
        return
    assert told.started == (when == "note"), told.text
    for text in mistake["says"]:
        assert text.casefold() in told.text.casefold(), told.text
    if when == "note":
        return
    for word in ("Traceback", "error: unexpected"):
        assert word not in told.text, told.text
    if when == "start":
        assert told.code == 2, told.text


def test_the_keys_that_other_libraries_keys_lead_to_exist() -> None:
    known = {re.sub(r"\[\w+\]", "", key.path) for key in schema.all_keys()}
    optional = {"training.reference.coefficient"}
    for theirs, ours in schema._ELSEWHERE.items():
        assert ours.split()[0] in known | optional, theirs

"""Every mistake of a newcomer (newcomer_mistakes.toml) is answered in our own words, before anything starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mistakes import make, mistakes, tell

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
    assert not told.started, told.text
    for text in mistake["says"]:
        assert text.casefold() in told.text.casefold(), told.text
    for word in ("Traceback", "error: unexpected"):
        assert word not in told.text, told.text
    if when == "start":
        assert told.code == 2, told.text

"""A short form of fuzzing model folders. The long one is `python tests/fuzz/run.py TARGET`."""

from __future__ import annotations

from pathlib import Path

import pytest
from run import fuzz


@pytest.mark.parametrize("target", ["folder_weights", "folder_tokenizer", "chat_template"])
def test_changed_model_folders_cause_no_fault(target: str, tmp_path: Path) -> None:
    outcome = fuzz(target, inputs=200, size=0, seed=1, faults=tmp_path)
    assert outcome.faults == {}
    assert outcome.inputs >= 200
    assert outcome.refused >= 100

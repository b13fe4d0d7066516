"""What is allowed and probably not meant: said once at a run's start. Nothing here refuses anything."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.config.run import RunConfig
from headrace.errors import HeadraceError
from headrace.models.folder import read_config


def advice(config: RunConfig) -> list[str]:
    """Sentences, each with the keys it is about."""
    return [*_evaluation(config), *_context(config)]


def _evaluation(config: RunConfig) -> list[str]:
    held_out = config.evaluation.tasks
    if held_out is None or type(held_out) is not type(config.tasks) or _source(held_out) != _source(config.tasks):
        return []
    what = "evaluation.tasks are the tasks that are trained on, so that accuracy shows memory as well as skill"
    return [f"{what}; give tasks of their own"]


def _source(tasks: msgspec.Struct) -> dict[str, object]:
    """Without the size: the first of a generated data set are the same tasks."""
    return {key: value for key, value in msgspec.structs.asdict(tasks).items() if key != "size"}


def _context(config: RunConfig) -> list[str]:
    try:
        made_for = read_config(Path(config.model.path)).max_position_embeddings
    except HeadraceError:
        return []
    longest = config.engine.max_context
    if longest <= made_for or longest == type(config.engine)().max_context:
        return []
    what = (
        f"engine.max_context = {longest}, and the model was made for at most {made_for} (max_position_embeddings)"
    )
    return [f"{what}; what lies beyond may be of poor quality: lower engine.max_context"]

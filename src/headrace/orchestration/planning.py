"""The memory plan of a run on this machine: its model folders read, then the pure function."""

from __future__ import annotations

from pathlib import Path

from headrace.config.run import RunConfig
from headrace.errors import InputError
from headrace.memory_plan import Machine, Models, Plan, make_plan
from headrace.models.folder import CONFIG_FILE, read_config, weight_files
from headrace.models.shapes import parameter_count
from headrace.models.tensor_files import stored_dtype
from headrace.orchestration.machine import this_machine


def plan_of(config: RunConfig, folder: str | Path, machine: Machine | None = None) -> Plan | None:
    """For a run in `folder`. None where the model's folder cannot be read: others say so better."""
    if not (Path(config.model.path) / CONFIG_FILE).is_file():
        return None
    return make_plan(config, models_of(config), machine or this_machine(folder))


def models_of(config: RunConfig) -> Models:
    training = config.training
    reference = None if training.reference is None else training.reference.model
    teacher = None if training.distillation is None else training.distillation.teacher
    return Models(
        policy=read_config(Path(config.model.path)),
        reference_parameters=_parameters(reference),
        teacher_parameters=_parameters(teacher),
        stored=_stored(Path(config.model.path)),
    )


def _stored(folder: Path) -> str:
    """Where the weights cannot be read, others say so better."""
    try:
        return stored_dtype(folder)
    except (InputError, OSError):
        return "float32"


def _parameters(folder: str | None) -> int:
    """By its configuration or, where that is of no family known here, by the size of its files in 16 bits."""
    if folder is None:
        return 0
    try:
        return parameter_count(read_config(Path(folder)))
    except InputError:
        return sum(file.stat().st_size for file in weight_files(Path(folder))) // 2

"""The needs of the controller, the workers and the disk."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.run import RunConfig
from headrace.memory_plan.constants import CONTROLLER, WORKER
from headrace.memory_plan.needs import GIB, Models, Need, exported_itemsize, itemsize
from headrace.memory_plan.trainer import trained_parameters
from headrace.models.shapes import parameter_count

TOKEN_BYTES = 24
"""Of one token of an episode in the controller: id, log-prob, version and their copies on the way."""


def rest_needs(config: RunConfig, models: Models) -> Iterator[Need]:
    training = config.training
    # The buffer, what is generated, and the batch under way, at full length.
    groups = 2 * training.groups_per_batch + -(-config.generating_episodes // training.group_size)
    episodes = min(groups * training.group_size, config.generating_episodes + 2 * _batch(config))
    held = min(episodes * config.engine.max_context * TOKEN_BYTES, 4 * GIB)
    yield Need("controller", "host", "process", CONTROLLER)
    yield Need("controller", "host", "episodes", held)
    yield Need("workers", "host", "processes", (config.environment.workers + config.scorer.workers) * WORKER)
    yield from _disk_needs(config, models)


def _batch(config: RunConfig) -> int:
    return config.training.groups_per_batch * config.training.group_size


def _disk_needs(config: RunConfig, models: Models) -> Iterator[Need]:
    training, recording = config.training, config.recording
    trained, whole = trained_parameters(config, models.policy), parameter_count(models.policy)
    # checkpoint.py: float32 weights and both moments; one more than is kept while it is written, and no more than a
    # run comes to.
    count = min(training.keep_checkpoints + 1, (training.steps - 1) // training.checkpoint_every + 1)
    teacher = 0
    if training.distillation is not None and training.distillation.teacher is None:
        teacher = 2 * trained * itemsize(training.dtype)
    yield Need("trainer", "disk", "checkpoints", count * (12 * trained + teacher))
    # vault.py: the final model, and where there is an evaluation the best so far and the candidate.
    models_kept = 3 if config.evaluation.by_name else 1
    yield Need("trainer", "disk", "exported models", models_kept * exported_itemsize(config, models) * whole)
    # pipeline.py keeps runs of consecutive versions, as far as the allowance goes.
    bound = config.buffer.staleness_bound
    span = min((8 if bound is None else bound) + 2, recording.keep_versions_every)
    kept = min(training.steps + 1, span * (training.steps // recording.keep_versions_every + 1)) * 4 * trained
    yield Need("trainer", "disk", "kept versions", min(kept, int(recording.keep_versions_gib * GIB)))
    if config.sync.transport == "files":
        yield Need("weight sync", "disk", "versions on their way", 3 * trained * itemsize(config.engine.dtype))

"""A run's whole configuration: the rooms' own classes, composed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.buffer.config import BufferConfig
from headrace.config.base import Config
from headrace.config.evaluation import EvaluationConfig
from headrace.engine.config import EngineConfig, NativeEngineConfig
from headrace.errors import ConfigError
from headrace.rollout.config import EnvironmentConfig, TaskConfig
from headrace.scoring.config import ScorerConfig
from headrace.sync.config import SyncConfig
from headrace.telemetry.config import RecordingConfig
from headrace.training.adapter import NAME as ADAPTER
from headrace.training.config import TrainingConfig


class ModelConfig(Config):
    """The policy."""

    path: str
    """A Hugging Face folder: config.json, safetensors, tokenizer.json."""


class LimitsConfig(Config):
    """Deadlines: every wait has one."""

    start_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest a process may take to start and load its model or your code."""
    batch_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Longest the trainer waits for a batch."""
    step_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Longest one training step may take."""
    commit_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest the disk may take to make the ledger durable."""
    restarts: Annotated[int, Meta(ge=0)] = 3
    """How often a run whose trainer died goes on by itself, from its last checkpoint."""
    engine_restarts: Annotated[int, Meta(ge=0)] = 3
    """How often an engine's process is replaced when it died or is stuck. Then the run ends with the reason."""
    close_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest a process may take to end by itself before it is killed."""


class RunConfig(Config):
    """Everything a user can choose about a run."""

    model: ModelConfig
    tasks: TaskConfig
    name: str | None = None
    """The run's folder is runs/NAME. None: the configuration file's name."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    placement: Literal["side_by_side", "turns"] | None = None
    """How engines and trainer share a machine. `side_by_side`: both work at once. `turns`: while a batch is trained
    the engines sleep, and their memory (KV cache and weights) is free for the trainer; requests wait, and go on
    afterwards with their caches computed again. None: side by side, unless only turns fit into memory."""
    environment: EnvironmentConfig = EnvironmentConfig()
    scorer: ScorerConfig = ScorerConfig()
    engine: EngineConfig = NativeEngineConfig()
    buffer: BufferConfig = BufferConfig()
    training: TrainingConfig = TrainingConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    recording: RecordingConfig = RecordingConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def synchronous(self) -> bool:
        """Whether no group is generated while a batch is trained."""
        return self.buffer.staleness_bound == 0

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainer never work at the same time."""
        return self.synchronous or self.placement == "turns"

    @property
    def revive_s(self) -> float:
        """Longest that requests wait for an engine to be replaced and given weights, in seconds. Where it would
        take the memory that the trainer has its turn with, the end of the training step comes first."""
        step_s = self.limits.step_s if self.placement == "turns" else 0.0
        return self.limits.start_s + 4 * self.sync.deadline_s + step_s

    @property
    def generating_episodes(self) -> int:
        """So many at once fill the engines, and half as much again their queues."""
        running = self.engine.max_running * self.engine.count
        return -(-3 * running // 2)

    @property
    def payload(self) -> Literal["full", "delta", "adapter"]:
        """What is published."""
        return self.sync.payload or ("full" if self.training.lora is None else "adapter")

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that requests are sampled with, where the policy is one."""
        return None if self.training.lora is None else ADAPTER

    @property
    def served_engine(self) -> EngineConfig:
        """The engine as it is started: with room for the adapter that is trained."""
        lora, engine = self.training.lora, self.engine
        if lora is None or engine.max_adapters > 0:
            return engine
        return msgspec.structs.replace(engine, max_adapters=1, max_adapter_rank=lora.rank)

    def __post_init__(self) -> None:
        """Tables may be given where objects belong: `RunConfig(model={"path": …}, …)`."""
        if not any(isinstance(getattr(self, name), Mapping | list) for name in _SECTIONS):
            return
        whole = RunConfig.from_dict({name: getattr(self, name) for name in self.__struct_fields__})
        for name in self.__struct_fields__:
            msgspec.structs.force_setattr(self, name, getattr(whole, name))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], sets: Sequence[str] = ()) -> RunConfig:
        """The configuration that a file with these tables would give, under overrides like those of `--set`. It is
        checked in the same way; what it points at, the model say, is looked at when it is trained."""
        from headrace.config.load import config_of

        return config_of(dict(table), sets)

    def check(self) -> None:
        if self.name is not None and (self.name.strip(" .") == "" or any(char in self.name for char in "/\\\0")):
            raise ConfigError("name is that of one folder", self.name, "use letters, digits, - and _")
        bound = self.buffer.staleness_bound
        if bound is not None and self.sync.interval > bound + 1:
            raise ConfigError(
                "weights are published at least every buffer.max_staleness + 1 steps, or the trainer starves",
                f"sync.interval = {self.sync.interval}, max_staleness = {bound}",
                "lower sync.interval or raise buffer.max_staleness",
            )
        batch = self.training.groups_per_batch
        if self.buffer.depth is not None and self.buffer.depth < batch:
            raise ConfigError(
                "buffer.depth holds at least one batch (training.groups_per_batch)",
                f"{self.buffer.depth} < {batch}",
                "raise buffer.depth",
            )
        if self.buffer.window is not None and self.buffer.window < batch:
            raise ConfigError(
                "buffer.window holds at least one batch (training.groups_per_batch)",
                f"{self.buffer.window} < {batch}",
                "raise buffer.window",
            )
        if self.environment.max_tokens >= self.engine.max_context:
            raise ConfigError(
                "environment.max_tokens leaves room for a prompt within engine.max_context",
                f"{self.environment.max_tokens} >= {self.engine.max_context}",
                "lower environment.max_tokens or raise engine.max_context",
            )
        self._check_exploration()
        if self.placement == "turns" and self.sync.min_interval_s > 0:
            raise ConfigError(
                'placement = "turns" publishes while engines sleep, and sync.min_interval_s would keep them asleep',
                self.sync.min_interval_s,
                "use sync.interval, which counts steps, or leave sync.min_interval_s out",
            )
        self._check_payload()
        self._check_transport()

    def _check_exploration(self) -> None:
        """Where completions of a group are all the same, or a teacher is its pupil, nothing is ever learned."""
        sampling, teacher = self.environment.sampling, self.training.distillation
        for key, value, greedy in (
            ("temperature", sampling.temperature, 0),
            ("top_k", sampling.top_k, 1),
            ("min_p", sampling.min_p, 1),
        ):
            if value == greedy:
                raise ConfigError(
                    f"training samples, and environment.sampling.{key} = {greedy} takes the likeliest token: "
                    "completions of a group are all the same",
                    value,
                    f"set environment.sampling.{key}",
                )
        if teacher is None or teacher.teacher is None or self.training.learns_from_rewards:
            return
        if Path(teacher.teacher).absolute() == Path(self.model.path).absolute():
            raise ConfigError(
                "training.distillation.teacher is another model than model.path, or nothing ever moves the policy",
                teacher.teacher,
                "name another, or set training.distillation.rewards = true",
            )

    def _check_transport(self) -> None:
        if self.sync.transport == "in_process":
            raise ConfigError(
                'sync.transport = "in_process" needs engine and trainer in one process, and a run has one each',
                "in_process",
                'use "shared_memory"',
            )
        for key, device in (("engine.device", self.engine.device), ("training.device", self.training.device)):
            if self.sync.transport == "cuda_ipc" and device == "cpu":
                raise ConfigError(
                    f'sync.transport = "cuda_ipc" passes weights on within a GPU, and {key} is one',
                    device,
                    f'set {key} = "cuda", or sync.transport = "shared_memory"',
                )

    def _check_payload(self) -> None:
        lora = self.training.lora
        if (self.payload == "adapter") != (lora is not None):
            rule = (
                'sync.payload = "adapter" publishes the adapter of training.lora, and there is none'
                if lora is None
                else 'with training.lora only the adapter changes, which sync.payload = "adapter" publishes'
            )
            raise ConfigError(rule, self.payload, "leave sync.payload out")
        if lora is None:
            return
        if lora.rank > self.served_engine.max_adapter_rank:
            raise ConfigError(
                "engine.max_adapter_rank is at least training.lora.rank",
                f"{self.served_engine.max_adapter_rank} < {lora.rank}",
                "raise engine.max_adapter_rank, or leave engine.max_adapters out",
            )
        self.served_engine.check()


_SECTIONS = tuple(
    field.name for field in msgspec.structs.fields(RunConfig) if field.required or isinstance(field.default, Config)
)
"""The fields that are tables."""

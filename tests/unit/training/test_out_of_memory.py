"""Memory that runs out in the middle of a step: the step is the undisturbed one's within rounding, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_builders import TINY, random_batch, tiny_model

from headrace.errors import HeadraceError
from headrace.out_of_memory import is_out_of_memory
from headrace.training.config import LoraConfig, OptimizerConfig, ReferenceConfig, TrainingConfig
from headrace.training.trainer import LocalTrainer

TOLD = "CUDA out of memory. Tried to allocate 20.00 GiB"


class Failing(TorchDispatchMode):
    """Lets the operations with these numbers run out of memory, and counts all."""

    def __init__(self, *numbers: int, always: str = "", error: Exception | None = None):
        """`always`: the operation of this name never has memory."""
        super().__init__()
        self.numbers, self.count, self.always = set(numbers), 0, always
        self.error = error or torch.OutOfMemoryError(TOLD)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.numbers or (self.always and self.always in str(function)):
            raise self.error
        return function(*args, **(kwargs or {}))


def trainer(folder: Path, **settings: Any) -> LocalTrainer:
    config = TrainingConfig(
        **{"dtype": "float32", "device": "cpu", "optimizer": OptimizerConfig(learning_rate=1e-3), **settings}
    )
    owner = LocalTrainer(config, model=folder)
    owner.heard = []  # type: ignore[attr-defined]
    owner.on_event = lambda kind, fields: owner.heard.append((kind, fields))  # type: ignore[attr-defined]
    return owner


def same_step(one: LocalTrainer, other: LocalTrainer, metrics: list[dict[str, float]]) -> None:
    assert metrics[0].keys() == metrics[1].keys()
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    ours, theirs = (owner._optimizer.tensors() for owner in (one, other))
    for name in ours:
        if name.startswith("exp_avg/"):
            assert (ours[name] - theirs[name]).norm() <= 1e-5 * ours[name].norm() + 1e-9, name


def length(folder: Path, **settings: Any) -> int:
    """Operations of one undisturbed step."""
    with Failing() as counter:
        trainer(folder, **settings).train(random_batch(1, episodes=24))
    return counter.count


SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batch_tokens": 90},
    {"dtype": "bfloat16"},
    {"lora": LoraConfig(rank=4), "reference": ReferenceConfig()},
    {"recompute": True, "micro_batch_tokens": 150},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "cut", "bfloat16", "adapter", "recompute"])
@pytest.mark.parametrize("where", [0.1, 0.35, 0.5, 0.65, 0.8])
def test_a_step_that_runs_out_of_memory_anywhere_in_a_pass_is_the_undisturbed_step(
    tmp_path: Path, settings: dict[str, Any], where: float
) -> None:
    folder, batch = tiny_model(tmp_path), random_batch(1, episodes=24)
    undisturbed, disturbed = trainer(folder, **settings), trainer(folder, **settings)
    with Failing() as counter:
        expected = undisturbed.train(batch).metrics
    with Failing(int(where * counter.count)) as failing:
        metrics = disturbed.train(batch).metrics
    assert failing.count > counter.count  # it went back and did a part again
    ((kind, fields),) = disturbed.heard
    assert kind == "out_of_memory"
    assert fields["micro_batch_tokens"] < undisturbed._config.micro_batch
    if settings.get("dtype") == "bfloat16":
        # Other micro-batches round otherwise; a part that was counted twice would be far more.
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=1e-3)
    else:
        same_step(undisturbed, disturbed, [expected, metrics])
    assert disturbed.version == 1


def test_a_trainer_remembers_what_fitted(tmp_path: Path) -> None:
    folder, batch = tiny_model(tmp_path), random_batch(1, episodes=24)
    owner = trainer(folder)
    with Failing(60) as failing:
        owner.train(batch)
    assert owner._micro_batch < sum(len(t.context) + len(t.tokens) for e in batch.episodes for t in e.turns)
    first = failing.count
    with Failing() as counter:
        owner.train(random_batch(2, episodes=24, version=1))
    assert counter.count < first
    assert len(owner.heard) == 1


def test_memory_that_runs_out_again_and_again_is_asked_for_less_each_time(tmp_path: Path) -> None:
    folder, batch = tiny_model(tmp_path), random_batch(1, episodes=24)
    undisturbed, disturbed = trainer(folder), trainer(folder)
    expected = undisturbed.train(batch).metrics
    with Failing(50, 190, 500):
        metrics = disturbed.train(batch).metrics
    sizes = [fields["micro_batch_tokens"] for _, fields in disturbed.heard]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    same_step(undisturbed, disturbed, [expected, metrics])


def test_one_sequence_alone_that_does_not_fit_is_an_error_with_numbers_and_a_remedy(tmp_path: Path) -> None:
    folder, batch = tiny_model(tmp_path), random_batch(1, episodes=6)
    owner = trainer(folder)
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    with pytest.raises(HeadraceError) as told, Failing(always="roll"):
        owner.train(batch)
    assert "one of" in told.value.rule
    assert "tokens does not fit" in told.value.rule
    assert "training.recompute = true" in (told.value.remedy or "")
    assert TOLD in str(told.value)
    for name, tensor in owner.tensors().items():
        assert torch.equal(tensor, before[name])
    for parameter in owner._backend.parameters().values():
        assert not parameter.grad.any()
    # The memory is there again: the step is that of a trainer that was never disturbed.
    other = trainer(folder)
    same_step(other, owner, [other.train(batch).metrics, owner.train(batch).metrics])


def test_errors_of_other_kinds_are_not_taken_for_it(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    with (
        pytest.raises(RuntimeError, match="a kernel is wrong"),
        Failing(100, error=RuntimeError("a kernel is wrong")),
    ):
        owner.train(random_batch(1))
    assert owner.heard == []
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")
    )
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


def test_the_cpus_own_refusal_is_survived(tmp_path: Path) -> None:
    refused = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
    )
    folder, batch = tiny_model(tmp_path), random_batch(1, episodes=24)
    undisturbed, disturbed = trainer(folder), trainer(folder)
    expected = undisturbed.train(batch).metrics
    with Failing(120, error=refused):
        metrics = disturbed.train(batch).metrics
    same_step(undisturbed, disturbed, [expected, metrics])
    assert TINY["vocab_size"] == disturbed.vocabulary


def test_moments_that_do_not_fit_are_an_error_with_numbers_and_nothing_has_changed(tmp_path: Path) -> None:
    folder, batch = tiny_model(tmp_path), random_batch(1)
    owner = trainer(folder)
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    with pytest.raises(HeadraceError, match="the optimizer's moments") as told, Failing(always="_fused_adamw"):
        owner.train(batch)
    assert "training.lora" in (told.value.remedy or "")
    for name, tensor in owner.tensors().items():
        assert torch.equal(tensor, before[name])
    other = trainer(folder)
    same_step(other, owner, [other.train(batch).metrics, owner.train(batch).metrics])

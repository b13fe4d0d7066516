"""The trainer's needs: parameters, optimizer, the passes, and what it offers to engines."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.run import RunConfig
from headrace.memory_plan.activations import backward_bytes, logits_bytes, pass_bytes
from headrace.memory_plan.constants import (
    ALLOCATOR_SHARE,
    DEVICE_CONTEXT,
    HOST_WITH_CUDA,
    HOST_WITH_TORCH,
    PEFT_IMPORT,
)
from headrace.memory_plan.needs import CONTEXT, Machine, Models, Need, Where, itemsize
from headrace.models.config import ModelConfig
from headrace.models.shapes import EMBEDDING, parameter_count, parameter_shapes

WHO = "trainer"
SHARD_BYTES = 5 * 10**9
"""Largest file of an exported model (`models.io.MAX_SHARD_BYTES`)."""


def adapter_parameters(config: RunConfig, model: ModelConfig) -> int:
    """Numbers of the adapter that is trained; 0 where all weights are."""
    lora = config.training.lora
    if lora is None:
        return 0
    matrices = [
        shape
        for name, shape in parameter_shapes(model).items()
        if len(shape) == 2 and ".layers." in name and _is_target(name, lora.targets)
    ]
    return sum(lora.rank * (rows + columns) for rows, columns in matrices)


def _is_target(name: str, targets: tuple[str, ...]) -> bool:
    module = name.removesuffix(".weight")
    return any(module == target or module.endswith("." + target) for target in targets)


def trained_parameters(config: RunConfig, model: ModelConfig) -> int:
    return adapter_parameters(config, model) or parameter_count(model)


def step_tokens(config: RunConfig) -> int:
    """Most tokens of one forward-backward pass: the budget, or one longest sequence; no more than a batch has."""
    training, longest = config.training, config.engine.max_context
    batch = training.groups_per_batch * training.group_size * longest
    return min(max(training.micro_batch, longest), batch)


def is_on_device(config: RunConfig, machine: Machine) -> bool:
    return machine.has_device and config.training.device != "cpu"


def is_fused(config: RunConfig, machine: Machine) -> bool:
    """Whether `training.backends.base` gives the pass the fused operations."""
    training = config.training
    plain = training.backend != "native" or training.numerics == "exact" or training.kernels != "fused"
    return is_on_device(config, machine) and not plain


def trainer_needs(config: RunConfig, models: Models, machine: Machine) -> Iterator[Need]:
    training, model = config.training, models.policy
    size, lora = itemsize(training.dtype), training.lora
    where: Where = "device" if is_on_device(config, machine) else "host"
    whole, trained = parameter_count(model), trained_parameters(config, model)

    def need(what: str, amount: float, *, training_only: bool = False) -> Need:
        return Need(WHO, where, what, int(amount), "training" if training_only else "always")

    # backends/native.py: an adapter's model is loaded in the pass's dtype, otherwise the parameters are float32.
    if lora is not None:
        yield need("frozen weights", whole * size)
    # backends/masters.py: float32 masters, and one block of casts where the pass has another dtype.
    yield need("parameters", 4 * trained)
    if size != 4:
        yield need("casts", trained * size)
    # training/optimizer.py: gradients exist from the beginning, and AdamW keeps two moments.
    yield need("gradients", 4 * trained)
    yield need("optimizer", 8 * trained)
    yield from _other_models(config, models, where, size, trained)
    yield from _pass_needs(config, model, machine, where)
    yield from _outlet(config, where, trained)
    if where == "device":
        yield need(CONTEXT, DEVICE_CONTEXT)
        yield Need(WHO, "host", "process", HOST_WITH_CUDA + (PEFT_IMPORT if lora else 0))
        # training/checkpoint.py copies all moments to the host before it writes them. An exported model goes by
        # shards (models/io.py), but is whole on the host where an adapter is merged into it (backends/lora.py).
        exported = 4 * whole if lora else min(4 * whole, SHARD_BYTES)
        yield Need(WHO, "host", "checkpoint or exported model", max(8 * trained, exported))
    else:
        yield Need(WHO, "host", "process", HOST_WITH_TORCH + (PEFT_IMPORT if lora else 0))


def _other_models(config: RunConfig, models: Models, where: Where, size: int, trained: int) -> Iterator[Need]:
    training = config.training
    # training/reference.py: its weights once, in the pass's dtype; an adapter's frozen weights serve as they are.
    if training.reference is not None:
        shared = training.reference.model is None and training.lora is not None
        amount = 0 if shared else (models.reference_parameters or parameter_count(models.policy))
        yield Need(WHO, where, "reference policy", amount * size)
    # training/teacher.py: another model's weights, or the policy as it was and the copy that comes next.
    if training.distillation is not None:
        own = training.distillation.teacher is None
        yield Need(WHO, where, "teacher", (2 * trained if own else models.teacher_parameters) * size)


def _pass_needs(config: RunConfig, model: ModelConfig, machine: Machine, where: Where) -> Iterator[Need]:
    training, fused = config.training, is_fused(config, machine)
    size, tokens = itemsize(training.dtype), step_tokens(config)
    rank = 0 if training.lora is None else training.lora.rank
    kept = pass_bytes(model, tokens, size, fused=fused, recompute=training.recomputes, rank=rank)
    logits = logits_bytes(model, tokens, size, fused=fused, device_total=machine.device_total)
    if training.distillation is not None:
        # models/divergence.py: a chunk of the teacher's logits beside the student's.
        logits *= 2
    head = 0
    if training.lora is None and not fused:
        # models/logprobs.py adds up the head's gradient in float32; a tied embedding's waits for the other one.
        rows, columns = parameter_shapes(model)[EMBEDDING]
        head = 4 * rows * columns * (2 if model.tie_embeddings else 1)
    # The logits have gone when the backward pass of the layers begins.
    beyond = max(logits, backward_bytes(model, tokens, size)) + head
    yield Need(WHO, where, "activations", kept, "training")
    yield Need(WHO, where, "logits and their gradient", beyond, "training")
    if where == "device":
        yield Need(WHO, where, "allocator's rounding", int(ALLOCATOR_SHARE * (kept + beyond)), "training")


def _outlet(config: RunConfig, where: Where, trained: int) -> Iterator[Need]:
    """What a version lies in on its way (sync/sender.py, sync/transport/)."""
    image = trained * itemsize(config.engine.dtype)
    if config.payload == "delta":
        # sync/held.py: the last image, on the tensors' device.
        yield Need(WHO, where, "last published image", image)
    if config.sync.transport == "cuda_ipc":
        yield Need(WHO, where, "image on its way", image)
    elif config.sync.transport != "files":
        # The segment of shared_memory.py, or host memory of http.py and collective.py: engines map or receive it.
        who = "weight sync" if config.sync.transport == "shared_memory" else WHO
        yield Need(who, "host", "image on its way", image)

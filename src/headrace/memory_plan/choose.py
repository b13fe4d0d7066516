"""Chooses what the configuration leaves open so that everything fits, or says why nothing does and what would.

In this order, until it fits with a cache that keeps the engines busy: whole micro-batches, smaller ones, layers
that are computed again; side by side, and only where that cannot be, in turns. The cache gets what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as _changed
from typing import Any

import msgspec

from headrace.config.run import RunConfig
from headrace.errors import ConfigError
from headrace.memory_plan import engine as engines
from headrace.memory_plan.constants import CPU_CACHE_BYTES, HOST_SPARE_SHARE, SPARE_SHARE
from headrace.memory_plan.engine import engine_names, engine_needs
from headrace.memory_plan.needs import GIB, Machine, Models, Need, Where
from headrace.memory_plan.rest import rest_needs
from headrace.memory_plan.trainer import is_on_device, step_tokens, trainer_needs
from headrace.training.config import LoraConfig

MICRO_BATCHES = (16384, 8192, 4096)
"""Tokens, from the fastest to the smallest that still fills a GPU."""
BUSY_SHARE = 4
"""A cache for this part of all sequences at full length keeps engines busy: few are so long at once."""
BUSY_TOKENS = 2**19
"""With so many no engine is idle for want of cache, however long its sequences may become."""
PLACES: tuple[Where, ...] = ("device", "host", "disk")


@dataclass(frozen=True)
class Plan:
    """A settled configuration and what it needs. Where `problem` is set it does not fit."""

    config: RunConfig
    machine: Machine
    needs: tuple[Need, ...]
    chosen: dict[str, Any]
    """Values of keys that the configuration left open."""
    problem: str | None = None
    remedy: str | None = None

    def used(self, where: Where) -> int:
        """Most bytes in use at once, over all processes."""
        return _used(self.config, self.needs, where)

    def available(self, where: Where) -> int:
        return available(self.machine, where)

    def of(self, who: str, where: Where) -> int:
        """One process's own at its peak; with the weights on their way, which it maps, for trainer and engines."""
        own = [need for need in self.needs if need.where == where and need.who == who]
        if where == "host" and (who == "trainer" or who.startswith("engine")):
            own += [need for need in self.needs if need.where == where and need.who == "weight sync"]
        return _used(self.config, own, where)

    @property
    def processes(self) -> list[str]:
        return list(dict.fromkeys(need.who for need in self.needs))

    def check(self) -> None:
        """Raise ConfigError where it does not fit."""
        if self.problem is not None:
            raise ConfigError(self.problem, None, self.remedy)


def available(machine: Machine, where: Where) -> int:
    """What may be planned with: a little is left to everybody else."""
    if where == "device":
        return max(0, machine.device_bytes - int(SPARE_SHARE * machine.device_total))
    if where == "host":
        return int(machine.host_bytes * (1 - HOST_SPARE_SHARE))
    return machine.disk_bytes


def make_plan(config: RunConfig, models: Models, machine: Machine) -> Plan:
    """The plan for this configuration on this machine: the same for the same arguments."""
    plan = _first_that_fits(config, models, machine)
    if plan is not None:
        return plan
    options = list(_options(config, machine))
    least = min(
        (
            _with_cache(one, models, machine, one.engine.cache_tokens or _least_tokens(one, machine))
            for one in options
        ),
        key=_excess,
    )
    return _changed(least, problem=_problem(least), remedy=_remedy(config, models, machine, least))


def _first_that_fits(config: RunConfig, models: Models, machine: Machine) -> Plan | None:
    options = list(_options(config, machine))
    for placement in dict.fromkeys(option.placement for option in options):
        ours = [option for option in options if option.placement == placement]
        sized = [(option, _cache_tokens(option, models, machine)) for option in ours]
        fitting = [(option, tokens) for option, tokens in sized if tokens is not None]
        if not fitting:
            continue
        busy = [pair for pair in fitting if pair[1] >= _busy_tokens(pair[0], machine)]
        option, tokens = busy[0] if busy else max(fitting, key=lambda pair: pair[1])
        return _settled(config, option, models, machine, tokens)
    return None


# ── What is open ─────────────────────────────────────────────────────────────────────────────────────────────────


def _options(config: RunConfig, machine: Machine) -> Iterator[RunConfig]:
    """Every way to settle what is open, the fastest first; the cache's size is left."""
    training, seen = config.training, set()
    standby = config.engine.standby
    if standby is None:
        # An adapter's versions never fill a second set of the whole model.
        standby = config.payload != "adapter"
    for placement in _placements(config, machine):
        for recompute in _recomputes(config):
            for tokens in (training.micro_batch_tokens,) if training.micro_batch_tokens else MICRO_BATCHES:
                option = replaced(
                    config,
                    placement=placement,
                    training={"recompute": recompute, "micro_batch_tokens": tokens},
                    engine={"standby": standby},
                )
                kind = placement, recompute, step_tokens(option)
                if kind not in seen:
                    seen.add(kind)
                    yield option


def _placements(config: RunConfig, machine: Machine) -> tuple[str, ...]:
    if config.placement is not None:
        return (config.placement,)
    alike = is_on_device(config, machine) == engines.is_on_device(config, machine)
    possible = alike and config.sync.min_interval_s == 0
    return ("side_by_side", "turns") if possible else ("side_by_side",)


def _recomputes(config: RunConfig) -> tuple[bool, ...]:
    if config.training.recompute is not None:
        return (config.training.recompute,)
    return (False, True) if config.training.backend == "native" else (False,)


def replaced(config: RunConfig, **changes: Any) -> RunConfig:
    """With these values; a table's are given as a dictionary."""
    found = {
        key: msgspec.structs.replace(getattr(config, key), **value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return msgspec.structs.replace(config, **found)


# ── The cache ────────────────────────────────────────────────────────────────────────────────────────────────────


def _least_tokens(config: RunConfig, machine: Machine) -> int:
    """One sequence of full length."""
    size = engines.page_size(config, machine)
    return -(-config.engine.max_context // size) * size


def _busy_tokens(config: RunConfig, machine: Machine) -> int:
    if config.engine.cache_tokens is not None or not engines.is_on_device(config, machine):
        return 0
    wanted = min(engines.most_cache_tokens(config, machine) // BUSY_SHARE, BUSY_TOKENS)
    return max(wanted, _least_tokens(config, machine))


def _cache_tokens(config: RunConfig, models: Models, machine: Machine) -> int | None:
    """Of each engine, as many as there is room for; None where nothing fits."""
    least = config.engine.cache_tokens or _least_tokens(config, machine)
    if _excess(_with_cache(config, models, machine, least)) > 0:
        return None
    if config.engine.cache_tokens is not None:
        return config.engine.cache_tokens
    most = engines.most_cache_tokens(config, machine)
    if not engines.is_on_device(config, machine):
        most = max(least, min(most, CPU_CACHE_BYTES // engines.cache_token_bytes(config, models.policy)))
    size = engines.page_size(config, machine)
    low, high = least // size, most // size
    while low < high:
        middle = (low + high + 1) // 2
        fits = _excess(_with_cache(config, models, machine, middle * size)) <= 0
        low, high = (middle, high) if fits else (low, middle - 1)
    return max(least, low * size)


# ── Adding up ────────────────────────────────────────────────────────────────────────────────────────────────────


def _with_cache(config: RunConfig, models: Models, machine: Machine, tokens: int) -> Plan:
    needs = [*trainer_needs(config, models, machine)]
    for name in engine_names(config):
        needs += engine_needs(config, models, machine, name, tokens)
    needs += rest_needs(config, models)
    return Plan(config, machine, tuple(need for need in needs if need.bytes), {})


def _used(config: RunConfig, needs: Any, where: Where) -> int:
    of = {"always": 0, "training": 0, "generating": 0}
    for need in needs:
        if need.where == where:
            of[need.when] += need.bytes
    if config.placement == "turns":
        return of["always"] + max(of["training"], of["generating"])
    return sum(of.values())


def _excess(plan: Plan) -> int:
    """Bytes that are missing most, or, negative, to spare."""
    places = [where for where in PLACES if where != "device" or plan.machine.has_device]
    return max(plan.used(where) - plan.available(where) for where in places)


def _settled(given: RunConfig, option: RunConfig, models: Models, machine: Machine, tokens: int) -> Plan:
    config = replaced(option, engine={"cache_tokens": tokens})
    chosen = {
        key: now
        for key, before, now in (
            ("placement", given.placement, config.placement),
            ("training.micro_batch_tokens", given.training.micro_batch_tokens, config.training.micro_batch_tokens),
            ("training.recompute", given.training.recompute, config.training.recompute),
            ("engine.standby", given.engine.standby, config.engine.standby),
            ("engine.cache_tokens", given.engine.cache_tokens, config.engine.cache_tokens),
        )
        if before is None
    }
    plan = _with_cache(config, models, machine, tokens)
    return _changed(plan, chosen=chosen)


# ── Refusing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _problem(plan: Plan) -> str:
    """The arithmetic of the place that lacks most."""
    where = max(PLACES, key=lambda place: plan.used(place) - plan.available(place))
    name = {"device": plan.machine.device_name or "the GPU", "host": "host memory", "disk": "the disk"}[where]
    parts = []
    for who in plan.processes:
        own = [need for need in plan.needs if need.who == who and need.where == where]
        if own:
            listed = ", ".join(f"{need.what} {gib(need.bytes)}" for need in sorted(own, key=lambda n: -n.bytes)[:6])
            parts.append(f"{who} {gib(sum(need.bytes for need in own))} ({listed})")
    how = ", even in turns" if plan.config.placement == "turns" else ""
    return (
        f"a run fits into {name}; this one needs {gib(plan.used(where))} GiB of {gib(plan.available(where))}{how}, "
        f"with the smallest cache: {'; '.join(parts)}"
    )


def _remedy(config: RunConfig, models: Models, machine: Machine, least: Plan) -> str:
    for text, changed in _smaller(config):
        if _first_that_fits(changed, models, machine) is not None:
            return f"with {text} it fits"
    where = max(PLACES, key=lambda place: least.used(place) - least.available(place))
    if where == "disk":
        return "free space on the disk, or set training.keep_checkpoints = 1 and recording.keep_versions_gib = 0"
    return "use a smaller model or a machine with more memory"


def _smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes from the least to the greatest, alone and then together with an adapter."""
    training = config.training
    yield from _one_change(config)
    if training.keep_checkpoints > 1:
        yield (
            "training.keep_checkpoints = 1 and recording.keep_versions_gib = 0",
            replaced(config, training={"keep_checkpoints": 1}, recording={"keep_versions_gib": 0.0}),
        )
    if training.lora is None and training.numerics == "fast" and config.sync.payload is None:
        for rank in (32, 8):
            adapted = replaced(config, training={"lora": LoraConfig(rank=rank)})
            yield f"training.lora.rank = {rank}, an adapter in place of all weights,", adapted
        for text, changed in _one_change(adapted):
            yield f"training.lora.rank = 8 and {text}", changed


def _one_change(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    training, engine = config.training, config.engine
    if training.recompute is False and training.backend == "native":
        yield "training.recompute = true", replaced(config, training={"recompute": True})
    if engine.standby is True and config.payload == "adapter":
        yield "engine.standby = false", replaced(config, engine={"standby": False})
    if engine.cache_tokens is not None:
        yield "engine.cache_tokens left out", replaced(config, engine={"cache_tokens": None})
    if training.micro_batch_tokens is not None:
        tokens = training.micro_batch_tokens // 2
        while tokens >= 512:
            yield (
                f"training.micro_batch_tokens = {tokens}",
                replaced(config, training={"micro_batch_tokens": tokens}),
            )
            tokens //= 2
    if config.placement == "side_by_side" and config.sync.min_interval_s == 0:
        yield 'placement = "turns"', replaced(config, placement="turns")
    if engine.count > 1:
        yield "engine.count = 1", replaced(config, engine={"count": 1})
    context = engine.max_context // 2
    while context >= 256:
        tokens = min(config.environment.max_tokens, context * 3 // 4)
        changed = replaced(
            config, engine={"max_context": context, "cache_tokens": None}, environment={"max_tokens": tokens}
        )
        also = "" if tokens == config.environment.max_tokens else f" and environment.max_tokens = {tokens}"
        yield f"engine.max_context = {context}{also}", changed
        context //= 2


def gib(amount: float) -> str:
    return f"{amount / GIB:.1f}" if amount >= GIB / 10 else f"{amount / GIB:.2f}"

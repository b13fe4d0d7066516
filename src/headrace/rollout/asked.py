"""Sampling parameters that an environment asks for in one call, in place of the configuration's. No torch here."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.bounds import SystemFailure, clip
from headrace.records import Record, Sampling


class Asked(Record):
    """None: as the configuration has it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, sampling: Sampling) -> Sampling:
        """What the call is sampled with, where the others are sampled with `sampling`."""
        return msgspec.structs.replace(sampling, **self.given)


def checked(temperature: Any, top_p: Any, top_k: Any, min_p: Any) -> Asked:
    """What a call asked for. Raises SystemFailure for what cannot be served, or not be trained on."""
    asked = Asked(
        temperature=_number("temperature", temperature, float),
        top_p=_number("top_p", top_p, float),
        top_k=_number("top_k", top_k, int),
        min_p=_number("min_p", min_p, float),
    )
    fault = greedy(asked.given) or asked.over(Sampling()).fault()
    if fault is not None:
        raise SystemFailure("bad_request", f"policy.sample: {fault[0]} (got {fault[1]})")
    return asked


def greedy(given: dict[str, Any]) -> tuple[str, Any] | None:
    """(rule, value) of a parameter that leaves the likeliest token alone: such a token has nothing to teach."""
    for name, value, rule in (
        ("temperature", 0, "a temperature is above 0, as a turn that is trained on is sampled"),
        ("top_k", 1, "top_k is 0 or at least 2, as a turn that is trained on is sampled"),
        ("min_p", 1, "min_p is below 1, as a turn that is trained on is sampled"),
    ):
        if given.get(name) == value:
            return rule, value
    return None


def _number(name: str, value: Any, kind: type) -> Any:
    if value is None:
        return None
    try:
        number = kind(value)
        if isinstance(value, bool | str) or number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        word = "a whole number" if kind is int else "a number"
        shown = clip(repr(value), 100)
        raise SystemFailure("bad_request", f"policy.sample: {name} is {word} (got {shown})") from None
    return number

"""Rotary position parameters as data, read from and written to config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import ModelFolderError

DEFAULT_THETA = 10_000.0
# Beyond `rope_type` and `rope_theta`: the keys each kind needs, and those it may have.
REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
OPTIONAL_KEYS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
}
# The least and the largest value of each number: beyond, a frequency would be none.
_RANGES: dict[str, tuple[float, float]] = {
    "factor": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "short_factor": (1e-6, 1e6),
    "long_factor": (1e-6, 1e6),
}
_LEAST_THETA, _MOST_THETA = 1.001, 1e15
_WITH_ORIGINAL_WINDOW = ("yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Which rotation, its base, and the numbers of its scaling under their Hugging Face names."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    original_max_position_embeddings: int | None = None
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older)."""
        for key in ("rope_scaling", "rope_parameters"):
            if not isinstance(raw.get(key), Mapping | None):
                raise ModelFolderError(f"{key} must be an object", raw[key], "correct config.json")
        given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        if any(isinstance(value, dict) for value in given.values()):
            raise ModelFolderError(
                "all layers must share one set of rope parameters",
                sorted(given),
                "use a model without per-layer rotation",
            )
        kind = given.get("rope_type", given.get("type"))
        kind = "default" if kind is None else kind
        if not isinstance(kind, str) or kind not in REQUIRED_KEYS:
            raise ModelFolderError(
                "rope_type must be a known one", kind, f"the known ones are: {', '.join(REQUIRED_KEYS)}"
            )
        share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if share not in (None, 1, 1.0):
            raise ModelFolderError("partial_rotary_factor must be 1", share, "use a model that rotates whole heads")
        holder = given if given.get("rope_theta") is not None else raw
        theta = number_of(holder, "rope_theta", DEFAULT_THETA, least=_LEAST_THETA, most=_MOST_THETA)
        if kind in _WITH_ORIGINAL_WINDOW:
            outside = raw.get("original_max_position_embeddings")
            if outside is not None:
                given["original_max_position_embeddings"] = outside
            elif given.get("original_max_position_embeddings") is None:
                given["original_max_position_embeddings"] = max_position_embeddings
        for key in REQUIRED_KEYS[kind]:
            if given.get(key) is None:
                raise ModelFolderError(f"rope_type {kind!r} needs the key {key!r}", given, "add it to config.json")
        wanted = (*REQUIRED_KEYS[kind], *OPTIONAL_KEYS.get(kind, ()))
        values = {key: _checked(given, key) for key in wanted if given.get(key) is not None}
        config = cls(kind=kind, theta=theta, **values)
        config._check_relations()
        return config

    def _check_relations(self) -> None:
        """Raise ModelFolderError where one number would be divided by another that is none."""
        for less, more, default in (
            ("low_freq_factor", "high_freq_factor", (1.0, 4.0)),
            ("beta_slow", "beta_fast", (1.0, 32.0)),
        ):
            low, high = getattr(self, less) or default[0], getattr(self, more) or default[1]
            if low >= high:
                raise ModelFolderError(f"{less} must be below {more}", (low, high), "correct config.json")
        if self.kind == "longrope" and self.original_max_position_embeddings == 1:
            raise ModelFolderError(
                "original_max_position_embeddings must be above 1 for longrope", 1, "correct config.json"
            )

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a config.json that transformers 5 reads."""
        written: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        for key in (*REQUIRED_KEYS[self.kind], *OPTIONAL_KEYS.get(self.kind, ())):
            value = getattr(self, key)
            if value is not None:
                written[key] = list(value) if isinstance(value, tuple) else value
        return written


def _checked(given: Mapping[str, Any], key: str) -> Any:
    value = given[key]
    if key == "truncate":
        if not isinstance(value, bool):
            raise ModelFolderError(f"{key} must be true or false", value, "correct config.json")
        return value
    if key == "original_max_position_embeddings":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelFolderError(f"{key} must be a positive integer below 2^31", value, "correct config.json")
        return value
    least, most = _RANGES[key]
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple):
            raise ModelFolderError(f"{key} must be a list of numbers", value, "correct config.json")
        return tuple(checked_number(one, f"each number of {key}", least, most) for one in value)
    return checked_number(value, key, least, most)


def number_of(known: Mapping[str, Any], key: str, default: float, *, least: float, most: float) -> float:
    value = known.get(key)
    return default if value is None else float(checked_number(value, key, least, most))


def checked_number(value: Any, what: str, least: float, most: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ModelFolderError(f"{what} must be a number from {least:g} to {most:g}", value, "correct config.json")
    return value

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
        given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        if any(isinstance(value, dict) for value in given.values()):
            raise ModelFolderError(
                "all layers must share one set of rope parameters",
                sorted(given),
                "use a model without per-layer rotation",
            )
        kind = given.get("rope_type", given.get("type")) or "default"
        if kind not in REQUIRED_KEYS:
            raise ModelFolderError(
                "rope_type must be a known one", kind, f"the known ones are: {', '.join(REQUIRED_KEYS)}"
            )
        share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if share not in (None, 1, 1.0):
            raise ModelFolderError("partial_rotary_factor must be 1", share, "use a model that rotates whole heads")
        theta = given.get("rope_theta")
        if theta is None:
            theta = raw.get("rope_theta")
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
        values = {key: _frozen(given[key]) for key in wanted if given.get(key) is not None}
        return cls(kind=kind, theta=float(DEFAULT_THETA if theta is None else theta), **values)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a config.json that transformers 5 reads."""
        written: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        for key in (*REQUIRED_KEYS[self.kind], *OPTIONAL_KEYS.get(self.kind, ())):
            value = getattr(self, key)
            if value is not None:
                written[key] = list(value) if isinstance(value, tuple) else value
        return written


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

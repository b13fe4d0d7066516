"""A model's shape as data, parsed from a Hugging Face config.json. Imports no torch.

The differences between the families are fields here (biases, query/key norms, head size), so that
`transformer.py` needs no branch on a family's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.errors import ModelFolderError
from headrace.model_files import MAX_ID, shortened, token_ids
from headrace.models.rope_config import RopeConfig, number_of

# What transformers assumes where a config.json of that family is silent.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Keys that fields stand for, or that follow from them: never carried along in `extra`.
# fmt: off
_INTERPRETED_KEYS = frozenset((
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "hidden_act", "max_position_embeddings", "initializer_range",
    "bos_token_id", "eos_token_id", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
    "original_max_position_embeddings", "use_sliding_window", "sliding_window", "max_window_layers",
    "layer_types", "quantization_config",
))
# fmt: on


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to build, size and name the parameters of a causal language model."""

    family: str
    """`llama`, `qwen2` (also Qwen2.5) or `qwen3`: Hugging Face's `model_type`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    """The output head is the embedding matrix; there is no `lm_head.weight`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are RMS-normalised per head before rotation (Qwen3)."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Keys of the config.json that change nothing here (dtype, token ids, …), written back by `to_hf`."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFolderError(
                "num_attention_heads must be a multiple of num_key_value_heads",
                (self.num_heads, self.num_kv_heads),
                "correct config.json",
            )
        if self.head_dim % 2:
            raise ModelFolderError("head_dim must be even to be rotated", self.head_dim, "correct config.json")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name)
            if factors is not None and len(factors) != self.head_dim // 2:
                raise ModelFolderError(
                    f"{name} must have one number per rotated pair ({self.head_dim // 2})",
                    len(factors),
                    "correct config.json",
                )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_sequence_length(self) -> int | None:
        """The longest sequence that can be rotated, or None where rotation has no limit of its own.

        Dynamic NTK and longrope choose their frequencies by the sequence's length. Past this one the keys
        already cached would have been rotated by other frequencies than a full pass uses, so a sampled
        token's log-prob could not be recomputed; such sequences are refused.
        """
        if self.rope.kind == "dynamic":
            return self.max_position_embeddings
        if self.rope.kind == "longrope":
            return self.rope.original_max_position_embeddings
        return None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Parse a config.json's dictionary. Raises ModelFolderError for what cannot be run exactly."""
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in ARCHITECTURES:
            raise ModelFolderError("model_type must be a known architecture", family, _what_would_run(raw))
        known = {**_FAMILY_DEFAULTS[family], **raw}
        _refuse_what_would_be_computed_differently(known)
        num_heads = _size(known, "num_attention_heads")
        hidden_size = _size(known, "hidden_size")
        attention_bias = _flag(known, "attention_bias")
        max_positions = _size(known, "max_position_embeddings")
        vocabulary = _size(known, "vocab_size")
        _check_special_ids(raw, vocabulary)
        return cls(
            family=family,
            vocab_size=vocabulary,
            hidden_size=hidden_size,
            intermediate_size=_size(known, "intermediate_size"),
            num_layers=_size(known, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_size(known, "num_key_value_heads", default=num_heads),
            head_dim=_size(known, "head_dim", default=hidden_size // num_heads),
            # Smaller than the least normal float32 it would be nothing to compute with.
            rms_norm_eps=number_of(known, "rms_norm_eps", 1e-6, least=2.0**-126, most=1.0),
            tie_embeddings=_flag(known, "tie_word_embeddings"),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and _flag(known, "mlp_bias"),
            qk_norm=family == "qwen3",
            rope=RopeConfig.from_hf(known, max_positions),
            max_position_embeddings=max_positions,
            initializer_range=number_of(known, "initializer_range", 0.02, least=0.0, most=1e6),
            bos_id=next(iter(token_ids(known.get("bos_token_id"), "bos_token_id", "config.json")), None),
            eos_ids=token_ids(known.get("eos_token_id"), "eos_token_id", "config.json"),
            extra={key: value for key, value in raw.items() if key not in _INTERPRETED_KEYS},
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json dictionary that transformers 5 loads as this very model."""
        written: dict[str, Any] = {
            **self.extra,
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "rope_parameters": self.rope.to_hf(),
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
        }
        if self.family == "qwen2" and self.head_dim == self.hidden_size // self.num_heads:
            del written["head_dim"]
        if self.family != "qwen2":
            written["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            written["mlp_bias"] = self.mlp_bias
        else:
            written["use_sliding_window"] = False
        return written

    def with_extra(self, **keys: Any) -> ModelConfig:
        """The same model with further harmless keys for its config.json."""
        return replace(self, extra={**self.extra, **keys})


def _what_would_run(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    known = f"a run's policy is one of: {', '.join(ARCHITECTURES)}"
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return f"{known}; {shortened(names[0], 40)} is no causal language model at all"
    trains = 'another causal model can be trained (training.backend = "transformers") in a loop of your own'
    return f"{known}: no engine samples others; {trains}" if names else known


def _refuse_what_would_be_computed_differently(known: Mapping[str, Any]) -> None:
    _check_dtype(known)
    if known.get("is_causal") is not None and not _flag(known, "is_causal"):
        raise ModelFolderError(
            "is_causal must not be false: a token is sampled from those before it, and sees no later one",
            False,
            "use a causal language model, or correct config.json",
        )
    if known.get("per_layer_config"):
        raise ModelFolderError(
            "all layers must be alike (no per_layer_config)", known["per_layer_config"], "use another model"
        )
    activation = known.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelFolderError("hidden_act must be silu", activation, "use a model with gated SiLU layers")
    if known.get("quantization_config"):
        raise ModelFolderError(
            "weights must not be quantised (quantization_config)",
            known["quantization_config"],
            "use the model's unquantised folder",
        )
    if known["model_type"] == "llama":
        return
    layers = _size(known, "num_hidden_layers")
    windowed = _flag(known, "use_sliding_window")
    window = known.get("sliding_window", 4096) if windowed else None
    first_windowed = known.get("max_window_layers", 28)
    if windowed and type(first_windowed) is not int:
        raise ModelFolderError("max_window_layers must be an integer", first_windowed, "correct config.json")
    layer_types = known.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or len(layer_types) != layers):
        raise ModelFolderError(
            f"layer_types must be a list of {layers}, one a layer", layer_types, "correct config.json"
        )
    if not layer_types:
        layer_types = ["sliding_attention"] if window is not None and first_windowed < layers else []
    if any(kind != "full_attention" for kind in layer_types):
        raise ModelFolderError(
            "every layer must attend to its whole past (no sliding window)",
            {"sliding_window": window, "max_window_layers": first_windowed},
            "use a model without a sliding window, or set use_sliding_window to false in config.json",
        )


def _check_dtype(known: Mapping[str, Any]) -> None:
    """Weights are cast to what the run asks for; a folder that says anything but a float is damaged."""
    for key in ("dtype", "torch_dtype"):
        dtype = known.get(key)
        if dtype is not None and (not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _DTYPES):
            raise ModelFolderError(f"{key} must be one of {', '.join(_DTYPES)}", dtype, "correct config.json")


def _check_special_ids(raw: Mapping[str, Any], vocabulary: int) -> None:
    """Only what the file says itself: a family's default may lie beyond a tiny model's vocabulary."""
    if isinstance(raw.get("bos_token_id"), list):
        raise ModelFolderError("bos_token_id must be one token id", raw["bos_token_id"], "correct config.json")
    for key in ("bos_token_id", "eos_token_id"):
        token_ids(raw.get(key), key, "config.json", vocabulary)


def _size(known: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = known.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_ID:
        raise ModelFolderError(
            f"config.json needs {key!r}, a positive integer below 2^31", value, "correct config.json"
        )
    return value


def _flag(known: Mapping[str, Any], key: str) -> bool:
    value = known.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelFolderError(f"{key} must be true or false", value, "correct config.json")
    return bool(value)

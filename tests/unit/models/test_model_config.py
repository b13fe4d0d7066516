from __future__ import annotations

import json

import pytest
import transformers

from headrace.errors import ModelFolderError
from headrace.models.config import ModelConfig
from headrace.models.rope_config import RopeConfig

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 64,
}


def test_an_older_qwen2_config_is_read_field_by_field():
    assert ModelConfig.from_hf(QWEN2) == ModelConfig(
        family="qwen2",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeConfig(kind="default", theta=1e6),
        max_position_embeddings=128,
        initializer_range=0.02,
        bos_id=1,
        eos_ids=(2, 3),
    )


def test_what_a_config_is_silent_about_is_what_transformers_assumes():
    silent = {
        key: QWEN2[key]
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    for family, theirs in [
        ("llama", transformers.LlamaConfig(**silent)),
        ("qwen2", transformers.Qwen2Config(**silent | {"num_attention_heads": 32})),
        ("qwen3", transformers.Qwen3Config(**silent | {"num_attention_heads": 32})),
    ]:
        ours = ModelConfig.from_hf(
            {**silent, "model_type": family, "num_attention_heads": theirs.num_attention_heads}
        )
        assert ours == ModelConfig.from_hf(theirs.to_dict()), family


def test_older_and_newer_rope_spellings_mean_the_same():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    older = ModelConfig.from_hf({**QWEN2, "rope_scaling": {"type": "llama3", **scaling}})
    newer = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1e6, **scaling}
    assert older == ModelConfig.from_hf(newer)
    assert older.rope.theta == 1e6
    assert older.rope.factor == 8.0


def test_yarn_without_its_original_window_takes_the_models_window_as_transformers_does():
    scaled = {**QWEN2, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert ModelConfig.from_hf(scaled).rope.original_max_position_embeddings == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_config_survives_writing_reading_and_transformers(tmp_path, family, rope):
    config = ModelConfig.from_hf({**QWEN2, "model_type": family, "head_dim": 16, "rope_parameters": rope})
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf(theirs.to_dict()) == config


def test_harmless_keys_are_kept_and_interpreted_ones_are_not_duplicated():
    config = ModelConfig.from_hf({**QWEN2, "pad_token_id": 7, "some_future_key": {"a": 1}})
    assert config.extra == {"torch_dtype": "bfloat16", "pad_token_id": 7, "some_future_key": {"a": 1}}
    assert config.to_hf()["some_future_key"] == {"a": 1}
    assert "rope_theta" not in config.to_hf()


@pytest.mark.parametrize(
    ("change", "rule", "value"),
    [
        ({"model_type": "gpt2"}, "known architecture", "gpt2"),
        ({"model_type": None}, "known architecture", None),
        ({"hidden_act": "gelu"}, "hidden_act must be silu", "gelu"),
        ({"hidden_size": None}, "'hidden_size', a positive integer", None),
        ({"vocab_size": -5}, "'vocab_size', a positive integer", -5),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads", (4, 3)),
        ({"head_dim": 7}, "head_dim must be even", 7),
        ({"quantization_config": {"bits": 4}}, "must not be quantised", {"bits": 4}),
        ({"is_causal": False}, "is_causal must not be false", False),
        ({"is_causal": "no"}, "is_causal must be true or false", "no"),
        ({"per_layer_config": {"0": {"skip": ["mlp"]}}}, "all layers must be alike", {"0": {"skip": ["mlp"]}}),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1", 0.5),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type must be a known one", "spiral"),
        ({"rope_scaling": {"type": "linear"}}, "needs the key 'factor'", {"type": "linear"}),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_with_its_value(change, rule, value):
    with pytest.raises(ModelFolderError) as caught:
        ModelConfig.from_hf({**QWEN2, **change})
    assert rule in caught.value.rule
    assert caught.value.value == value
    assert caught.value.remedy


def test_an_unknown_architecture_is_answered_with_the_known_ones():
    with pytest.raises(ModelFolderError, match="llama, qwen2, qwen3"):
        ModelConfig.from_hf({"model_type": "mamba"})


def test_a_sliding_window_is_refused_only_where_a_layer_would_use_it():
    windowed = {**QWEN2, "use_sliding_window": True, "sliding_window": 64}
    assert ModelConfig.from_hf({**windowed, "max_window_layers": 3}) == ModelConfig.from_hf(QWEN2)
    with pytest.raises(ModelFolderError, match="no sliding window"):
        ModelConfig.from_hf({**windowed, "max_window_layers": 2})
    with pytest.raises(ModelFolderError, match="no sliding window"):
        ModelConfig.from_hf({**QWEN2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]})

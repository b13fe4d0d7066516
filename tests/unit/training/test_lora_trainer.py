"""A trainer whose weights are an adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from training_builders import batch_of, episode, ints, random_adapter, random_batch, tiny_model, turn

from headrace.errors import ConfigError, RunFolderError
from headrace.records import Batch
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

LORA = LoraConfig(rank=4, alpha=6.0)
BACKENDS = ["native", "transformers"]
# Epsilon well above the gradients' rounding: the first step of AdamW divides them by their own size.
ADAMW = OptimizerConfig(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.05)


def trainer(folder: Path, *, seed: int = 0, **options: object) -> LocalTrainer:
    settings = {"optimizer": OptimizerConfig(learning_rate=1e-2), "lora": LORA, "device": "cpu", **options}
    return LocalTrainer(TrainingConfig(**settings), model=folder, seed=seed)  # type: ignore[arg-type]


def put(owner: LocalTrainer, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in owner.tensors().items():
        tensor.copy_(tensors[name])


def step_by_hand(folder: Path, tensors: dict[str, torch.Tensor], batch: Batch) -> tuple[dict, float]:
    """(the adapter after one step, the gradient's norm), by PEFT, transformers and torch alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets))
    wrapped = peft.get_peft_model(model, config)
    peft.set_peft_model_state_dict(wrapped, dict(tensors))
    adapter = {name.replace(".default", ""): p for name, p in wrapped.named_parameters() if p.requires_grad}
    count, loss = sum(e.num_tokens for e in batch.episodes), torch.zeros(())
    for one, advantage in zip(batch.episodes, batch.advantages.tolist(), strict=True):
        (only,) = one.turns
        ids = torch.tensor(np.concatenate([only.context, only.tokens])).long()
        logp = wrapped(ids[None]).logits[0].log_softmax(-1)
        for t, token in enumerate(only.tokens.tolist()):
            ratio = (logp[len(only.context) + t - 1, token] - float(only.logprobs[t])).exp()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(adapter.values(), ADAMW.max_grad_norm)
    torch.optim.AdamW(adapter.values(), lr=1e-2, betas=ADAMW.betas, eps=1e-3, weight_decay=0.1).step()
    return {name: p.detach() for name, p in adapter.items()}, float(norm)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_is_the_one_peft_transformers_and_torch_take(tmp_path: Path, backend: str) -> None:
    folder = tiny_model(tmp_path, "qwen3", initializer_range=0.1)
    batch, tensors = random_batch(0), random_adapter(folder, LORA)
    expected, norm = step_by_hand(folder, tensors, batch)
    owner = trainer(folder, backend=backend, optimizer=ADAMW)
    put(owner, tensors)
    report = owner.train(batch)
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 2 * ADAMW.max_grad_norm
    assert owner.tensors().keys() == expected.keys()
    for name, tensor in owner.tensors().items():
        assert (tensor - tensors[name]).abs().max() > 1e-4, name
        np.testing.assert_allclose(tensor, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_moves_the_adapter_and_not_a_bit_of_the_model(tmp_path: Path, backend: str, dtype: str) -> None:
    folder = tiny_model(tmp_path)
    owner = trainer(folder, backend=backend, dtype=dtype)
    drawn = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    for step in range(3):
        owner.train(random_batch(step, version=step))
    model = owner._backend._model  # type: ignore[attr-defined]
    frozen = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters() if "lora_" not in name}
    stored = load_file(folder / "model.safetensors")
    assert frozen.keys() == stored.keys()
    for name, parameter in frozen.items():
        assert torch.equal(parameter, stored[name].to(getattr(torch, dtype))), name
        assert parameter.grad is None
    for name, tensor in owner.tensors().items():
        assert not torch.equal(tensor, drawn[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_from_a_checkpoint_is_bitwise_the_same_as_never_having_stopped(
    tmp_path: Path, backend: str, dtype: str
) -> None:
    folder = tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    unbroken = trainer(folder, backend=backend, dtype=dtype)
    for step in range(3):
        unbroken.train(random_batch(step, version=step))
    unbroken.save(tmp_path / "checkpoint", {"place": [1, 2]})
    weights = load_file(tmp_path / "checkpoint/weights.safetensors")
    assert weights.keys() == unbroken.tensors().keys()
    assert len(load_file(tmp_path / "checkpoint/optimizer.safetensors")) == 3 * len(weights)
    resumed = trainer(folder, backend=backend, dtype=dtype, seed=5)
    assert resumed.load(tmp_path / "checkpoint") == {"place": [1, 2]}
    for step in range(3, 5):
        reports = [one.train(random_batch(step, version=step)) for one in (unbroken, resumed)]
        assert reports[0].metrics == reports[1].metrics
    for name, tensor in unbroken.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name


def test_a_checkpoint_is_refused_by_a_trainer_with_another_adapter_or_none(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    trainer(folder).save(tmp_path / "adapter", {})
    trainer(folder, lora=None).save(tmp_path / "full", {})
    for options, checkpoint in (
        ({"lora": LoraConfig(rank=4, alpha=8.0)}, "adapter"),
        ({"lora": LoraConfig(rank=4, alpha=6.0, targets=("q_proj",))}, "adapter"),
        ({"lora": None}, "adapter"),
        ({}, "full"),
    ):
        owner = trainer(folder, **options)
        before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
        with pytest.raises(RunFolderError, match=r"training\.lora"):
            owner.load(tmp_path / checkpoint)
        assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())


def test_the_runs_seed_decides_the_adapter(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    drawn = [
        trainer(folder, seed=seed, backend=backend).tensors()
        for seed, backend in ((1, "native"), (1, "transformers"), (2, "native"))
    ]
    for name, tensor in drawn[0].items():
        assert torch.equal(tensor, drawn[1][name]), name
        assert torch.equal(tensor, drawn[2][name]) == (".lora_B." in name), name


def test_a_trainer_describes_its_adapter(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    assert trainer(folder, lora=None).adapter is None
    spec = trainer(folder).adapter
    assert spec is not None
    assert (spec.name, spec.rank, spec.alpha, spec.targets) == ("policy", 4, 6.0, LORA.targets)


def test_a_target_that_binds_to_nothing_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"would bind to nothing.*'w_qkv'"):
        trainer(tiny_model(tmp_path), lora=LoraConfig(targets=("w_qkv",)))


def test_a_kept_version_is_one_file_of_the_adapter(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path / "model"))
    owner.train(random_batch(0))
    owner.keep(1, tmp_path / "versions/1.safetensors")
    kept = load_file(tmp_path / "versions/1.safetensors")
    assert kept.keys() == owner.tensors().keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in owner.tensors().items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exported_folder_trains_on_as_a_model_and_loads_as_an_adapter(tmp_path: Path, backend: str) -> None:
    folder = tiny_model(tmp_path / "model", initializer_range=0.1)
    owner = trainer(folder, backend=backend)
    for step in range(2):
        owner.train(random_batch(step, version=step))
    owner.export(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    packed = pack(training_sequences(random_batch(9)))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out/adapter"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    with torch.no_grad():
        own = owner._backend.token_logprobs(packed)[0]
        again = trainer(tmp_path / "out", lora=None)._backend.token_logprobs(packed)[0]
        logits = [model(torch.arange(20)[None]).logits for model in (adapted, merged)]
    np.testing.assert_allclose(again, own, atol=1e-5)
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_learns_which_of_four_arms_pays(tmp_path: Path, backend: str, dtype: str) -> None:
    """Each step samples every arm once, on policy; one of them has the advantage, whatever the prompt."""
    owner = trainer(
        tiny_model(tmp_path), backend=backend, dtype=dtype, optimizer=OptimizerConfig(learning_rate=3e-3)
    )
    arms, advantages = (5, 9, 14, 20), [-1 / 3, 1.0, -1 / 3, -1 / 3]
    expected_loss, paid = [], []
    for step in range(20):
        prompts = [ints(1, 2 + step % 3) for _ in arms]
        pulls = [episode(turn(p, ints(arm), version=step)) for p, arm in zip(prompts, arms, strict=True)]
        with torch.no_grad():
            packed = pack(training_sequences(batch_of(pulls, advantages, version=step)))
            logprobs = owner._backend.token_logprobs(packed)[0].numpy()
        pulls = [
            episode(turn(p, ints(arm), version=step, logprobs=logprobs[i : i + 1]))
            for i, (p, arm) in enumerate(zip(prompts, arms, strict=True))
        ]
        # What the policy would earn less of: the mean of -advantage × log-prob, whose gradient the step follows.
        expected_loss.append(float(-(np.array(advantages) * logprobs).mean()))
        paid.append(float(np.exp(logprobs[1])))
        metrics = owner.train(batch_of(pulls, advantages, version=step)).metrics
        assert metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert np.mean(expected_loss[-3:]) < np.mean(expected_loss[:3]) - 0.5
    assert np.mean(paid[-3:]) > 2 * np.mean(paid[:3])

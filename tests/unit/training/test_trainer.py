from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from training_builders import batch_of, episode, ints, random_batch, tiny_model, turn

from headrace.errors import HeadraceError, LawBroken, RecordError
from headrace.records import Batch
from headrace.training.algorithms import Algorithm, DapoConfig, GrpoConfig, GspoConfig, RlooConfig
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig
from headrace.training.correction_config import Correction, KimiConfig, MisConfig, TisConfig
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

RATE = OptimizerConfig(learning_rate=1e-2)
TRAINER_METRICS = {
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "clip_frac",
    "zero_advantage_frac",
    "reward_mean",
    "reward_std",
    "length_mean",
    "truncated_frac",
    "masked_frac",
    "tokens_trained",
    "groups_trained",
    "staleness_mean",
    "staleness_max",
    "version_spread_max",
    "mismatch_kl",
    "mismatch_age",
    "drift_kl",
    "reference_kl",
    "teacher_divergence",
    "updates",
    "version_spread_batch",
    "lag_0_frac",
    "lag_1_frac",
    "lag_2_3_frac",
    "lag_4_7_frac",
    "lag_8_15_frac",
    "lag_16_up_frac",
    "ratio_outlier_frac",
    "weight_mean",
    "weight_zero_frac",
    "effective_sample_frac",
    "weighted_sample_frac",
    "learning_rate",
}


def trainer(folder: Path, **options: object) -> LocalTrainer:
    bound = options.pop("max_staleness", None)
    config = TrainingConfig(optimizer=RATE, device="cpu", **options)  # type: ignore[arg-type]
    return LocalTrainer(config, model=folder, max_staleness=bound)  # type: ignore[arg-type]


def on_policy(owner: LocalTrainer, batch: Batch) -> Batch:
    """The same batch with the trainer's own log-probs as behaviour."""
    with torch.no_grad():
        logprobs, _ = owner._backend.token_logprobs(pack(training_sequences(batch)))
    parts = np.split(logprobs.numpy(), np.cumsum([len(e.turns[0].tokens) for e in batch.episodes])[:-1])
    episodes = [
        episode(
            turn(e.turns[0].context, e.turns[0].tokens, logprobs=part, version=batch.version),
            id=e.id,
            reward=e.reward,
        )
        for e, part in zip(batch.episodes, parts, strict=True)
    ]
    return batch_of(episodes, batch.advantages.tolist(), version=batch.version, group_size=4)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_a_steps_gradient_is_that_of_an_independent_float64_loss(tmp_path: Path, aggregate: str) -> None:
    folder = tiny_model(tmp_path)
    algorithm = GrpoConfig(aggregate=aggregate)  # type: ignore[arg-type]
    batch = random_batch(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    count = sum(e.num_tokens for e in batch.episodes)
    loss = torch.zeros((), dtype=torch.float64)
    for one, advantage in zip(batch.episodes, batch.advantages.tolist(), strict=True):
        (only,) = one.turns
        ids = torch.tensor(np.concatenate([only.context, only.tokens])).long()
        logp = model(ids[None]).logits[0].log_softmax(-1)
        share = 1 / count if aggregate == "token" else 1 / (len(only.tokens) * len(batch.advantages))
        for t, token in enumerate(only.tokens.tolist()):
            ratio = (logp[len(only.context) + t - 1, token] - float(only.logprobs[t])).exp()
            loss = loss - share * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    report = trainer(folder, algorithm=algorithm).train(batch)
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("corrections", [(), (TisConfig(),), (MisConfig(), KimiConfig())], ids=len)
@pytest.mark.parametrize(
    "algorithm",
    [GrpoConfig(), GrpoConfig(aggregate="sequence"), DapoConfig(), GspoConfig(), RlooConfig()],
    ids=["grpo", "grpo-sequence", "dapo", "gspo", "rloo"],
)
def test_accumulated_micro_batches_give_the_whole_batchs_step(
    tmp_path: Path, algorithm: Algorithm, corrections: tuple[Correction, ...]
) -> None:
    folder, batch = tiny_model(tmp_path), random_batch(1, episodes=24)
    how = {"algorithm": algorithm, "corrections": corrections}
    whole, cut = (trainer(folder, micro_batch_tokens=n, **how) for n in (10_000, 40))
    metrics = [one.train(batch).metrics for one in (whole, cut)]
    assert metrics[0]["grad_norm"] > 0.1
    for name in TRAINER_METRICS:
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-6, abs=1e-7), name
    # After one step a moment is the gradient, scaled.
    moments, others = (
        {name: one._optimizer.tensors()[f"exp_avg/{name}"].double() for name in one.tensors()}
        for one in (whole, cut)
    )
    away = {name: (moment - others[name]).norm() for name, moment in moments.items()}
    assert math.hypot(*away.values()) < 1e-6 * math.hypot(*(moment.norm() for moment in moments.values()))
    for name, tensor in whole.tensors().items():
        moment = moments[name]
        assert away[name] < 2e-6 * moment.norm(), name
        # AdamW's first step divides each gradient by its own size: where that is rounding, so is the step's sign.
        clear = moment.abs() > 1e-3 * moment.abs().max()
        assert clear.double().mean() > 0.8
        assert (tensor - cut.tensors()[name])[clear].abs().max() < 1e-6, name


def test_sequences_without_an_advantage_count_in_the_loss_and_the_metrics(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    full = random_batch(2, episodes=8)
    advantages = full.advantages.copy()
    advantages[:4] = 0
    half = batch_of(list(full.episodes), advantages.tolist(), group_size=4)
    alone = batch_of(list(full.episodes)[4:], advantages[4:].tolist(), group_size=4)
    metrics, alone_metrics = (trainer(folder).train(batch).metrics for batch in (half, alone))
    share = alone_metrics["tokens_trained"] / metrics["tokens_trained"]
    assert metrics["loss"] == pytest.approx(alone_metrics["loss"] * share, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(alone_metrics["grad_norm"] * share, rel=1e-4)
    assert metrics["zero_advantage_frac"] == 0.5
    assert metrics["entropy"] == pytest.approx(trainer(folder).train(full).metrics["entropy"], rel=1e-5)


def test_tokens_with_a_positive_advantage_become_more_probable_and_the_others_less(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    good, bad = ints(5, 6, 7), ints(8, 9, 10)
    losses = []
    for step in range(12):
        pair = [episode(turn(ints(1, 2), good)), episode(turn(ints(1, 2), bad))]
        batch = on_policy(owner, batch_of(pair, [1.0, -1.0], version=step))
        losses.append([float(e.turns[0].logprobs.sum()) for e in batch.episodes])
        owner.train(batch)
    assert losses[-1][0] > losses[0][0] + 1
    assert losses[-1][1] < losses[0][1] - 1
    assert owner.version == owner.step == 12


def test_the_loss_on_one_batch_falls_when_it_is_trained_again(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    batch = on_policy(owner, random_batch(3))
    first = owner.train(batch).metrics["loss"]
    again = batch_of(list(batch.episodes), batch.advantages.tolist(), version=1, group_size=4)
    assert owner.train(again).metrics["loss"] < first


def test_on_policy_metrics_say_that_nothing_has_drifted(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    metrics = owner.train(on_policy(owner, random_batch(4))).metrics
    assert metrics["kl"] == pytest.approx(0, abs=1e-10)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-10)
    assert metrics["clip_frac"] == metrics["ratio_outlier_frac"] == 0


def test_metrics_that_the_batch_decides_have_the_values_counted_by_hand(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path), max_staleness=3)
    owner.version = 5
    episodes = [
        episode(turn(ints(1), ints(2, 3), version=np.array([3, 5])), reward=1.0),
        episode(turn(ints(1), ints(2, 3, 4, 5), version=5, stop="length"), reward=0.0),
        episode(turn(ints(1), ints(2), version=2), reward=0.5),
        episode(turn(ints(1), ints(), version=5), reward=0.5),
    ]
    report = owner.train(batch_of(episodes, [1.0, -1.0, 0.0, 0.0], step=7, version=5, group_size=2))
    metrics = report.metrics
    assert (report.step, report.version) == (7, 6)
    assert metrics.keys() == TRAINER_METRICS
    assert metrics["reward_mean"] == 0.5
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.125))
    assert metrics["zero_advantage_frac"] == 0.5
    assert metrics["length_mean"] == 7 / 4
    assert metrics["truncated_frac"] == 1 / 4
    assert metrics["tokens_trained"] == 7
    assert metrics["groups_trained"] == 2
    assert metrics["staleness_mean"] == pytest.approx((2 + 0 * 5 + 3) / 7)
    assert metrics["staleness_max"] == 3
    assert metrics["version_spread_max"] == 2
    assert metrics["version_spread_batch"] == 3
    shares = {name: value for name, value in metrics.items() if name.startswith("lag_") and value}
    assert shares == pytest.approx({"lag_0_frac": 5 / 7, "lag_2_3_frac": 2 / 7})
    assert metrics["learning_rate"] == RATE.learning_rate


def test_mismatch_counts_only_tokens_of_the_trainers_own_version_where_there_are_any(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    own = next(iter(on_policy(owner, batch_of([episode(turn(ints(1), ints(2, 3)))], [0.0])).episodes)).turns[0]
    owner.version = 1
    fresh = turn(own.context, own.tokens, logprobs=own.logprobs + 0.1, version=1)
    stale = turn(own.context, own.tokens, logprobs=own.logprobs + 0.7, version=0)
    k3 = {shift: math.exp(-shift) - 1 + shift for shift in (0.1, 0.7)}
    metrics = owner.train(batch_of([episode(fresh), episode(stale)], [0.0, 0.0], version=1)).metrics
    assert metrics["mismatch_kl"] == pytest.approx(k3[0.1], rel=1e-4)
    assert metrics["mismatch_age"] == 0
    assert metrics["drift_kl"] == pytest.approx(k3[0.7] - k3[0.1], rel=1e-4)
    assert metrics["kl"] == pytest.approx((k3[0.1] + k3[0.7]) / 2, rel=1e-4)
    assert metrics["ratio_outlier_frac"] == 0.5
    later = turn(own.context, own.tokens, logprobs=own.logprobs + 0.7, version=0)
    metrics = owner.train(batch_of([episode(later)], [0.0], version=2)).metrics
    assert metrics["mismatch_kl"] == pytest.approx(k3[0.1], rel=1e-4), "the last that was seen"
    assert metrics["mismatch_age"] == 1


def test_numerics_that_were_never_seen_are_told_apart_from_none(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    own = next(iter(on_policy(owner, batch_of([episode(turn(ints(1), ints(2, 3)))], [0.0])).episodes)).turns[0]
    for owner.version in (1, 2):
        stale = turn(own.context, own.tokens, logprobs=own.logprobs + 0.7, version=0)
        metrics = owner.train(batch_of([episode(stale)], [0.0], version=owner.version)).metrics
        assert (metrics["mismatch_kl"], metrics["mismatch_age"]) == (0.0, -1)
        assert metrics["drift_kl"] == pytest.approx(math.exp(-0.7) - 0.3, rel=1e-4)


def test_a_batch_for_another_version_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    with pytest.raises(LawBroken):
        owner.train(random_batch(5, version=1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())
    assert owner.version == 0


def test_a_token_outside_its_own_support_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    with pytest.raises(RecordError, match="support"):
        owner.train(batch_of([episode(turn(ints(1), ints(2), support=[[3, 4]]))], [1.0]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())
    assert owner.train(random_batch(6)).metrics["loss"] == trainer(tmp_path).train(random_batch(6)).metrics["loss"]


def test_a_gradient_that_is_not_finite_is_an_error_before_it_reaches_the_weights(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    owner.tensors()["model.norm.weight"].fill_(float("inf"))
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    with pytest.raises(HeadraceError, match="finite"):
        owner.train(random_batch(7))
    assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())
    assert owner._optimizer.tensors() == {}
    assert not any(parameter.grad.any() for parameter in owner._backend.parameters().values())


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("no_decay", [(), ("norms", "biases"), None])
def test_weight_decay_reaches_the_parameters_that_it_is_for(
    tmp_path: Path, backend: str, tied: bool, no_decay: tuple[str, ...] | None
) -> None:
    """A step without a gradient shrinks what decays, and leaves the rest."""
    folder = tiny_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    more = {} if no_decay is None else {"no_decay": no_decay}
    optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, **more)  # type: ignore[arg-type]
    owner = LocalTrainer(TrainingConfig(optimizer=optimizer, device="cpu", backend=backend), model=folder)  # type: ignore[arg-type]
    for tensor in owner.tensors().values():
        tensor.fill_(1.0)  # a drawn bias is 0
    owner.train(batch_of([episode(turn(ints(1), ints()))], [1.0]))
    left = {name for name, tensor in owner.tensors().items() if torch.equal(tensor, torch.ones_like(tensor))}
    shrunk = {
        name
        for name, tensor in owner.tensors().items()
        if torch.allclose(tensor, torch.full_like(tensor, 0.95), atol=1e-6)
    }
    vectors = {name for name, tensor in owner.tensors().items() if tensor.ndim == 1}
    assert any(name.endswith("q_proj.bias") for name in vectors)
    assert {"model.norm.weight", "model.layers.1.input_layernorm.weight"} <= vectors
    spared = {(): set(), ("norms", "biases"): vectors, None: vectors | {"model.embed_tokens.weight"}}[no_decay]
    assert left == spared
    assert shrunk == owner.tensors().keys() - spared
    assert ("lm_head.weight" in shrunk) is not tied


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_an_adapters_matrices_decay(tmp_path: Path, backend: str) -> None:
    optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    config = TrainingConfig(optimizer=optimizer, device="cpu", backend=backend, lora=LoraConfig(rank=2))  # type: ignore[arg-type]
    owner = LocalTrainer(config, model=tiny_model(tmp_path))
    for tensor in owner.tensors().values():
        tensor.fill_(1.0)
    owner.train(batch_of([episode(turn(ints(1), ints()))], [1.0]))
    assert {round(float(x), 6) for tensor in owner.tensors().values() for x in tensor.unique()} == {0.95}


def test_a_batch_without_a_single_token_is_a_step_that_moves_nothing(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path))
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    metrics = owner.train(batch_of([episode(turn(ints(1), ints()))], [1.0])).metrics
    assert metrics["loss"] == metrics["grad_norm"] == metrics["tokens_trained"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())
    assert owner.version == 1


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_training_on_from_a_checkpoint_is_bitwise_the_same_as_never_having_stopped(
    tmp_path: Path, backend: str
) -> None:
    folder = tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    unbroken = trainer(folder, backend=backend)
    for step in range(3):
        unbroken.train(random_batch(step, version=step))
    unbroken.save(tmp_path / "checkpoint", {"place": [1, 2]})
    draws = [torch.rand(3), np.random.rand(3)]
    resumed = trainer(folder, backend=backend)
    assert resumed.load(tmp_path / "checkpoint") == {"place": [1, 2]}
    assert torch.equal(torch.rand(3), draws[0])  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.random.rand(3), draws[1])
    assert (resumed.step, resumed.version) == (3, 3)
    for step in range(3, 5):
        reports = [one.train(random_batch(step, version=step)) for one in (unbroken, resumed)]
        assert reports[0].metrics == reports[1].metrics
    for name, tensor in unbroken.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name


def test_an_exported_folder_holds_the_trained_weights(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path / "model"))
    owner.train(random_batch(0))
    owner.export(tmp_path / "out")
    for name, tensor in trainer(tmp_path / "out").tensors().items():
        assert torch.equal(tensor, owner.tensors()[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_kept_version_is_one_file_of_the_current_weights(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path / "model"))
    owner.train(random_batch(0))
    with pytest.raises(LawBroken):
        owner.keep(0, tmp_path / "versions/0.safetensors")
    owner.keep(1, tmp_path / "versions/1.safetensors")
    kept = load_file(tmp_path / "versions/1.safetensors")
    assert kept.keys() == owner.tensors().keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in owner.tensors().items())
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["1.safetensors"]

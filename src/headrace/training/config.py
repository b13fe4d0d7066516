"""Configuration of training. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError
from headrace.scoring.base import Comparison, Truncated
from headrace.training.algorithms import Algorithm, GrpoConfig
from headrace.training.correction_config import Correction, KimiConfig, check_corrections

MICRO_BATCH_TOKENS = 16384
"""Where nothing says how large a micro-batch is."""

KlEstimator = Literal["k1", "k2", "k3"]
Undecayed = Literal["norms", "biases", "embeddings"]


class OptimizerConfig(Config):
    """AdamW."""

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-5
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    no_decay: tuple[Undecayed, ...] = ("norms", "biases", "embeddings")
    """The kinds of parameters that weight decay leaves alone. A head that is tied to the embedding is one with it,
    a head of its own decays. An empty array: all decay. An adapter's two matrices always do."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The gradient's norm is clipped to this."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Steps of linear rise to `learning_rate`: of w, the first has a w-th of it and the w-th all of it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the rise, over `training.steps`. A run that is resumed with more steps goes on at
    the rate that a run of so many would have there."""
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Fraction of `learning_rate` to which linear and cosine schedules fall: the step after the last would have
    it."""


class LoraConfig(Config):
    """Train a LoRA adapter and leave the model's own weights as they are: y = W x + (alpha / rank) · B (A x)."""

    rank: Annotated[int, Meta(ge=1)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Meta(gt=0)] = 32.0
    """What the adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The projections that have an adapter, by the last part or parts of their names. The embedding and the output
    head cannot."""

    def check(self) -> None:
        if not self.targets:
            raise ConfigError(
                "training.lora.targets names at least one projection, or there is nothing to train",
                self.targets,
                "name some, or leave the key out for all seven projections of a layer",
            )


class ReferenceConfig(Config):
    """Stay near a reference policy: an estimate of the KL divergence from it is paid for."""

    coefficient: Annotated[float, Meta(gt=0)] = 0.001
    """Price of a nat."""
    estimator: KlEstimator = "k3"
    """`k1`: log-ratio. `k2`: half of its square. `k3`: the one without bias that is never negative."""
    into: Literal["loss", "reward"] = "loss"
    """`loss`: of each token, with a gradient. `reward`: subtracted from the episode's, summed over its tokens."""
    model: str | None = None
    """Hugging Face folder. None: the model that the run began with."""

    def check(self) -> None:
        if self.estimator == "k1" and self.into == "loss":
            raise ConfigError(
                'training.reference.estimator = "k1" needs into = "reward": as a loss its expected gradient is 0',
                self.into,
                'set into = "reward", or the estimator to "k2" or "k3"',
            )


class DistillationConfig(Config):
    """Learn from a teacher: what it would have sampled in each token's place, against what the policy would."""

    teacher: str | None = None
    """Hugging Face folder of a model with the same tokenizer. None: the policy itself, as it was."""
    every: Annotated[int, Meta(ge=1)] = 10
    """Without `teacher`: every so many steps the teacher becomes the policy of so many steps ago."""
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"
    """`forward`: KL(teacher ‖ policy). `reverse`: KL(policy ‖ teacher). `jsd`: from both to their mixture."""
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """For `jsd`: the teacher's share of the mixture."""
    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """Of the divergence in the loss."""
    rewards: bool = False
    """Whether the algorithm's loss is part of it too."""

    def check(self) -> None:
        if self.teacher is None and not self.rewards:
            raise ConfigError(
                "a policy that teaches itself needs training.distillation.rewards = true, or nothing ever moves it",
                "no teacher, no rewards",
                "set rewards = true, or name a teacher",
            )


def teacher_step(done: int, every: int) -> int:
    """In self-distillation, after `done` steps: how many the policy had done that is the teacher now."""
    return max(0, (done // every - 1) * every)


class TrainingConfig(Config):
    """The trainer."""

    steps: Annotated[int, Meta(ge=1)] = 100
    """Training steps: batches consumed and versions produced."""
    groups_per_batch: Annotated[int, Meta(ge=1, le=65536)] = 32
    group_size: Annotated[int, Meta(ge=1, le=65536)] = 8
    """Episodes per task."""
    min_group: Annotated[int, Meta(ge=1)] = 2
    """A group that loses episodes goes on down to this many."""
    shuffle_rewards: bool = False
    """A control experiment: permute the rewards among a batch's episodes, so that they teach nothing. Records keep
    each episode's own."""
    truncated: Truncated = "train"
    """What is done with an episode whose last turn was cut at its most tokens. `train`: as with any other.
    `exclude`: its tokens are left out of the loss, and its reward is compared with no other. `baseline_only`: its
    tokens are left out, and its reward counts in what the others' are compared with. The ledger has it trained in
    any case."""
    epochs: Annotated[int, Meta(ge=1)] = 1
    """How often a batch is trained on."""
    minibatches: Annotated[int, Meta(ge=1)] = 1
    """Updates of an epoch: the batch's groups, drawn anew for each epoch, are divided among them."""
    algorithm: Algorithm = GrpoConfig()
    corrections: tuple[Correction, ...] = ()
    """What is done about tokens that an older policy sampled: all of these together."""
    reference: ReferenceConfig | None = None
    """None: there is no reference policy."""
    distillation: DistillationConfig | None = None
    """None: there is no teacher."""
    entropy_bonus: Annotated[float, Meta(ge=0)] = 0.0
    """So much of each token's entropy, in nats, is subtracted from its loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    micro_batch_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens, prompts included, in one forward-backward pass. On CUDA in bfloat16, what is shared
    (`share_prefixes`) counts once. None: what the memory plan has room for, up to 16,384."""
    recompute: bool | None = None
    """Keep each layer's input alone for the backward pass and compute the rest again: less memory, one
    forward pass more. For the native back end. None: where the memory plan needs it."""
    share_prefixes: bool = True
    """Compute what sequences begin with in common, as a group's prompt, once. For the native back end; log-probs
    change within rounding."""
    backend: Literal["native", "transformers"] = "native"
    """Whose definition of the model is trained. `transformers` takes any causal LM of that library; a
    run's policy is one that its engine knows, too."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of forward and backward; `auto` as `engine.dtype`. The parameters that the optimizer keeps are float32.
    With `lora`, also of the frozen weights, which there are once."""
    export_dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Type of the weights in checkpoints/final and checkpoints/best, and of the adapter beside them. `model`: that
    of the folder that training began with. Checkpoints to go on from are float32 in any case."""
    numerics: Literal["fast", "exact"] = "fast"
    """`exact`: log-probs are the bits that an engine with `engine.numerics = "exact"`, the same dtype and the same
    kind of device recorded, wherever one version sampled all that is seen. Prefixes are then not shared."""
    kernels: Literal["fused", "reference"] = "fused"
    """What the model computes by, forward and backward, on CUDA with the native back end and fast numerics: Triton
    kernels or plain PyTorch. Elsewhere always plain PyTorch."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads. None: half of the cores, or all of them when generation and training take turns; of eight cores
    or more an eighth is left for all else."""
    checkpoint_every: Annotated[int, Meta(ge=1)] = 50
    """Steps between checkpoints. One is also written at the end and on Ctrl-C."""
    keep_checkpoints: Annotated[int, Meta(ge=1)] = 2

    @property
    def micro_batch(self) -> int:
        """Most tokens of one pass."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again. Not where nothing has been chosen."""
        return self.recompute is True

    @property
    def shares_prefixes(self) -> bool:
        """Whether they are: only the native back end does, and not where bits count."""
        return self.share_prefixes and self.backend == "native" and self.numerics == "fast"

    @property
    def comparison(self) -> Comparison:
        """How rewards become advantages."""
        how = self.algorithm.recipe
        return Comparison(
            how.baseline, how.scale, how.over, how.unbiased_std, how.std_eps, self.truncated, how.overlong
        )

    @property
    def learns_from_rewards(self) -> bool:
        """Whether advantages are part of the loss."""
        return self.distillation is None or self.distillation.rewards

    def check(self) -> None:
        check_corrections(self.corrections)
        if self.min_group > self.group_size:
            raise ConfigError(
                "training.min_group is at most training.group_size",
                f"{self.min_group} > {self.group_size}",
                "lower the one or raise the other",
            )
        if self.minibatches > self.groups_per_batch:
            raise ConfigError(
                "training.minibatches is at most training.groups_per_batch: groups are not divided",
                f"{self.minibatches} > {self.groups_per_batch}",
                "lower training.minibatches",
            )
        if self.numerics == "exact" and self.backend != "native":
            raise ConfigError(
                'training.numerics = "exact" needs training.backend = "native"',
                self.backend,
                'set training.numerics = "fast" or training.backend = "native"',
            )
        self._check_signals()
        if self.recompute and self.backend != "native":
            raise ConfigError(
                'training.recompute needs training.backend = "native"',
                self.backend,
                "set training.recompute = false",
            )
        if self.numerics == "exact" and self.lora is not None:
            raise ConfigError(
                'training.numerics = "exact" is for training without training.lora, whose products are not exact',
                f"training.lora.rank = {self.lora.rank}",
                'set training.numerics = "fast", or leave training.lora out',
            )
        if self.numerics == "exact" and self.distillation is not None:
            raise ConfigError(
                'training.numerics = "exact" is for training without training.distillation',
                self.distillation.divergence,
                'set training.numerics = "fast", or leave training.distillation out',
            )
        if self.optimizer.warmup_steps > self.steps:
            raise ConfigError(
                "training.optimizer.warmup_steps is at most training.steps",
                f"{self.optimizer.warmup_steps} > {self.steps}",
                "lower the warm-up",
            )

    def _check_signals(self) -> None:
        """What is learned from, where settings would undo each other."""
        recipe, paid = self.algorithm.recipe, self.reference is not None and self.reference.into == "reward"
        name = self.algorithm.__struct_config__.tag
        if self.learns_from_rewards and recipe.baseline != "none" and self.min_group < 2:
            raise ConfigError(
                f"the algorithm {name} compares rewards within a group and needs training.min_group of at least 2",
                self.min_group,
                "raise training.min_group, and training.group_size with it, or use ppo or reinforce++ without its "
                "group_baseline",
            )
        if paid and recipe.scale == "group":
            raise ConfigError(
                'training.reference.into = "reward" needs an algorithm that does not divide by a group\'s standard '
                "deviation: where rewards are equal it would blow the price's noise up",
                name,
                'set normalise_std = false, use rloo, dr_grpo, reinforce++ or ppo, or into = "loss"',
            )
        if self.learns_from_rewards:
            return
        for setting, given in (
            ('training.reference.into = "reward"', paid),
            ("training.algorithm.resample", recipe.resample),
            ("training.shuffle_rewards", self.shuffle_rewards),
            *(
                (f"the correction {one.__struct_config__.tag}", not isinstance(one, KimiConfig))
                for one in self.corrections
            ),
        ):
            if given:
                raise ConfigError(
                    f"{setting} is about rewards, which training.distillation leaves out unless rewards = true",
                    "rewards = false",
                    "leave one of the two out",
                )

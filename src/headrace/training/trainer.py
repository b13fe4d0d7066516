"""The trainer in its own process: one synchronous call at a time.

batch ─▶ check ─▶ sequences ─┬─▶ micro-batches with an advantage: forward, loss, backward ─┐
                             └─▶ micro-batches without one: forward, for the metrics ──────┴─▶ clip, AdamW
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from headrace.errors import HeadraceError, LawBroken, RecordError, RunFolderError
from headrace.records import Batch
from headrace.sync.base import AdapterSpec
from headrace.training import checkpoint, random_state
from headrace.training.adapter import adapter_spec
from headrace.training.backends.base import open_backend, to_device
from headrace.training.base import StepReport
from headrace.training.checks import check_batch
from headrace.training.config import TrainingConfig
from headrace.training.corrections import adds_gradient
from headrace.training.host_memory import keep_freed_memory
from headrace.training.losses.columns import Columns, Units
from headrace.training.losses.policy import normaliser, policy_loss
from headrace.training.metrics import batch_metrics
from headrace.training.optimizer import Optimizer, learning_rate
from headrace.training.packing import Packed, pack_micro_batches, training_sequences

# Below every real log-prob: what `token_logprobs` answers for a token outside its support.
_IMPOSSIBLE = -1e20
_SUMS = (
    *("loss", "entropy", "kl", "clipped", "outliers", "weights", "squared_weights", "dropped"),
    *("fresh_kl", "fresh", "impossible"),
)


class LocalTrainer:
    """Owns the parameters and the optimizer. Not thread-safe."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        model: str | Path,
        seed: int = 0,
        max_staleness: int | None = None,
    ):
        """Load the Hugging Face folder `model` as version 0. Seeds torch's global generator, and on the CPU keeps
        freed memory in the process (see `host_memory`)."""
        torch.manual_seed(seed)
        self.version = 0
        """The number of its weights. May be set: after a restore, old numbers are not used again."""
        self.step = 0
        """Training steps done."""
        self._at_rest = threading.Lock()
        self._config = config
        self._max_staleness = max_staleness
        self._backend = open_backend(model, config, seed=seed)
        if self._backend.device.type == "cpu":
            keep_freed_memory()
        self._optimizer = Optimizer(self._backend.parameters(), config.optimizer)

    @property
    def adapter(self) -> AdapterSpec | None:
        """The adapter whose tensors the weights are; None where they are the model's own."""
        return None if self._config.lora is None else adapter_spec(self._config.lora)

    def train(self, batch: Batch) -> StepReport:
        """One optimizer step over the whole batch; `version` rises by one.

        Raises LawBroken or RecordError for a batch that must not be trained on, and HeadraceError when loss or
        gradient are not finite. After any error the weights and the optimizer are what they were.
        """
        began = time.perf_counter()
        check_batch(
            batch,
            version=self.version,
            max_staleness=self._max_staleness,
            vocab_size=self._backend.vocab_size,
        )
        sequences = training_sequences(batch)
        tokens = sum(sequence.num_trained for sequence in sequences)
        divisor = normaliser(max(1, tokens), max(1, len(sequences)), self._config.algorithm.recipe)
        rate = learning_rate(self.step, self._config.optimizer, self._config.steps)
        # Without an advantage there is no gradient: a forward pass gives such sequences' metrics.
        all_move = adds_gradient(self._config.corrections) or self._config.entropy_bonus > 0
        moving = [sequence for sequence in sequences if all_move or sequence.advantage != 0]
        still = [sequence for sequence in sequences if not all_move and sequence.advantage == 0]
        budget = self._config.micro_batch_tokens
        try:
            sums = self._accumulate(pack_micro_batches(moving, budget), batch, divisor)
            with torch.no_grad():
                sums += self._accumulate(pack_micro_batches(still, budget), batch, divisor)
            *totals, grad_norm = torch.cat([sums, self._optimizer.clip().double()[None]]).tolist()
            total = dict(zip(_SUMS, totals, strict=True))
            _check_numbers(total, grad_norm)
        except BaseException:
            self._optimizer.zero_grad()
            raise
        with self.weights_at_rest():
            self._optimizer.step(rate)
            self.version += 1
            self.step += 1
        metrics = batch_metrics(batch, sequences) | _step_metrics(total, tokens)
        metrics |= {"grad_norm": grad_norm, "learning_rate": rate}
        seconds = time.perf_counter() - began
        return StepReport(step=batch.step, version=self.version, metrics=metrics, seconds=seconds)

    @contextmanager
    def weights_at_rest(self) -> Iterator[None]:
        """Within it nobody else changes the weights, or copies them. Publication, on a thread of its own, copies
        while a batch goes forward and backward; only the optimizer's step waits for it."""
        with self._at_rest:
            self._await_device()
            yield
            self._await_device()

    def _await_device(self) -> None:
        """Streams of two threads do not know of each other."""
        if self._backend.device.type == "cuda":
            torch.cuda.current_stream(self._backend.device).synchronize()

    def side_stream(self) -> AbstractContextManager[Any]:
        """For the thread that publishes: copies beside training."""
        device = self._backend.device
        return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live float32 weights under their Hugging Face names, to be copied before the next `train`. Where
        there is an adapter, its own alone, under the names of PEFT's files."""
        return {name: parameter.detach() for name, parameter in self._backend.parameters().items()}

    def save(self, folder: str | Path, state: dict[str, Any]) -> None:
        """Write a checkpoint with the caller's JSON-able `state`."""
        checkpoint.save(
            folder,
            checkpoint.Checkpoint(
                weights=self.tensors(),
                optimizer=self._optimizer.tensors(),
                step=self.step,
                version=self.version,
                state=state,
                random=random_state.capture(),
                lora=self._config.lora,
            ),
        )

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restore a checkpoint; returns the state given to `save`. On an error nothing has changed."""
        saved = checkpoint.load(folder)
        if saved.lora != self._config.lora:
            raise RunFolderError(
                "a checkpoint is loaded with the training.lora it was saved with",
                f"{saved.lora} then, {self._config.lora} now",
                "restore the configuration the run was started with",
            )
        own = self.tensors()
        differing = {n for n in own.keys() | saved.weights.keys() if _shape(own, n) != _shape(saved.weights, n)}
        if differing:
            raise RunFolderError(
                "a checkpoint holds the parameters of the model it is loaded into",
                sorted(differing)[:5],
                "resume with the model the run was started with",
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved.weights[name])
        self._optimizer.load_tensors(saved.optimizer)
        self.step, self.version = saved.step, saved.version
        random_state.restore(saved.random)
        return saved.state

    def export(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder that appears whole or not. An adapter is merged into them, and
        in the subfolder adapter/ as PEFT's `PeftModel.from_pretrained` loads it."""
        with checkpoint.whole_folder(folder) as temporary:
            self._backend.save_hf(temporary)

    def keep(self, version: int, file: str | Path) -> None:
        """Write the weights, which must be `version`, to one safetensors file that appears whole or not."""
        if version != self.version:
            raise LawBroken(
                "provenance", "trainer", f"version {version} is to be kept, the weights are {self.version}"
            )
        checkpoint.save_file_whole(file, self.tensors())

    def _accumulate(self, micro_batches: Iterable[Packed], batch: Batch, divisor: float) -> torch.Tensor:
        """Forward and, where gradients are on, backward. Returns the sums named in `_SUMS`, on the device."""
        device = self._backend.device
        total = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        for packed in micro_batches:
            logprobs_n, entropy_n = self._backend.token_logprobs(packed)
            count = len(packed.targets_n)
            columns = Columns(
                logprobs_n,
                to_device(packed.behaviour_n, device),
                to_device(packed.advantages_n, device),
                to_device(batch.version - packed.versions_n, device),
                Units(to_device(packed.trained_turns, device), count),
                Units(to_device(packed.trained_s, device), count),
                entropy_n,
            )
            config = self._config
            how = config.algorithm.recipe, config.corrections, divisor, config.entropy_bonus
            loss, sums = policy_loss(columns, *how)
            if torch.is_grad_enabled():
                loss.backward()
            fresh_n = to_device(packed.versions_n == batch.version, device)
            parts = (
                loss.detach(),
                entropy_n.detach().sum(),
                sums.kl,
                sums.clipped,
                sums.outliers,
                sums.weights,
                sums.squared_weights,
                sums.dropped,
                (sums.kl_t * fresh_n).sum(),
                fresh_n.sum(),
                (logprobs_n.detach() < _IMPOSSIBLE).sum(),
            )
            total += torch.stack([part.double() for part in parts])
        return total


def _check_numbers(total: dict[str, float], grad_norm: float) -> None:
    if total["impossible"]:
        raise RecordError(
            "a sampled token lies within its recorded support",
            f"{int(total['impossible'])} tokens do not",
            "look at the support column of the engine that sampled them",
        )
    if not (math.isfinite(grad_norm) and all(map(math.isfinite, total.values()))):
        raise HeadraceError(
            "a training step's loss, log-probs and gradient are finite",
            {"loss": total["loss"], "kl": total["kl"], "grad_norm": grad_norm},
            "lower training.optimizer.learning_rate, or train in float32",
        )


def _step_metrics(total: dict[str, float], tokens: int) -> dict[str, float]:
    """Means over the trained tokens.

    `kl` is the k3 estimate of how far the trainer's policy has moved from the one that sampled. `mismatch_kl` is
    the same over the tokens sampled by the trainer's very version, where it can only be numerical disagreement
    between engine and trainer; over all tokens when none is that fresh, and then staleness is part of it.
    `effective_sample_frac` is the share of the tokens that equally weighted ones would need for the same variance.
    """
    count = max(1, tokens)
    fresh = total["fresh"]
    return {
        "loss": total["loss"],
        "entropy": total["entropy"] / count,
        "kl": total["kl"] / count,
        "clip_frac": total["clipped"] / count,
        "ratio_outlier_frac": total["outliers"] / count,
        "weight_mean": total["weights"] / count,
        "weight_zero_frac": total["dropped"] / count,
        "effective_sample_frac": total["weights"] ** 2 / (count * total["squared_weights"] or 1.0),
        "mismatch_kl": total["fresh_kl"] / fresh if fresh else total["kl"] / count,
    }


def _shape(tensors: Any, name: str) -> Any:
    return tuple(tensors[name].shape) if name in tensors else None

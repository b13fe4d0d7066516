"""The trainer in its own process: one synchronous call at a time.

batch ─▶ check ─▶ sequences ─▶ updates, usually one:
                               ┌─▶ micro-batches with an advantage: forward, loss, backward ─┐
                               └─▶ micro-batches without one: forward, for the metrics ──────┴─▶ clip, AdamW
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.errors import QUOTED_CHARS, HeadraceError, LawBroken, RunFolderError
from headrace.models import divergences, stored_dtype
from headrace.out_of_memory import free_memory, is_out_of_memory, room
from headrace.records import Batch
from headrace.scoring import is_masked
from headrace.sync.base import AdapterSpec
from headrace.training import checkpoint, random_state
from headrace.training.adapter import adapter_spec
from headrace.training.backends.base import distribution, open_backend, to_device
from headrace.training.base import StepReport
from headrace.training.checks import check_batch
from headrace.training.config import TrainingConfig
from headrace.training.corrections import adds_gradient, wants_proximal
from headrace.training.host_memory import keep_freed_memory
from headrace.training.losses.columns import Columns, Units
from headrace.training.losses.policy import normaliser, policy_loss
from headrace.training.metrics import batch_metrics
from headrace.training.optimizer import Optimizer, learning_rate, undecayed
from headrace.training.packing import (
    Packed,
    TrainingSequence,
    micro_batches,
    minibatches,
    pack,
    training_sequences,
)
from headrace.training.reference import Reference, with_prices
from headrace.training.sums import NEVER_SEEN, SUMS, Total, check_numbers, step_metrics
from headrace.training.teacher import open_teacher

T = TypeVar("T")

# Below every real log-prob: what `token_logprobs` answers for a token outside its support.
_IMPOSSIBLE = -1e20


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
        self.between = False
        """Whether the weights are of no version: within a batch, after an update that is not its last."""
        self._at_rest = threading.Lock()
        self._config = config
        self._seed = seed
        self._mismatch = NEVER_SEEN
        self._max_staleness = max_staleness
        self._micro_batch = config.micro_batch
        """Most tokens of a pass. It falls where memory turns out to be too small."""
        self._in_backward = False
        """Whether the pass under way may have added to gradients."""
        self._tried_alone = False
        """Whether in this step memory was too small for one sequence alone."""
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None
        """Hears of what happened that no answer tells."""
        self._backend = open_backend(model, config, seed=seed)
        chosen = config.export_dtype
        self._export_dtype = stored_dtype(model) if chosen == "model" else getattr(torch, chosen)
        if self._backend.device.type == "cpu":
            keep_freed_memory()
        parameters = self._backend.parameters()
        spared = undecayed(parameters, self._backend.embeddings(), config.optimizer.no_decay)
        self._optimizer = Optimizer(parameters, config.optimizer, undecayed=spared)
        self._teacher = open_teacher(config, self._backend)
        self._reference = None if config.reference is None else Reference(config, self._backend, model=model)

    @property
    def adapter(self) -> AdapterSpec | None:
        """The adapter whose tensors the weights are; None where they are the model's own."""
        return None if self._config.lora is None else adapter_spec(self._config.lora)

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return self._backend.vocab_size

    def train(self, batch: Batch) -> StepReport:
        """The updates that a batch is for; `version` rises by one.

        Raises LawBroken or RecordError for a batch that must not be trained on, and HeadraceError when loss or
        gradient are not finite. After any error the weights and the optimizer are what they were, but for one in
        a later update of several: after that the trainer does nothing more.
        """
        began = time.perf_counter()
        self._tried_alone = False
        self._check_whole()
        check_batch(
            batch,
            version=self.version,
            max_staleness=self._max_staleness,
            vocab_size=self.vocabulary,
            teacher_size=None if self._teacher is None else self._teacher.vocab_size,
        )
        if self._teacher is not None:
            self._teacher.advance(self.step, self.version)
        config = self._config
        consumed = training_sequences(batch)
        masked = {episode.id for episode in batch.episodes if is_masked(episode, config.truncated)}
        batch, sequences = self._with_signals(batch, consumed, masked)
        updates = [
            part
            for epoch in range(config.epochs)
            for part in minibatches(batch, sequences, config.minibatches, (self._seed, batch.step, epoch))
        ]
        rate = learning_rate(self.step, config.optimizer, config.steps)
        totals, norms = [], []
        for left, part in zip(reversed(range(len(updates))), updates, strict=True):
            total, grad_norm = self._gradient(part, batch)
            with self.weights_at_rest():
                self._update(rate)
                self.between = left > 0
                self.version += left == 0
            totals.append(total)
            norms.append(grad_norm)
        self.step += 1
        self._mismatch = self._mismatch.after(totals[0])
        metrics = batch_metrics(batch, consumed, masked=masked) | step_metrics(totals, self._mismatch)
        metrics |= {"grad_norm": sum(norms) / len(norms), "learning_rate": rate}
        seconds = time.perf_counter() - began
        teacher = None if self._teacher is None else self._teacher.version
        return StepReport(step=batch.step, version=self.version, metrics=metrics, seconds=seconds, teacher=teacher)

    def _with_signals(
        self, batch: Batch, sequences: list[TrainingSequence], masked: Collection[str]
    ) -> tuple[Batch, list[TrainingSequence]]:
        """Without the episodes `masked`, and with what is known of tokens before the first update: the reference's
        log-probs, or their price in the rewards, and the policy's own."""
        config = self._config
        # The price of a masked episode's tokens is part of what the others are compared with.
        if self._reference is None or self._pays_in_loss:
            sequences = [one for one in sequences if one.episode not in masked]
        if self._reference is not None:
            found = self._score(sequences, self._reference.logprobs)
            sequences = [one._replace(reference=column) for one, column in zip(sequences, found, strict=True)]
            # In a control experiment nothing is to be learned, and the price would teach.
            if not self._pays_in_loss and not config.shuffle_rewards:
                batch, sequences = with_prices(batch, sequences, config)
            sequences = [one for one in sequences if one.episode not in masked]
        if config.epochs * config.minibatches > 1 and wants_proximal(config.corrections):
            found = self._score(sequences, lambda packed: self._backend.token_logprobs(packed)[0])
            sequences = [one._replace(proximal=column) for one, column in zip(sequences, found, strict=True)]
        if not config.learns_from_rewards:
            sequences = [one._replace(advantage=0.0) for one in sequences]
        return batch, sequences

    def _gradient(self, sequences: list[TrainingSequence], batch: Batch) -> tuple[Total, float]:
        """The gradient of one update: (sums over its tokens, its norm). Without one after an error."""
        config = self._config
        tokens = sum(sequence.num_trained for sequence in sequences)
        divisor = normaliser(tokens, len(sequences), config.algorithm.recipe)
        # Without an advantage there is no gradient: a forward pass gives such sequences' metrics.
        all_move = self._others_teach or self._teacher is not None
        moving = [sequence for sequence in sequences if all_move or sequence.advantage != 0]
        still = [sequence for sequence in sequences if not all_move and sequence.advantage == 0]
        try:
            # Memory that runs out within a backward pass leaves a part of its gradient: then all of it goes, and
            # the update begins again with what was learned of sizes.
            while (found := self._added_up(moving, still, batch, divisor)) is None:
                self._forget_gradient()
            *sums_of_all, grad_norm = found
            total = dict(zip(SUMS, sums_of_all, strict=True)) | {"tokens": float(tokens)}
            check_numbers(total, grad_norm)
        except BaseException:
            self._forget_gradient()
            raise
        return total, grad_norm

    def _update(self, rate: float) -> None:
        """The optimizer's step. Its moments come with the first; without memory for them nothing changes."""
        why = ""
        try:
            self._optimizer.step(rate)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = str(error)
        if why:
            self._forget_gradient()
            free_memory(self._backend.device)
            parameters = sum(parameter.numel() for parameter in self._backend.parameters().values())
            raise HeadraceError(
                f"memory holds the optimizer's moments, {8 * parameters / 2**30:.1f} GiB of them "
                f"({room(self._backend.device)})",
                why[:QUOTED_CHARS],
                self._remedy(),
            )

    def _forget_gradient(self) -> None:
        self._backend.drop_unfinished()
        self._optimizer.zero_grad()

    def _added_up(
        self, moving: list[TrainingSequence], still: list[TrainingSequence], batch: Batch, divisor: float
    ) -> list[float] | None:
        """The `SUMS` and the gradient's norm; None where the gradient is not whole."""
        total = torch.zeros(len(SUMS), dtype=torch.float64, device=self._backend.device)
        for part, learns in ((moving, True), (still, False)):
            passed = self._in_passes(part, lambda packed: self._accumulate(packed, batch, divisor), learns=learns)
            if passed is None:
                return None
            for _, sums in passed:
                total += sums
        norm = self._optimizer.norm().double()[None]
        found: list[float] = torch.cat([total, norm]).tolist()
        return found

    def _in_passes(
        self, sequences: Sequence[TrainingSequence], work: Callable[[Packed], T], *, learns: bool = False
    ) -> list[tuple[list[int], T]] | None:
        """`work` of all of them, micro-batch by micro-batch, each with the places of its sequences. One for which
        memory is too small is divided, and later ones are no larger. None where a backward pass was cut short."""
        shared = self._backend.counts_shared_once
        pending = deque(micro_batches(sequences, self._micro_batch, shared=shared))
        done: list[tuple[list[int], T]] = []
        while pending:
            members = pending.popleft()
            why, self._in_backward = "", False
            try:
                with torch.set_grad_enabled(learns):
                    done.append((members, work(pack([sequences[i] for i in members]))))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                why = str(error)
            if why:
                free_memory(self._backend.device)
                self._divide([sequences[i] for i in members], why)
                if self._in_backward:
                    return None
                left = [*members, *(i for others in pending for i in others)]
                cut = micro_batches([sequences[i] for i in left], self._micro_batch, shared=shared)
                pending = deque([left[i] for i in own] for own in cut)
        return done

    def _divide(self, sequences: Sequence[TrainingSequence], why: str) -> None:
        """After a pass over these for which memory was too small: smaller ones from now on. One sequence alone is
        tried once more, as others may have given memory back; then there is nothing left to divide."""
        tokens, longest = sum(one.length for one in sequences), max(one.length for one in sequences)
        if len(sequences) == 1:
            if self._tried_alone:
                raise HeadraceError(
                    f"memory holds the pass over one sequence: one of {longest:,} tokens does not fit "
                    f"({room(self._backend.device)})",
                    why[:QUOTED_CHARS],
                    self._remedy(),
                )
            self._tried_alone = True
        else:
            self._micro_batch = max(1, min(self._micro_batch, tokens) // 2)
        self.on_event(
            "out_of_memory",
            {
                "tokens": tokens,
                "sequences": len(sequences),
                "micro_batch_tokens": self._micro_batch,
                "why": f"a pass over {tokens:,} tokens did not fit into memory; "
                f"micro-batches have at most {self._micro_batch:,} from now on",
            },
        )

    def _remedy(self) -> str:
        changes = [] if self._config.recomputes else ["set training.recompute = true"]
        if self._config.lora is None:
            changes.append("train an adapter (training.lora)")
        return ", ".join([*changes, "lower engine.cache_tokens or engine.max_context"])

    def _forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log-probs, entropies, divergences from the teacher if there is one) of the trained tokens."""
        how = self._config.distillation
        if how is None or self._teacher is None:
            return *self._backend.token_logprobs(packed), None
        # First, while nothing is kept for the backward pass yet.
        said = self._teacher.say(packed)
        hidden_nd, head_vd = self._backend.hidden(packed)
        found_n = divergences(
            hidden_nd,
            head_vd,
            said,
            *distribution(packed, self._backend.device),
            divergence=how.divergence,
            beta=how.beta,
        )
        # Where only the teacher teaches, log-probs are for the metrics.
        with nullcontext() if how.rewards or self._others_teach else torch.no_grad():
            return *self._backend.logprobs_of(packed, hidden_nd, head_vd), found_n

    def _score(
        self, sequences: Sequence[TrainingSequence], logprobs: Callable[[Packed], torch.Tensor]
    ) -> list[np.ndarray]:
        """Each sequence's trained tokens, without a gradient."""
        if not sequences:
            return []
        passed = self._in_passes(sequences, logprobs)
        assert passed is not None  # without a backward pass
        order = [i for members, _ in passed for i in members]
        columns = [column for _, column in passed]
        ends = np.cumsum([sequences[i].num_trained for i in order])
        parts = np.split(torch.cat(columns).cpu().numpy(), ends[:-1])
        return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]

    @property
    def _pays_in_loss(self) -> bool:
        return self._config.reference is not None and self._config.reference.into == "loss"

    @property
    def _others_teach(self) -> bool:
        """Whether log-probs or entropies have a gradient where there is no advantage."""
        return adds_gradient(self._config.corrections) or self._config.entropy_bonus > 0 or self._pays_in_loss

    def _check_whole(self) -> None:
        if self.between:
            raise HeadraceError(
                "weights have a version; an update of several failed, and theirs is between two",
                self.version,
                "resume the run from its last checkpoint",
            )

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

    def give_memory_back(self) -> None:
        """Let others on the device have what was freed, which torch keeps for the next step."""
        if self._backend.device.type == "cuda":
            torch.cuda.empty_cache()

    def device_peaks(self) -> tuple[int, int]:
        """Most bytes of the GPU (held by torch, allocated for tensors) at once; zeros on the CPU."""
        device = self._backend.device
        if device.type != "cuda":
            return 0, 0
        return torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live float32 weights under their Hugging Face names, to be copied before the next `train`. Where
        there is an adapter, its own alone, under the names of PEFT's files."""
        return {name: parameter.detach() for name, parameter in self._backend.parameters().items()}

    def save(self, folder: str | Path, state: dict[str, Any]) -> str:
        """Write a checkpoint with the caller's JSON-able `state`; returns its digest."""
        self._check_whole()
        return checkpoint.save(
            folder,
            checkpoint.Checkpoint(
                weights=self.tensors(),
                optimizer=self._optimizer.tensors(),
                step=self.step,
                version=self.version,
                state=state,
                random=random_state.capture(),
                lora=self._config.lora,
                teacher={} if self._teacher is None else self._teacher.tensors(),
                mismatch=self._mismatch,
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
        if self._teacher is not None:
            self._teacher.load_tensors(dict(saved.teacher))
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved.weights[name])
        self._optimizer.load_tensors(saved.optimizer)
        self.between, self._mismatch = False, saved.mismatch
        self.step, self.version = saved.step, saved.version
        random_state.restore(saved.random)
        return saved.state

    def export(self, folder: str | Path) -> None:
        """Write the weights, in `training.export_dtype`, as a Hugging Face folder that appears whole or not. An
        adapter is merged into them, and in the subfolder adapter/ as PEFT's `PeftModel.from_pretrained` has it."""
        self._check_whole()
        with checkpoint.disk_told(folder, "a model"), checkpoint.whole_folder(folder) as temporary:
            self._backend.save_hf(temporary, self._export_dtype)

    def keep(self, version: int, file: str | Path) -> None:
        """Write the weights, which must be `version`, to one safetensors file that appears whole or not."""
        self._check_whole()
        if version != self.version:
            raise LawBroken(
                "provenance", "trainer", f"version {version} is to be kept, the weights are {self.version}"
            )
        checkpoint.save_file_whole(file, self.tensors())

    def _accumulate(self, packed: Packed, batch: Batch, divisor: float) -> torch.Tensor:
        """Forward and, where gradients are on, backward. Returns the `SUMS`, on the device."""
        config, device = self._config, self._backend.device
        logprobs_n, entropy_n, divergence_n = self._forward(packed)
        count = len(packed.targets_n)
        columns = Columns(
            logprobs_n,
            to_device(packed.behaviour_n, device),
            to_device(packed.advantages_n, device),
            to_device(batch.version - packed.versions_n, device),
            Units(to_device(packed.trained_turns, device), count),
            Units(to_device(packed.trained_s, device), count),
            entropy_n,
            None if packed.proximal_n is None else to_device(packed.proximal_n, device),
            None if packed.reference_n is None else to_device(packed.reference_n, device),
            divergence_n,
        )
        loss, sums = policy_loss(
            columns,
            config.algorithm.recipe,
            config.corrections,
            divisor,
            config.entropy_bonus,
            config.reference,
            0.0 if config.distillation is None else config.distillation.coefficient,
        )
        if torch.is_grad_enabled():
            self._in_backward = True
            loss.backward()
        fresh_n = to_device(packed.versions_n == batch.version, device)
        parts = (
            loss.detach(),
            entropy_n.detach().sum(),
            sums.kl,
            sums.clipped,
            sums.outliers,
            sums.ratios,
            sums.squared_ratios,
            sums.weights,
            sums.squared_weights,
            sums.dropped,
            (sums.kl_t * fresh_n).sum(),
            fresh_n.sum(),
            (logprobs_n.detach() < _IMPOSSIBLE).sum(),
            sums.reference_kl,
            sums.divergence,
        )
        return torch.stack([part.double() for part in parts])


def _shape(tensors: Any, name: str) -> Any:
    return tuple(tensors[name].shape) if name in tensors else None

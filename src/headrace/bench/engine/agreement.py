"""Do the engine's log-probs agree with the trainer's? Sampled by the one, recomputed by the other.

Random weights give almost uniform distributions, under which any engine agrees. So two models are asked: one that
was trained here for some seconds, on a language whose next word is uncertain by about a nat; and random weights
whose final norm is scaled until the next token's entropy is that of a trained model. The second is far more
sensitive to rounding than a trained one: its logits are large and all of them are noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.bench.engine import decode, drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.bench.engine.swap import copy_into_standby
from headrace.engine.native import NativeEngine
from headrace.errors import HeadraceError
from headrace.models import CausalLM, Ops, PackedContext, ReferenceOps
from headrace.records import Turn

LEAST_ENTROPY, MOST_ENTROPY = 0.5, 2.0
TARGET_ENTROPY = 1.2
TRIES = 12
FINAL_NORM = "model.norm.weight"
TURNS_PER_PASS = 8


@dataclass(frozen=True)
class Sample:
    prompts: int = 64
    prompt_tokens: int = 128
    tokens: int = 160
    """Of each prompt's completion."""


TINY = Sample(prompts=8, prompt_tokens=16, tokens=32)


@dataclass(frozen=True)
class Lesson:
    """How the trained model is trained: to speak a random language in which each word has a few successors."""

    words: int = 200
    successors: int = 8
    sharpness: float = 1.5
    """Standard deviation of the successors' logits."""
    sequences: int = 32
    length: int = 128
    most_steps: int = 300
    learning_rate: float = 1e-3
    warmup: int = 20
    close_enough: float = 0.25
    """Nats above the language's own entropy at which it is learnt."""


TINY_LESSON = Lesson(words=20, sequences=8, length=32, most_steps=40, learning_rate=1e-2)


def measure(
    shape: str, device: torch.device, size: Sample, *, numerics: str = "fast", seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures): differences of log-probs over every token sampled, by an engine that is fast or exact."""
    drive.say(f"agreement {shape}, {numerics} …")
    if numerics == "exact":
        settings["numerics"] = "exact"
    turns, theirs, entropy = sample_sharp(shape, device, size, trainer_ops(numerics), seed, settings)
    ours = np.concatenate([turn.logprobs for turn in turns])
    apart = np.abs(ours - theirs)
    row: dict[str, Any] = {
        "part": "agreement",
        "shape": shape,
        "model": "random, sharpened",
        "numerics": numerics,
        "tokens": len(ours),
        "entropy_nats": entropy,
        "mean_diff": float(apart.mean()),
        "max_diff": float(apart.max()),
        "unequal_bits": int((ours.view(np.int32) != theirs.view(np.int32)).sum()),
    }
    figures = {"exact_logprob_max_diff": row["max_diff"]} if numerics == "exact" else {}
    return [drive.kept(row)], figures


class Taught(NamedTuple):
    """A model trained here, and what it is asked."""

    shape: str
    trainer: CausalLM
    prompts: list[np.ndarray]
    size: Sample


def teach(shape: str, device: torch.device, size: Sample, lesson: Lesson, seed: int = 0) -> Taught:
    drive.say(f"agreement {shape}: training a model to ask …")
    language = Language(lesson, config_of(shape).vocab_size, device, seed)
    trainer, loss = train(shape, device, language, seed)
    drive.say(f"trained to {loss:.2f} nats a word; the language has {language.entropy:.2f}")
    prompts = list(language.speak(size.prompts, size.prompt_tokens).cpu().numpy().astype(np.int32))
    return Taught(shape, trainer, prompts, size)


def ask(
    taught: Taught, device: torch.device, name: str = "bf16", *, seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures): as `measure`, fast, for a trained model; `name` is that of the engine's settings."""
    shape, trainer, prompts, size = taught
    engine = _engine(shape, device, size, seed, settings)
    copy_into_standby(engine, dict(trainer.named_parameters()))
    engine.swap(engine.version + 1, "keep")
    turns = _sampled(engine, prompts, size)
    theirs, entropy = recompute(trainer, turns, device)
    apart = np.abs(np.concatenate([turn.logprobs for turn in turns]) - theirs)
    row: dict[str, Any] = {
        "part": "agreement",
        "shape": shape,
        "model": "trained",
        "numerics": "fast" if name == "bf16" else name,
        "tokens": len(apart),
        "entropy_nats": entropy,
        "mean_diff": float(apart.mean()),
        "max_diff": float(apart.max()),
        "unequal_bits": int((apart != 0).sum()),
    }
    return [drive.kept(row)], {
        f"{name}_logprob_mean_diff": row["mean_diff"],
        f"{name}_logprob_max_diff": row["max_diff"],
    }


class Language:
    """A Markov chain over a few of the vocabulary's tokens."""

    def __init__(self, lesson: Lesson, vocabulary: int, device: torch.device, seed: int):
        self.lesson, self._device = lesson, device
        self._dice = torch.Generator(device=device).manual_seed(seed)
        count, each = min(lesson.words, vocabulary), lesson.successors
        self._words = torch.randperm(vocabulary, generator=self._dice, device=device)[:count]
        self._next = torch.randint(count, (count, each), generator=self._dice, device=device)
        logits = lesson.sharpness * torch.randn(count, each, generator=self._dice, device=device)
        self._weights = torch.softmax(logits, -1)
        self.entropy = float(-(self._weights * self._weights.log()).sum(-1).mean())

    def speak(self, sequences: int, length: int) -> Tensor:
        """(sequences, length) tokens."""
        at = torch.randint(len(self._words), (sequences,), generator=self._dice, device=self._device)
        said = [at]
        for _ in range(length - 1):
            choice = torch.multinomial(self._weights[at], 1, generator=self._dice)
            at = self._next[at].gather(1, choice)[:, 0]
            said.append(at)
        return self._words[torch.stack(said, 1)]


def train(shape: str, device: torch.device, language: Language, seed: int) -> tuple[CausalLM, float]:
    """(a model that has learnt the language, its last loss)."""
    lesson = language.lesson
    model = random_weights(config_of(shape), device, seed).requires_grad_(True)
    # Random layers would drown the word itself, and nothing but the words' frequencies is learnt for long.
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / lesson.warmup))
    packed = PackedContext([lesson.length] * lesson.sequences, device)
    loss = math.inf
    for step in range(lesson.most_steps):
        tokens = language.speak(lesson.sequences, lesson.length)
        hidden = model(tokens.flatten(), packed.positions, packed).view(*tokens.shape, -1)
        before, after = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        logprobs, _ = model.ops.token_logprobs(before, model.head_weight, after)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            loss = -float(logprobs.detach().mean())
            if loss < language.entropy + lesson.close_enough:
                break
    return model.requires_grad_(False), loss


def measure_slowdown(
    shape: str, device: torch.device, *, fast_ms: float | None = None, **options: Any
) -> dict[str, Any]:
    """A decode step that is exact beside one that is not, at the shape's headline point. `options` are decode's."""
    point = decode.HEADLINE[shape]
    if fast_ms is None:
        [fast] = decode.measure(shape, device, points=[point], **options)
        fast_ms = fast["ms_per_step"]
        drive.free_memory()
    drive.say(f"exact decode {shape} …")
    [exact] = decode.measure(shape, device, points=[point], numerics="exact", **options)
    return drive.kept(
        {
            "part": "exact decode",
            "shape": shape,
            "point": str(point),
            "fast_ms": fast_ms,
            "exact_ms": exact["ms_per_step"],
            "slowdown": exact["ms_per_step"] / fast_ms,
        }
    )


def trainer_ops(numerics: str) -> Ops:
    if numerics == "fast":
        return ReferenceOps()
    from headrace.models import ExactOps

    return ExactOps()


def sample_sharp(
    shape: str, device: torch.device, size: Sample, ops: Ops, seed: int, settings: dict[str, Any]
) -> tuple[list[Turn], np.ndarray, float]:
    """(turns, the trainer's log-probs of their tokens, mean entropy at them), at an entropy within the bounds.

    The scale is first sought for the prompts' own tokens. What is sampled under it may repeat itself and be far
    sharper, so the search goes on over samples.
    """
    trainer = random_weights(config_of(shape), device, seed, ops)
    engine = _engine(shape, device, size, seed, settings)
    rng = np.random.default_rng(seed)
    prompts = drive.random_prompts(rng, config_of(shape).vocab_size, size.prompts, size.prompt_tokens)
    scale = scale_for_entropy(trainer, prompts[:TURNS_PER_PASS], TARGET_ENTROPY)
    low, high, entropy = 0.0, math.inf, math.nan
    for _ in range(TRIES):
        _set_final_norm(trainer, engine, scale)
        turns = _sampled(engine, prompts, size)
        logprobs, entropy = recompute(trainer, turns, device)
        if LEAST_ENTROPY <= entropy <= MOST_ENTROPY:
            return turns, logprobs, entropy
        low, high = (scale, high) if entropy > MOST_ENTROPY else (low, scale)
        scale = math.sqrt(low * high) if low and high < math.inf else (1.25 * low or high / 1.25)
    raise HeadraceError(f"some scale gives an entropy of {LEAST_ENTROPY} to {MOST_ENTROPY} nats", entropy)


def _engine(shape: str, device: torch.device, size: Sample, seed: int, settings: dict[str, Any]) -> NativeEngine:
    """With room for all of the sample at once."""
    longest = size.prompt_tokens + size.tokens
    return drive.make_engine(
        shape,
        device,
        running=size.prompts,
        context=longest,
        cache_tokens=size.prompts * (longest + drive.SPARE_TOKENS),
        seed=seed,
        **settings,
    )


def _sampled(engine: NativeEngine, prompts: Sequence[np.ndarray], size: Sample) -> list[Turn]:
    drive.add(engine, prompts, [size.tokens] * len(prompts))
    turns: list[Turn] = []
    while engine.has_work:
        turns += [turn for _, turn in engine.step()]
    return turns


def _set_final_norm(trainer: CausalLM, engine: NativeEngine, scale: float) -> None:
    weight = trainer.model.norm.weight.fill_(scale)
    copy_into_standby(engine, {FINAL_NORM: weight}, only=[FINAL_NORM])
    engine.swap(engine.version + 1, "keep", only=[FINAL_NORM])


@torch.no_grad()
def scale_for_entropy(model: CausalLM, prompts: Sequence[np.ndarray], target: float) -> float:
    """What to multiply the final norm by, so that the mean entropy after these prompts' tokens is the target."""
    hidden_td, tokens_t = _hidden(model, prompts, model.head_weight.device)

    def entropy(scale: float) -> float:
        return float(model.ops.token_logprobs(hidden_td * scale, model.head_weight, tokens_t)[1].mean())

    low, high = 0.0, 10.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(math.exp(middle)) > target else (low, middle)
    return math.exp((low + high) / 2)


@torch.no_grad()
def recompute(model: CausalLM, turns: Sequence[Turn], device: torch.device) -> tuple[np.ndarray, float]:
    """(log-probs of all sampled tokens, in the turns' order; mean entropy they were drawn from)."""
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(turns), TURNS_PER_PASS):
        some = turns[start : start + TURNS_PER_PASS]
        whole = [np.concatenate([turn.context, turn.tokens]) for turn in some]
        hidden_td, tokens_t = _hidden(model, whole, device)
        ends = np.cumsum([len(one) for one in whole])
        sampled = np.concatenate(
            [np.arange(end - len(turn.tokens), end) for end, turn in zip(ends, some, strict=True)]
        )
        places_t = torch.from_numpy(sampled).to(device)
        found = model.ops.token_logprobs(hidden_td[places_t - 1], model.head_weight, tokens_t[places_t])
        logprobs.append(found[0])
        entropies.append(found[1])
    return torch.cat(logprobs).float().cpu().numpy(), float(torch.cat(entropies).mean())


def _hidden(model: CausalLM, sequences: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """(hidden states after the final norm, tokens), of all sequences laid end to end."""
    packed = PackedContext([len(one) for one in sequences], device)
    tokens_t = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(device)
    return model(tokens_t, packed.positions, packed), tokens_t

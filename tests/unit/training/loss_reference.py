"""The formulas of docs/off-policy.md, token by token in Python floats: what the tensor code is tested against.

Letters are the document's: p the trainer's log-prob, b the recorded one, o the proximal one, q the reference
policy's, a the surrogate's anchor, u its ratio, A the advantage, w the weight, ρ the ratio of o to b, k_t the
estimate of how far p is from q, β its price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LIMIT = 20.0
WEIGHING = ("tis", "mis", "cispo", "topr", "decoupled")


@dataclass(frozen=True)
class Token:
    now: float
    """p, the trainer's log-prob."""
    behaviour: float
    """b, the recorded log-prob."""
    advantage: float
    """A, of its sequence."""
    lag: int
    """k, trainer version − token version."""
    turn: int
    """Number of its turn, over the whole batch."""
    sequence: int
    """Number of its sequence, over the whole batch."""
    proximal: float | None = None
    """o, before the batch's first update; None where there is one update: sg(p)."""
    reference: float | None = None
    """q, the reference policy's log-prob."""


@dataclass(frozen=True)
class Loss:
    value: float
    gradient: list[float]
    """d value / d now, token by token."""
    weights: list[float]
    """w_t, the product of the corrections' weights."""
    kl: float
    """Sum over the tokens of ratio − 1 − log ratio, ratio = exp(p − b)."""
    clipped: float
    """Tokens whose gradient the clip cuts off, whatever their weight."""
    outliers: float
    """Tokens with exp(p − b) outside [0.5, 2]."""
    reference_kl: float
    """Sum of k_t with x = p − q; 0 without a reference policy."""


def advantages(
    algorithm: dict[str, Any], groups: list[list[float]], lengths: list[list[int]] | None = None
) -> list[float]:
    """The advantage of every episode, in the order of `groups`; `lengths`, their sampled tokens, are for DAPO."""
    kind = algorithm["type"]
    if kind == "dapo" and algorithm["overlong_limit"] is not None:
        if lengths is None:
            raise ValueError("overlong shaping needs the episodes' lengths: pass `lengths`")
        groups = [
            [reward + _overlong(algorithm, length) for reward, length in zip(*pair, strict=True)]
            for pair in zip(groups, lengths, strict=True)
        ]
    if kind in ("grpo", "dapo", "gspo"):
        return _flat([_standardised(g, algorithm) if algorithm["normalise_std"] else _centred(g) for g in groups])
    if kind == "dr_grpo":
        return _flat([_centred(g) for g in groups])
    if kind == "rloo":
        return _flat([_leave_one_out(g) for g in groups])
    if kind in ("reinforce++", "ppo"):
        based = kind == "reinforce++" and algorithm["group_baseline"]
        values = _flat([_centred(g) if based else g for g in groups])
        if algorithm["whiten"] == "episodes":
            return _standardised(values, algorithm)
        if lengths is None:
            raise ValueError("whitening over tokens needs the episodes' lengths: pass `lengths`")
        return _whitened_by_tokens(values, [n for group in lengths for n in group], algorithm)
    raise ValueError(f"unknown algorithm {kind!r}")


def priced(penalty: dict[str, Any], rewards: list[float], episodes: list[list[tuple[float, float]]]) -> list[float]:
    """The rewards less β Σ k_t, x = b − q: `episodes` has (b, q) of each episode's trained tokens."""
    if penalty["into"] != "reward":
        raise ValueError(f"into {penalty['into']!r} leaves rewards as they are: only 'reward' has a price")
    out: list[float] = []
    for reward, tokens in zip(rewards, episodes, strict=True):
        paid = sum(_estimate(penalty["estimator"], behaviour - q)[0] for behaviour, q in tokens)
        out.append(reward - penalty["coefficient"] * paid)
    return out


def loss(
    algorithm: dict[str, Any],
    corrections: list[dict[str, Any]],
    tokens: list[Token],
    penalty: dict[str, Any] | None = None,
) -> Loss:
    """The whole batch's loss, its gradient by hand, and the sums behind the metrics.

    `penalty` is what a reference policy costs: `coefficient` β, `estimator` and `into`.
    """
    return loss_at([token.now for token in tokens], algorithm, corrections, tokens, penalty)


def loss_at(
    live: list[float],
    algorithm: dict[str, Any],
    corrections: list[dict[str, Any]],
    tokens: list[Token],
    penalty: dict[str, Any] | None = None,
) -> Loss:
    """`loss` with the p that carries the gradient in `live`; the tokens' own `now` is sg(p).

    Apart they allow finite differences: moving `live` alone holds fixed what is under a stop-gradient.
    """
    proximal = _proximal(corrections, tokens)
    weights = _weights(corrections, tokens, proximal)
    weighed = any(correction["type"] in WEIGHING for correction in corrections)
    anchor = proximal if weighed else [token.behaviour for token in tokens]
    if any(correction["type"] == "cispo" for correction in corrections):
        anchor = [token.now for token in tokens]
    sequences = _members([token.sequence for token in tokens])
    gspo = algorithm["type"] == "gspo"

    value, kl, clipped, outliers, reference_kl = 0.0, 0.0, 0.0, 0.0, 0.0
    surrogate_gradient: list[float] = []  # of each token's term, with respect to the logarithm of its own ratio
    penalty_gradient: list[float] = []
    for t, token in enumerate(tokens):
        members = sequences[token.sequence]
        share = _share(algorithm, len(tokens), len(sequences), len(members))

        log_ratio = 0.0
        averaged = members if gspo else [t]
        for j in averaged:
            log_ratio += live[j] - anchor[j]
        log_ratio /= len(averaged)
        ratio = math.exp(_clamp(log_ratio, -LIMIT, LIMIT))
        ratio_gradient = ratio if abs(log_ratio) <= LIMIT else 0.0

        objective, slope, cut = _surrogate(algorithm, ratio, token.advantage)
        value -= share * weights[t] * objective
        surrogate_gradient.append(-share * weights[t] * slope * ratio_gradient)
        clipped += cut

        difference = live[t] - token.behaviour
        pull = 0.0
        for correction in corrections:
            if correction["type"] == "kimi":
                value += share * correction["tau"] / 2 * difference**2
                pull += share * correction["tau"] * difference
        if penalty is not None:
            if token.reference is None:
                raise ValueError(f"a penalty needs every token's reference log-prob: token {t} has none")
            estimate, slope = _estimate(penalty["estimator"], live[t] - token.reference)
            reference_kl += estimate
            if penalty["into"] == "loss":
                value += share * penalty["coefficient"] * estimate
                pull += share * penalty["coefficient"] * slope
        penalty_gradient.append(pull)

        difference = _clamp(difference, -LIMIT, LIMIT)
        kl += math.exp(difference) - 1 - difference
        outliers += not 0.5 <= math.exp(difference) <= 2

    gradient: list[float] = []
    for t, token in enumerate(tokens):
        if gspo:
            members = sequences[token.sequence]
            own = sum(surrogate_gradient[j] for j in members) / len(members)
        else:
            own = surrogate_gradient[t]
        gradient.append(own + penalty_gradient[t])
    return Loss(value, gradient, weights, kl, clipped, outliers, reference_kl)


def _estimate(estimator: str, x: float) -> tuple[float, float]:
    """k of the log-ratio x of policy to reference, and dk / dx."""
    if estimator == "k1":
        return x, 1.0
    if estimator == "k2":
        return x**2 / 2, x
    if estimator == "k3":
        held = max(x, -LIMIT)
        return math.exp(-held) - 1 + held, 1 - math.exp(-held) if x >= -LIMIT else 0.0
    raise ValueError(f"unknown estimator {estimator!r}")


def _surrogate(algorithm: dict[str, Any], ratio: float, advantage: float) -> tuple[float, float, bool]:
    """J without its weight, dJ / d ratio, and whether a clip cut that derivative off."""
    free = ratio * advantage
    if algorithm["type"] == "rloo":
        return free, advantage, False
    low, high = 1 - algorithm["clip_low"], 1 + algorithm["clip_high"]
    objective = min(free, _clamp(ratio, low, high) * advantage)
    cut = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    if algorithm["type"] == "ppo" and algorithm["dual_clip"] is not None and advantage < 0:
        floor = algorithm["dual_clip"] * advantage
        cut = cut or objective < floor
        objective = max(objective, floor)
    return objective, 0.0 if cut else advantage, cut


def _share(algorithm: dict[str, Any], tokens: int, sequences: int, length: int) -> float:
    """What one token's J is multiplied by: in a batch of N tokens and S sequences, in a sequence of `length`."""
    aggregate = algorithm["aggregate"]
    if aggregate == "token":
        return 1 / tokens
    if aggregate == "sequence":
        return 1 / (length * sequences)
    if aggregate == "constant":
        return 1 / (sequences * algorithm["length"])
    raise ValueError(f"unknown aggregate {aggregate!r}")


def _proximal(corrections: list[dict[str, Any]], tokens: list[Token]) -> list[float]:
    """o of every token: its own or sg(p), and on the line from b to sg(p) where a correction interpolates."""
    interpolated = any(c["type"] == "decoupled" and c["proximal"] == "interpolated" for c in corrections)
    proximal: list[float] = []
    for token in tokens:
        before = token.now if token.proximal is None else token.proximal
        share = 1 - 1 / token.lag if token.lag >= 1 else 0.0
        proximal.append(token.behaviour + share * (before - token.behaviour) if interpolated else before)
    return proximal


def _weights(corrections: list[dict[str, Any]], tokens: list[Token], proximal: list[float]) -> list[float]:
    if sum(correction["type"] in WEIGHING for correction in corrections) > 1:
        raise ValueError("more than one correction weighs tokens: ρ would count twice; keep one")
    weights = [1.0] * len(tokens)
    for correction in corrections:
        for t in range(len(tokens)):
            weights[t] *= _weight(correction, tokens, proximal, t)
    return weights


def _weight(correction: dict[str, Any], tokens: list[Token], proximal: list[float], t: int) -> float:
    kind, advantage = correction["type"], tokens[t].advantage
    if kind == "tis":
        rho = _rho(tokens, proximal, t, correction["level"], correction["geometric"])
        return min(rho, correction["cap"])
    if kind == "mis":
        rho = _rho(tokens, proximal, t, correction["level"], correction["geometric"])
        return rho if correction["low"] <= rho <= correction["high"] else 0.0
    if kind == "cispo":
        rho = _rho(tokens, [token.now for token in tokens], t, "token", False)
        return _clamp(rho, 1 - correction["low"], 1 + correction["high"])
    if kind == "topr":
        rho = _rho(tokens, proximal, t, correction["level"], correction["geometric"])
        return 1.0 if advantage >= 0 else min(rho, 1.0)
    if kind == "decoupled":
        return min(_rho(tokens, proximal, t, "token", False), correction["cap"])
    if kind == "rejection":
        rho = _rho(tokens, proximal, t, correction["level"], True)
        return 1.0 if correction["low"] <= rho <= correction["high"] else 0.0
    if kind == "opsm":
        members = _at_level(tokens, t, "sequence")
        drift = sum(tokens[j].behaviour - tokens[j].now for j in members) / len(members)
        return 0.0 if advantage < 0 and drift > correction["delta"] else 1.0
    if kind == "version_drop":
        oldest = max(tokens[j].lag for j in _at_level(tokens, t, correction["level"]))
        return 0.0 if oldest > correction["max_lag"] else 1.0
    if kind == "kimi":
        return 1.0
    raise ValueError(f"unknown correction {kind!r}")


def _rho(tokens: list[Token], proximal: list[float], t: int, level: str, geometric: bool) -> float:
    members = _at_level(tokens, t, level)
    log_rho = sum(proximal[j] - tokens[j].behaviour for j in members)
    if geometric:
        log_rho /= len(members)
    return math.exp(_clamp(log_rho, -LIMIT, LIMIT))


def _at_level(tokens: list[Token], t: int, level: str) -> list[int]:
    """The tokens that share token t's ratio at this level, itself among them."""
    if level == "token":
        return [t]
    if level == "turn":
        return [j for j, token in enumerate(tokens) if token.turn == tokens[t].turn]
    if level == "sequence":
        return [j for j, token in enumerate(tokens) if token.sequence == tokens[t].sequence]
    raise ValueError(f"unknown level {level!r}")


def _members(numbers: list[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for t, number in enumerate(numbers):
        members.setdefault(number, []).append(t)
    return members


def _overlong(algorithm: dict[str, Any], length: int) -> float:
    buffer = algorithm["overlong_buffer"]
    return algorithm["overlong_penalty"] * _clamp((algorithm["overlong_limit"] - buffer - length) / buffer, -1, 0)


def _centred(values: list[float]) -> list[float]:
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def _standardised(values: list[float], algorithm: dict[str, Any]) -> list[float]:
    centred = _centred(values)
    count = max(1, len(centred) - algorithm["unbiased_std"])
    deviation = math.sqrt(sum(x * x for x in centred) / count)
    return [x / (deviation + algorithm["std_eps"]) for x in centred]


def _whitened_by_tokens(values: list[float], lengths: list[int], algorithm: dict[str, Any]) -> list[float]:
    """Each value as often as its episode has tokens; then as if every token were an episode."""
    tokens = [(i, values[i]) for i, length in enumerate(lengths) for _ in range(length)]
    if len({value for _, value in tokens}) < 2:
        return [0.0] * len(values)
    mean = math.fsum(value for _, value in tokens) / len(tokens)
    squares = math.fsum((value - mean) ** 2 for _, value in tokens)
    deviation = math.sqrt(squares / (len(tokens) - algorithm["unbiased_std"]))
    return [(value - mean) / (deviation + algorithm["std_eps"]) for value in values]


def _leave_one_out(values: list[float]) -> list[float]:
    if min(values) == max(values):
        return [0.0] * len(values)
    out: list[float] = []
    for i, value in enumerate(values):
        others = values[:i] + values[i + 1 :]
        out.append(value - sum(others) / len(others))
    return out


def _flat(groups: list[list[float]]) -> list[float]:
    return [value for group in groups for value in group]


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)

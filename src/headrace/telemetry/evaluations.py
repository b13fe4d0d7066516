"""Evaluations in words, and what a summary says of them: pure functions of lines that `evaluated` events have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bounds import clip

MAX_EXAMPLE = 120
"""Characters of a failure's detail in one line."""

Line = Mapping[str, Any]


def metric_of(line: Line) -> str:
    """What its number is: "accuracy", or "reward"."""
    metric = line.get("metric")
    if metric in ("accuracy", "reward"):
        return str(metric)
    # Runs from before it was written down: rewards of 0 and 1 are what they mostly had.
    value = line.get("pass_1")
    return "accuracy" if not isinstance(value, int | float) or 0 <= value <= 1 else "reward"


def shown(value: Any, metric: str) -> str:
    """An accuracy as a percentage, a reward as a number, a dash where there is neither."""
    if not isinstance(value, int | float):
        return "–"
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.3f}"


def result(line: Line) -> str:
    """Metric, value and interval: accuracy 12.5% (95%: 9.9% to 15.5%)."""
    metric = metric_of(line)
    text, interval = f"{metric} {shown(line.get('pass_1'), metric)}", interval_text(line, metric)
    return f"{text} ({interval})" if interval else text


def interval_text(line: Line, metric: str) -> str:
    """95%: 9.9% to 15.5%, or nothing where there is no interval."""
    low, high = line.get("low95"), line.get("high95")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return ""
    return f"95%: {shown(low, metric)} to {shown(high, metric)}"


def best_of_text(line: Line, metric: str) -> str:
    """With several completions a task: pass@4 40.0%, or best of 4 1.250. Otherwise nothing."""
    samples = line.get("samples")
    if not isinstance(samples, int) or samples < 2:
        return ""
    name = f"pass@{samples}" if metric == "accuracy" else f"best of {samples}"
    return f"{name} {shown(line.get('pass_k'), metric)}"


def warning(line: Line) -> str | None:
    """What to know about an evaluation in which completions failed; None where none stands apart."""
    failed = line.get("failed")
    if not isinstance(failed, int) or failed < 1 or "valid" not in line:
        return None
    of = int(line["tasks"]) * int(line["samples"])
    text = f"{failed:,} of {of:,} completions failed and are not in it"
    if example := clip(str(line.get("failure_example") or ""), MAX_EXAMPLE):
        text += f" ({example})"
    return text if line["valid"] else f"invalid: {text}"


def sets_of(line: Line) -> dict[str, Line]:
    """The evaluation of each set in a line, the one that chooses the best first."""
    others: dict[str, Line] = line.get("sets") or {}
    return {str(line.get("set", "held_out")): line, **others}


def scalars_of(line: Line) -> dict[str, float]:
    """Its numbers by names for charts: evaluation/…, of other sets evaluation/SET/…, with users' metrics as
    …/user/NAME and pass@k as …/pass_at/K."""
    found: dict[str, float] = {}
    for place, (name, one) in enumerate(sets_of(line).items()):
        prefix = f"evaluation/{name}" if place else "evaluation"
        nested = {
            key: value for key, value in one.items() if key in ("user", "pass_at") and isinstance(value, Mapping)
        }
        flat = {f"{key}/{inner}": number for key, table in nested.items() for inner, number in table.items()}
        for key, value in {**one, **flat}.items():
            if type(value) in (int, float):
                found[f"{prefix}/{key}"] = value
    return found


def summary_of(evaluations: Sequence[Line]) -> dict[str, Any]:
    """What summary.json says of all of them: the first before training, the last after it, and what they count.

    An invalid one has no number here.
    """
    before = next((line for line in evaluations if line["step"] == 0), None)
    after = next((line for line in reversed(evaluations) if line["step"] > 0), None)
    both = [line for line in (before, after) if line is not None]
    rewards = any(metric_of(line) == "reward" for line in both)
    return {
        "eval_before": valid_number(before),
        "eval_after": valid_number(after),
        "eval_metric": None if not both else "reward" if rewards else "accuracy",
    }


def warnings_of(evaluations: Sequence[Line]) -> list[str]:
    """Those of the evaluations before and after training."""
    lines = [line for line in evaluations if line["step"] == 0][:1]
    lines += [line for line in evaluations if line["step"] > 0][-1:]
    return [
        f"evaluation of {name} at step {line['step']}: {text}"
        for line in lines
        for name, one in sets_of(line).items()
        if (text := warning(one)) is not None
    ]


def valid_number(line: Line | None) -> float | None:
    """Its mean, where the evaluation is valid."""
    return line.get("pass_1") if line is not None and line.get("valid", True) else None


def contradiction(line: Line) -> str | None:
    """What within one evaluation cannot be; None where all fits, and of runs from before it said so much."""
    if "valid" not in line:
        return None
    of, value, low, high = line["tasks"] * line["samples"], line["pass_1"], line["low95"], line["high95"]
    if sum(line["failures"].values()) != line["failed"] + line["policy_failed"]:
        return "its failures by reason are not as many as those that stand apart and those that count"
    if of < 1 or not 0 <= line["failed"] <= of or abs(line["failed_frac"] - line["failed"] / of) > 1e-9:
        return f"{line['failed']} failed of {of}, and its share of failures is {line['failed_frac']}"
    if line["pass_at"].get("1") != value or line["pass_at"].get(str(line["samples"])) != line["pass_k"]:
        return "its means of one completion and of the best are others than those it has by k"
    if value is None or (line["metric"] == "accuracy" and not 0 <= value <= 1):
        return None if value is None and line["failed"] == of and not line["valid"] else f"its mean is {value}"
    if low is not None and not low - 1e-9 <= value <= high + 1e-9:
        return f"its mean {value} is outside of its interval, {low} to {high}"
    return None

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
    text = f"{metric} {shown(line.get('pass_1'), metric)}"
    low, high = line.get("low95"), line.get("high95")
    if isinstance(low, int | float) and isinstance(high, int | float):
        text += f" (95%: {shown(low, metric)} to {shown(high, metric)})"
    return text


def best_of_text(line: Line) -> str:
    """With several completions a task: pass@4 40.0%, or best of 4 1.250. Otherwise nothing."""
    samples, metric = line.get("samples"), metric_of(line)
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
        "eval_before": _valid_number(before),
        "eval_after": _valid_number(after),
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


def _valid_number(line: Line | None) -> float | None:
    return line.get("pass_1") if line is not None and line.get("valid", True) else None

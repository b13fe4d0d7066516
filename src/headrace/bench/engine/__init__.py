"""`headrace bench engine`: the native engine against this machine's limit, its own ideal, and transformers.

    shapes.py      the models: Qwen3's shapes, random weights
    drive.py       an engine filled, stepped and emptied
    limit.py       measured bandwidth; the bytes a step must read
    decode.py      decode steps beside that limit
    power.py       what the card draws meanwhile
    mix.py         a mix of requests beside the ideal of ideal.py; what shared prompts save
    swap.py        pauses and throughput under new weights
    peers.py       transformers on the same weights, in processes of their own
    agreement.py   log-probs beside the trainer's; what exactness costs
    fp8.py         what FP8 gains in speed and costs in log-probs

Each part can be run alone: `--set parts=decode --set shapes=8b`. On a CPU: `--set shapes=tiny`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.bench import result
from headrace.bench.engine import agreement, decode, drive, fp8, limit, mix, peers, swap
from headrace.errors import ConfigError

PARTS = ("decode", "mix", "swap", "peers", "agreement", "fp8")
HOME = {"mix": "8b", "swap": "8b", "peers": "0.6b", "agreement": "0.6b", "fp8": "8b"}
"""The shape of a part that is measured on one: if it is not among those selected, the first of them is taken.
Figures of that shape may leave its name out; those of another carry theirs."""
NUMERICS = ("fast", "exact")


def run(
    parts: str = ",".join(PARTS),
    shapes: str = "0.6b,8b,32b",
    device: str = "auto",
    numerics: str = ",".join(NUMERICS),
    peer_modes: str = ",".join(peers.MODES),
    peer_tokens: int = 64,
    peer_limit_s: float = 300.0,
    steps: int = decode.STEPS,
    max_running: int = 256,
    prefill_tokens: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Those of the parts that are asked for, one after another; names are separated by commas.

    `max_running` is the mix's; `steps` are timed at each point of decode; `prefill_tokens` is the engine's, its own
    default if not given.
    """
    wanted, chosen = _names("part", parts, PARTS), _names("shape", shapes, tuple(decode.POINTS))
    precisions = _names("numerics", numerics, NUMERICS)
    modes = _names("peer mode", peer_modes, tuple(peers.MODES))
    place = drive.device_of(device)
    common: dict[str, Any] = {"seed": seed}
    if prefill_tokens is not None:
        common["prefill_tokens"] = prefill_tokens
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}

    def keep(part: str, shape: str, measured: tuple[list[dict[str, Any]], dict[str, float]]) -> None:
        rows.extend(measured[0])
        figures.update({_figure(name, shape, HOME[part]): value for name, value in measured[1].items()})
        drive.free_memory()

    bandwidth = None
    if {"decode", "agreement", "fp8"} & set(wanted):
        bandwidth = limit.read_bandwidth(place)
        drive.free_memory()
    timing = {**common, "steps": steps, "bandwidth": bandwidth}
    if "decode" in wanted:
        for shape in chosen:
            rows += decode.measure(shape, place, **timing)
            drive.free_memory()
        figures |= decode.figures(rows)
    fast = {row["shape"]: row for row in rows if row["point"] == str(decode.HEADLINE[row["shape"]])}
    if "mix" in wanted:
        shape = _shape_of("mix", chosen)
        size = mix.TINY if shape == "tiny" else replace(mix.Mix(), max_running=max_running)
        keep("mix", shape, mix.measure(shape, place, size, **common))
    if "swap" in wanted:
        shape = _shape_of("swap", chosen)
        keep("swap", shape, swap.measure(shape, place, swap.TINY if shape == "tiny" else swap.Swaps(), **common))
    if "peers" in wanted:
        shape = _shape_of("peers", chosen)
        ours = fast[shape]["tok_s"] if shape in fast else None
        options: dict[str, Any] = {"modes": modes, "tokens": peer_tokens, "limit_s": peer_limit_s}
        keep("peers", shape, peers.measure(shape, place, ours_tok_s=ours, **options, **common))
    if "fp8" in wanted:
        shape = _shape_of("fp8", chosen)
        keep("fp8", shape, fp8.measure(shape, place, plain=fast.get(shape), **timing))
    shape = _shape_of("agreement", chosen)
    sample = agreement.TINY if shape == "tiny" else agreement.Sample()
    if ("agreement" in wanted and "fast" in precisions) or "fp8" in wanted:
        lesson = agreement.TINY_LESSON if shape == "tiny" else agreement.Lesson()
        taught = agreement.teach(shape, place, sample, lesson, seed)
        if "agreement" in wanted and "fast" in precisions:
            keep("agreement", shape, agreement.ask(taught, place, **common))
        for name, settings in fp8.KINDS.items() if "fp8" in wanted else ():
            keep("agreement", shape, agreement.ask(taught, place, name, **settings, **common))
        del taught
        drive.free_memory()
    if "agreement" in wanted:
        for kind in precisions:
            keep("agreement", shape, agreement.measure(shape, place, sample, numerics=kind, **common))
        slowed = dict.fromkeys([shape, "8b"] if "8b" in chosen else [shape]) if "exact" in precisions else {}
        for other in slowed:
            known = fast[other]["ms_per_step"] if other in fast else None
            row = agreement.measure_slowdown(other, place, fast_ms=known, **timing)
            keep("agreement", other, ([row], {"exact_slowdown": row["slowdown"]}))
    return result("engine", rows, figures)


def _names(what: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in str(text).split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"a {what} of bench engine is one of those known", name, f"known: {', '.join(known)}")
    return names


def _shape_of(part: str, chosen: list[str]) -> str:
    return HOME[part] if HOME[part] in chosen else chosen[0]


def _figure(name: str, shape: str, home: str) -> str:
    return name if shape == home or name.endswith(f"_{shape}") else f"{name}_{shape}"

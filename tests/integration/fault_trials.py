"""Trials of weight sync under faults: which there are, and many of them at once.

    a rig     a trainer's process, two engines' under load, the real Publication between them (fault_rig.py)
    a trial   one fault in one publication; then every engine has to serve that version, or a later one

A trial is a function of its number and of the links (transport × payload) among which it is drawn. To repeat some,
or to run many with a table of what happened:

    python tests/integration/fault_trials.py 17 203         # these, each on a rig of its own
    python tests/integration/fault_trials.py --count 500
    python tests/integration/fault_trials.py --device cuda --count 40
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_children import Fault
from fault_rig import Outcome, Rig

TRANSPORTS = ("shared_memory", "files", "http", "collective")
PAYLOADS = ("full", "delta", "adapter")
LINKS = tuple(itertools.product(TRANSPORTS, PAYLOADS))
CUDA_LINKS = (("cuda_ipc", "full"), ("cuda_ipc", "adapter"))
"""Between processes on one GPU."""

_STAGES = {
    "announce": ("announce.enter", "announce.leave"),
    "transfer": ("transfer.chunk", "transfer.leave"),
    "verify": ("verify.enter", "verify.leave"),
    "swap": ("swap.enter", "swap.flipped"),
    "acknowledge": ("acknowledge",),
}
_SENDER_POINTS = {
    "announce": ("announce.enter", "announce.leave"),
    "transfer": ("transfer.bucket", "transfer.leave"),
    "verify": ("verify.enter", "sent"),
    "swap": ("sent",),
    "acknowledge": ("sent",),
}
"""What a sender does itself. Then it may still die ("sent": from outside, when an engine is at that stage)."""
FAMILIES = (
    *(("receiver killed", stage) for stage in _STAGES),
    *(("sender killed", stage) for stage in _STAGES),
    *(("receiver paused", stage) for stage in _STAGES),
    ("receiver paused briefly", ""),
    ("flipped on the way", "transfer"),
    ("flipped in store", "transfer"),
    ("truncated on the way", "transfer"),
    ("truncated in store", "transfer"),
    ("full disk", "announce"),
)
_DECK = (*FAMILIES, *FAMILIES[-5:])
"""Kills and pauses are at five stages each; of the others there are as many again."""


@dataclass(frozen=True)
class Trial:
    number: int
    transport: str
    payload: str
    family: str
    stage: str
    fault: Fault
    at: str
    """trainer, engine-0 or engine-1."""
    pause: float
    """How long a process that is stopped stays so, in deadlines."""
    schedule: str
    interrupt: str
    trains_on_s: float | None
    """When the trainer goes on to the next version, which may be before this one was staged."""

    def __str__(self) -> str:
        fault, where = self.fault, f"{self.family} at {self.fault.point} of {self.at}"
        return (
            f"trial {self.number} ({self.transport}, {self.payload}): {where}, moment {fault.moment:.3f}, "
            f"place {fault.place:.3f}, times {fault.times}, pause {self.pause:.2f} deadlines, {self.schedule}, "
            f"{self.interrupt}, trains on after {self.trains_on_s}"
        )


def draw(number: int, links: Sequence[tuple[str, str]] = LINKS) -> Trial:
    """Numbers that follow each other go through all links, and then through all families."""
    rng = random.Random(number)
    transport, payload = links[number % len(links)]
    # The other transports need no room but memory.
    families = [one for one in _DECK if one[0] != "full disk" or transport in ("shared_memory", "files")]
    family, stage = families[number // len(links) % len(families)]
    stage = stage or rng.choice(list(_STAGES))
    by_trainer = family in ("sender killed", "flipped in store", "truncated in store", "full disk")
    points = (_SENDER_POINTS if by_trainer else _STAGES)[stage]
    point, action = rng.choice(points), {"killed": "kill", "paused": "stop"}.get(family.split()[1], "")
    if family.startswith(("flipped", "truncated")):
        action = "flip" if family.startswith("flipped") else "truncate"
        point = "stored" if by_trainer else "transfer.chunk"
        if by_trainer and action == "truncate" and rng.random() < 0.5:
            action = "zero"
    elif family == "full disk":
        point, action = "announce.enter", "full"
        if transport == "files" and rng.random() < 0.5:
            action = "unsynced"
    moment = rng.random() if point in ("transfer.chunk", "transfer.bucket") else 0.0
    pause = (0.1, 0.6) if family == "receiver paused briefly" else (1.2, 2.4)
    return Trial(
        number=number,
        transport=transport,
        payload=payload,
        family=family,
        stage=stage,
        fault=Fault(point=point, action=action, moment=moment, place=rng.random(), times=rng.randint(1, 3)),
        at="trainer" if by_trainer else rng.choice(("engine-0", "engine-1")),
        pause=rng.uniform(*pause),
        schedule=rng.choice(("never_stop", "never_stop", "never_stop", "blocking")),
        interrupt=rng.choice(("keep", "keep", "keep", "recompute", "resume", "retry")),
        trains_on_s=rng.uniform(0.0, 0.05) if rng.random() < 0.3 else None,
    )


# ── Many trials ──────────────────────────────────────────────────────────────────────────────────────────


async def carry_out(
    trials: Sequence[Trial],
    folder: Path,
    say: Any = lambda outcome: None,
    *,
    device: str = "cpu",
    abreast: int = 3,
) -> list[Outcome]:
    """Those of one link one after another on one rig, some links beside each other."""
    room = asyncio.Semaphore(abreast)
    by_link: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        by_link.setdefault((trial.transport, trial.payload), []).append(trial)

    async def all_of(link: tuple[str, str], those: list[Trial]) -> list[Outcome]:
        found: list[Outcome] = []
        while len(found) < len(those):
            # What went wrong may go on to be: the trials after it are carried out on another rig.
            async with room, Rig(*link, folder / "-".join(link), device=device) as rig:
                for trial in those[len(found) :]:
                    found.append(await rig.carry_out(trial))
                    say(found[-1])
                    if found[-1].wrong:
                        break
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(all_of(link, those)) for link, those in by_link.items()]
    return [outcome for task in tasks for outcome in task.result()]


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    wrong = [f"{outcome.trial}: {'; '.join(outcome.wrong)}" for outcome in outcomes if outcome.wrong]
    return wrong + [f"{outcome.trial}: the fault did not strike" for outcome in outcomes if not outcome.struck]


def table(outcomes: Sequence[Outcome]) -> str:
    """Trials by family and link, and the longest times."""
    counts = Counter((o.trial.family, o.trial.transport, o.trial.payload) for o in outcomes)
    links = sorted({key[1:] for key in counts})
    lines = ["| fault | " + " | ".join(" ".join(link) for link in links) + " | longest until healed, s |"]
    lines.append("|---|" + "---:|" * (len(links) + 1))
    for family in dict.fromkeys(name for name, _ in FAMILIES):
        those = [o.healed_s for o in outcomes if o.trial.family == family]
        if those:
            numbers = " | ".join(str(counts[family, *link]) for link in links)
            lines.append(f"| {family} | {numbers} | {max(those):.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Trials of weight sync under faults.")
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--payload", choices=PAYLOADS, action="append")
    asked = parser.parse_args()
    links = LINKS if asked.device == "cpu" else CUDA_LINKS
    trials = [draw(n, links) for n in (asked.numbers or range(asked.first, asked.first + asked.count))]
    trials = [trial for trial in trials if not asked.transport or trial.transport in asked.transport]
    trials = [trial for trial in trials if not asked.payload or trial.payload in asked.payload]
    begun, wrong = time.monotonic(), 0

    def say(outcome: Outcome) -> None:
        nonlocal wrong
        wrong += bool(outcome.wrong)
        print(f"[{time.monotonic() - begun:6.1f} s] {outcome.line()}", flush=True)

    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        outcomes = asyncio.run(carry_out(trials, Path(folder), say, device=asked.device))
    print(table(outcomes))
    needless = [o.trial.number for o in outcomes if set(o.replaced) - o.at_fault]
    unstruck = [o.trial.number for o in outcomes if not o.struck]
    replaced = Counter(name for o in outcomes for name in o.replaced)
    print(f"{len(outcomes)} trials in {time.monotonic() - begun:.0f} s; {wrong} went wrong; no fault in {unstruck}")
    longest = max(o.longest_wait_s for o in outcomes)
    print(f"longest wait {longest:.2f} s; replaced: {dict(replaced)}, needlessly in {needless}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

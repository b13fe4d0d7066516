"""Small stand-ins: an engine and a trainer without a model, a policy that follows a script, a child that obeys."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Sequence
from typing import Any

from headrace.ipc import BlockingChannel, Stop, error_to_record
from headrace.records import Record, WeightVersion, message
from headrace.rollout.asked import checked
from headrace.rollout.base import Completion
from headrace.simulator.engine import SimEngine
from headrace.simulator.world import Costs, SimTrainer, World
from headrace.sync.base import Manifest, Seal


def fake_pair(token_s: float = 0.001, name: str = "fake") -> tuple[SimEngine, SimTrainer]:
    """The simulator's engine, and the trainer that stages its weights. Call it on the loop that is to run them.

    The engine samples one token each `token_s` seconds, always as many as it is asked for, and nothing fails.
    """
    costs = Costs(token_s=token_s, median_tokens=1 << 30, sigma=0.0, stage_s=0.001)
    world = World(costs=costs, dice=random.Random(0))
    return SimEngine(world, name), SimTrainer(world)


async def staged(trainer: SimTrainer, version: WeightVersion) -> tuple[Manifest, Seal]:
    """Other weights than before at the trainer, on offer as this version."""
    trainer.weights = 1000 + version.number
    return await trainer.stage(version, ()), await trainer.seal(version.number)


class ScriptedPolicy:
    """Gives the answers it was made with, one a turn. It keeps what it was asked in `asked`, and the sampling
    parameters of each call in `sampling`."""

    def __init__(self, *answers: str):
        self.asked: list[Any] = []
        self.sampling: list[dict[str, float]] = []
        self._answers = answers

    async def sample(
        self,
        prompt: str | Sequence[dict[str, Any]] | Sequence[int],
        *,
        after: Completion | None = None,
        at: int | None = None,
        hold: bool = False,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
    ) -> Completion:
        turn = len(self.asked)
        self.asked.append(prompt)
        self.sampling.append(checked(temperature, top_p, top_k, min_p).given)
        return Completion(turn=turn, tokens=[], text=self._answers[turn], stop="end")


# ── A child process ──────────────────────────────────────────────────────────────────────────────────────


@message
class Order(Record):
    """What an obedient child is to do: "echo" the text, "fail" with it, keep "silent", "exit" or "hang"."""

    call: int
    what: str
    text: str = ""


@message
class Obeyed(Record):
    call: int
    text: str
    pid: int


def obedient_child(sock: socket.socket, options: dict[str, Any]) -> None:
    """Entry of a process that does what it is told."""
    channel = BlockingChannel(sock)
    while not isinstance(order := channel.receive(), Stop):
        if order.what == "echo":
            channel.send(Obeyed(call=order.call, text=options.get("prefix", "") + order.text, pid=os.getpid()))
        elif order.what == "fail":
            channel.send(error_to_record(order.call, ValueError(order.text)))
        elif order.what == "exit":
            os._exit(int(order.text))
        elif order.what == "hang":
            time.sleep(3600)

"""Asynchronous reinforcement learning written from Headrace's primitives: one file to read, change and run.

    python examples/loop.py [STEPS] [MODEL]

    admit ──requests──▶ generate ──groups──▶ buffer ──batches──▶ train
                           ▲                                       │
                           └──────────────── publish ◀─────────────┘

Generation goes on while the trainer trains. The buffer admits a group only when it is sure to be trained within
`MAX_STALENESS` versions. Every token carries the version that sampled it; the trainer refuses one too old.
`headrace train` is this loop with a process for each role, a ledger, checkpoints and users' code in workers.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from headrace import Attempt, AttemptTurn, Batch, Episode, Group, Task, Turn, WeightVersion
from headrace.buffer.base import Ticket
from headrace.buffer.config import BufferConfig
from headrace.buffer.memory import MemoryBuffer
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import load_model
from headrace.scoring.advantages import group_advantages
from headrace.sync import open_channel, open_receiver, open_sender
from headrace.tokenizer import Tokenizer
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.trainer import LocalTrainer

QUICKSTART = Path(__file__).resolve().parent / "quickstart"
MAX_STALENESS, GROUPS, GROUP_SIZE, MAX_TOKENS = 2, 32, 8, 13


class Loop:
    def __init__(self, model: Path, tasks: Iterator[Task], score: Callable[[Task, Attempt], float], steps: int):
        self.tasks, self.score, self.steps = tasks, score, steps
        self.tokenizer = Tokenizer(model)
        training = TrainingConfig(steps=steps, optimizer=OptimizerConfig(learning_rate=5e-4))
        self.trainer = LocalTrainer(training, model=model, max_staleness=MAX_STALENESS)
        engine, ends = NativeEngineConfig(max_context=32), self.tokenizer.eos_tokens
        self.engine = NativeEngine(load_model(model), engine, version=0, eos_tokens=ends)
        bound = BufferConfig(max_staleness=MAX_STALENESS)
        self.buffer = MemoryBuffer(bound, batch_groups=GROUPS, version=0, steps=steps)
        channel = open_channel("in_process")
        self.sender, self.receiver = open_sender(channel), open_receiver(channel)
        self.requests: asyncio.Queue[SampleRequest] = asyncio.Queue()
        self.groups: dict[int, tuple[Ticket, Task, list[Episode]]] = {}
        self.forward_pass = asyncio.Lock()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as sides:
            generation = [sides.create_task(self.admit()), sides.create_task(self.generate())]
            await self.train()
            for side in generation:
                side.cancel()

    async def admit(self) -> None:
        """Wait for leave to begin a group, then ask for its completions."""
        for task in self.tasks:
            ticket = await self.buffer.admit()
            self.groups[ticket.sequence] = (ticket, task, [])
            context = np.asarray(self.tokenizer.encode(task.prompt, special=True), np.int32)
            for place in range(GROUP_SIZE):
                number = ticket.sequence * GROUP_SIZE + place
                request = SampleRequest(id=number, context=context, max_tokens=MAX_TOKENS, seed=number)
                self.requests.put_nowait(request)

    async def generate(self) -> None:
        """One forward pass after another, on a thread, over whatever has been asked for by then."""
        while True:
            if not self.engine.has_work:
                self.engine.add(await self.requests.get())
            while not self.requests.empty():
                self.engine.add(self.requests.get_nowait())
            async with self.forward_pass:
                ended = await asyncio.to_thread(self.engine.step)
            for number, turn in ended:
                await self.finish(number, turn)

    async def finish(self, number: int, turn: Turn) -> None:
        """Score a completion; the last of its group takes the group to the buffer."""
        ticket, task, episodes = self.groups[number // GROUP_SIZE]
        text = self.tokenizer.decode(turn.tokens)
        seen = AttemptTurn(prompt=task.prompt, text=text, tokens=turn.tokens.tolist(), stop=turn.stop)
        reward = self.score(task, Attempt(turns=[seen]))
        episodes.append(Episode(id=str(number), task=task, turns=(turn,), reward=reward))
        if len(episodes) == GROUP_SIZE:
            del self.groups[ticket.sequence]
            group = Group(
                id=str(ticket.sequence),
                sequence=ticket.sequence,
                task=task,
                episodes=tuple(episodes),
                admitted_version=ticket.admitted_version,
            )
            await self.buffer.put(ticket, group)

    async def train(self) -> None:
        """Each batch makes a version. `take` counts it as used, so that admission knows what is to come."""
        begun = time.perf_counter()
        for step in range(1, self.steps + 1):
            version, groups = await self.buffer.take()
            advantages = group_advantages(groups, normalise_std=True)
            batch = Batch(step=step, version=version, groups=tuple(groups), advantages=advantages)
            report = await asyncio.to_thread(self.trainer.train, batch)
            await self.publish(WeightVersion(number=report.version, parent=version, step=step))
            seconds, seen = time.perf_counter() - begun, report.metrics
            print(
                f"step {step:3d}  {seconds:5.1f} s  reward {seen['reward_mean']:.3f}"
                f"  length {seen['length_mean']:4.1f}  staleness at most {seen['staleness_max']:.0f}",
                flush=True,
            )

    async def publish(self, version: WeightVersion) -> None:
        """Into standby buffers beside generation, then live between two forward passes."""
        standby = self.engine.standby
        manifest, seal = await asyncio.to_thread(self.sender.send, version, self.trainer.tensors())
        self.receiver.check(manifest, standby)
        await asyncio.to_thread(self.receiver.receive, manifest, standby)
        await asyncio.to_thread(self.receiver.verify, manifest, seal, standby)
        async with self.forward_pass:
            self.engine.swap(version.number, "keep")
        self.buffer.engines_serve(version.number)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    model = Path(sys.argv[2] if len(sys.argv) > 2 else "runs/quickstart-model")
    sys.path.append(str(QUICKSTART))
    import days

    torch.set_num_threads(1)  # one core for the engine's thread, one for the trainer's
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, QUICKSTART / "prepare.py", model], check=True)
    asyncio.run(Loop(model, days.training_tasks(GROUPS * steps), days.score, steps).run())

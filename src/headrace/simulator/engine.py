"""A simulated engine: it samples nothing but one token, at a steady rate, and records it as a real one would."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.errors import ComponentDied, EpisodeFailure, HeadraceError, SyncError
from headrace.records import KvEvent, Stop, Support, Turn
from headrace.simulator.world import World
from headrace.sync.base import Manifest, Seal
from headrace.sync.plan import Kind, plan
from headrace.usage import Usage

TOKEN = 0
"""What simulated engines sample."""
TENSORS = {"w": Kind("float32", (1,))}
"""A simulated model's parameters; their one number stands for the bytes."""

Change = tuple[Literal["kept", "recomputed"], Literal["swap", "resume", "sleep"]]


@dataclass(eq=False)
class _Running:
    """A request on its way. Its token number `first + k` is passed from `began + k * token_s` on."""

    id: int
    context: np.ndarray
    wanted: int
    """Tokens it ends with, unless it is cut."""
    interrupt: Interrupt | None = None
    scores: bool = False
    began: float | None = None
    """On the engine's own clock. None while it waits for a swap."""
    first: int = 0
    versions: list[int] = field(default_factory=list)
    """Of the tokens whose pass has begun under an earlier state of things."""
    lineage: list[KvEvent] = field(default_factory=list)
    change: Change | None = None
    """What has become of its cache since the last of those passes."""
    ended: bool = False
    alarm: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_alarm(self) -> None:
        self.alarm.clear()
        await self.alarm.wait()


class SimEngine:
    """Emits tokens at a steady rate while it is not paused, each under the version served at that moment.

    Its own clock, on which tokens and swaps are dated, stands still while it is paused or asleep. A fork computes
    its whole context itself.
    """

    def __init__(self, world: World, name: str):
        self.name = name
        self.version = -1
        self._world = world
        self._served = -1
        self._announced: Manifest | None = None
        self._standby: int | None = None
        self._weights: int | None = None
        """What is served; None: no version was swapped in."""
        self._verified = False
        self._paused = False
        self._asleep = False
        self._has_weights = True
        self._requests: dict[int, _Running] = {}
        self._held: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}
        """What interrupted requests would have come to."""
        self._draining = False
        """A swap waits for requests to end."""
        self._one_ended = asyncio.Event()
        self._tokens = 0
        self._since = asyncio.get_running_loop().time()
        self._own_s = self._busy_s = self._idle_s = 0.0

    @property
    def load(self) -> int:
        return len(self._requests)

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────────────

    async def sample(self, request: SampleRequest) -> Turn:
        begun = request.begun
        have = 0 if begun is None else len(begun.tokens)
        if request.max_tokens <= have or (begun is not None and request.fork_of is not None):
            raise EpisodeFailure("bad_request", "no tokens wanted, or a fork of what was begun")
        wanted = self._length(request)
        stops = wanted < request.max_tokens or TOKEN in request.stop_tokens
        wanted = have + 1 if TOKEN in request.stop_tokens else min(max(wanted, have + 1), request.max_tokens)
        one = _Running(request.id, self._context(request), wanted, request.interrupt)
        if begun is not None:
            last = len(one.context) + have - 1
            one.first, one.versions = have, begun.versions.tolist()
            one.lineage = [event for event in begun.lineage if event.position < last]
            one.change = ("recomputed", "resume")
        made = await self._serve(one)
        self._tokens += made - have
        cancelled = made < wanted
        if cancelled:
            self._lengths[request.id] = wanted
        if request.hold:
            self._held[request.id] = np.concatenate([one.context, np.full(made, TOKEN, np.int32)])
        return self._turn(request, one, made, "cancelled" if cancelled else "end" if stops else "length")

    async def score(self, request: ScoreRequest) -> Turn:
        if not len(request.context) or not len(request.tokens):
            raise EpisodeFailure("bad_request", "no context, or nothing to score")
        one = _Running(request.id, request.context, 1, scores=True)
        count = len(request.tokens) if await self._serve(one) else 0
        return Turn(
            tokens=request.tokens[:count],
            logprobs=np.zeros(count, np.float32),
            versions=np.full(count, one.versions[0] if count else 0, np.int32),
            context=request.context,
            stop="length" if count else "cancelled",
            lineage=tuple(one.lineage),
            policy=request.policy,
            engine=self.name,
        )

    def cut(self, request_id: int) -> None:
        if request_id in self._requests:
            self._end(self._requests[request_id])

    def release(self, request_id: int) -> None:
        self._held.pop(request_id, None)

    def _length(self, request: SampleRequest) -> int:
        costs, dice = self._world.costs, self._world.dice
        known = self._lengths.pop(request.id, None)
        if known is not None and request.begun is not None:
            return known
        return int(costs.median_tokens * np.exp(costs.sigma * dice.gauss(0, 1))) + 1

    def _context(self, request: SampleRequest) -> np.ndarray:
        if request.fork_of is None:
            whole = request.context
        else:
            source = self._sequence(request.fork_of)
            if source is None or not 0 < request.fork_at <= len(source):
                raise EpisodeFailure("bad_request", f"no {request.fork_at} tokens of request {request.fork_of}")
            whole = np.concatenate([source[: request.fork_at], request.context]).astype(np.int32)
        if not len(whole):
            raise EpisodeFailure("bad_request", "no context")
        return whole

    def _sequence(self, request_id: int) -> np.ndarray | None:
        one = self._requests.get(request_id)
        if one is None:
            return self._held.get(request_id)
        return np.concatenate([one.context, np.full(self._made(one), TOKEN, np.int32)])

    # ── Time ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, one: _Running) -> int:
        """Let a request run until it has all its tokens, is cut or interrupted; returns how many it has."""
        if one.id in self._requests:
            raise EpisodeFailure("bad_request", f"request {one.id} is running")
        self._tick()
        self._requests[one.id] = one
        try:
            while self._draining and not one.ended:
                await one.next_alarm()
            one.began = self._tick()
            while (left := self._left(one)) > 1e-9 and not one.ended:
                try:
                    async with asyncio.timeout(None if self._still else left):
                        await one.next_alarm()
                except TimeoutError:
                    pass
            made = self._made(one)
            self._pass(one, made)
            return made
        finally:
            self._tick()
            del self._requests[one.id]
            self._one_ended.set()

    def _end(self, one: _Running) -> None:
        one.ended = True
        one.alarm.set()

    def _left(self, one: _Running) -> float:
        assert one.began is not None
        return one.began + (one.wanted - one.first) * self._world.costs.token_s - self._tick()

    def _made(self, one: _Running) -> int:
        """Tokens whose pass is over."""
        if one.began is None:
            return one.first
        passes = (self._tick() - one.began) / self._world.costs.token_s
        return min(one.wanted, one.first + int(passes + 1e-6))

    def _pass(self, one: _Running, count: int) -> None:
        """Note that the passes of its first `count` tokens have begun, the latest under the weights served."""
        have = len(one.versions)
        if count > have:
            if not one.lineage:
                one.lineage = [KvEvent(position=0, version=self._served, before="kept", cause="start")]
            elif one.change is not None:
                before, cause = one.change
                position = len(one.context) + have - 1
                one.lineage.append(KvEvent(position=position, version=self._served, before=before, cause=cause))
            one.change = None
            one.versions += [self._served] * (count - have)

    def _turn(self, request: SampleRequest, one: _Running, made: int, stop: Stop) -> Turn:
        return Turn(
            tokens=np.full(made, TOKEN, np.int32),
            logprobs=np.zeros(made, np.float32),
            versions=np.asarray(one.versions[:made], np.int32),
            context=one.context,
            stop=stop,
            sampling=request.sampling,
            lineage=tuple(one.lineage),
            support=Support.from_rows([np.array([TOKEN])] * made) if request.sampling.truncates else None,
            policy=request.policy,
            engine=self.name,
            seed=request.seed,
        )

    # ── Weights ──────────────────────────────────────────────────────────────────────────────────────────

    async def announce(self, manifest: Manifest) -> None:
        await self._stage("announce")
        plan({spec.name: Kind(spec.dtype, tuple(spec.shape)) for spec in manifest.tensors}, TENSORS, self.name)
        self._announced, self._standby, self._verified = manifest, None, False

    async def transfer(self, number: int) -> None:
        manifest = self._expected("transfer", number)
        await self._stage("transfer")
        self._standby, self._verified = manifest.streams[-1].location["w"], False

    async def verify(self, seal: Seal) -> None:
        self._expected("verify", seal.number)
        await self._stage("verify")
        if self._standby != seal.checksums[0]:
            raise SyncError("verify", self.name, "checksums differ for w")
        self._verified = True

    async def swap(self, number: int, interrupt: Interrupt) -> SwapReport:
        if self._draining:
            raise SyncError("swap", self.name, "another swap is waiting")
        self._require_verified(number)
        await self._drain(interrupt)
        self._require_verified(number)
        self._announced, self._verified, self._has_weights = None, False, True
        running = self._running()
        for one in running:
            self._carry_over(one, one.interrupt or interrupt)
        self._served, self._weights = number, self._standby
        await self._stage("swap")
        self.version = number
        return SwapReport(version=number, pause_s=0.0, running=sum(not one.ended for one in running))

    async def fingerprint(self, adapter: str | None = None) -> Seal:
        if self._weights is None or not self._has_weights or adapter is not None:
            rule = f"a fingerprint is of a version that was swapped in ({self.name}, {adapter or 'the model'})"
            raise HeadraceError(rule, "none", "publish one first")
        return Seal(number=self._served, checksums=(self._weights,))

    async def _drain(self, interrupt: Interrupt) -> None:
        self._draining = True
        try:
            while not self._asleep and any((o.interrupt or interrupt) == "drain" for o in self._running()):
                self._one_ended.clear()
                await self._one_ended.wait()
        finally:
            self._draining = False
            self._wake_all()

    def _running(self) -> list[_Running]:
        return [one for one in self._requests.values() if one.began is not None]

    def _carry_over(self, one: _Running, what: Interrupt) -> None:
        self._settle(one)
        if what == "resume" and not one.scores:
            self._end(one)
        elif what in ("resume", "retry"):
            one.versions, one.lineage, one.change = [], [], None
            one.first, one.began = 0, self._tick()
            one.alarm.set()
        elif one.change is None:
            one.change = ("kept" if what == "keep" else "recomputed", "swap")
        elif what == "recompute":
            one.change = ("recomputed", one.change[1])

    def _settle(self, one: _Running) -> None:
        """Note the passes that have begun, before something changes for those to come."""
        assert one.began is not None
        begun = int(np.ceil((self._tick() - one.began) / self._world.costs.token_s - 1e-9))
        self._pass(one, min(one.wanted, one.first + begun))

    def _expected(self, stage: str, number: int) -> Manifest:
        if self._announced is None or self._announced.version.number != number:
            raise SyncError(stage, self.name, f"version {number} was not announced")
        return self._announced

    def _require_verified(self, number: int) -> None:
        self._expected("swap", number)
        if not self._verified:
            raise SyncError("swap", self.name, "not verified")

    async def _stage(self, name: str) -> None:
        await self._world.spend(self._world.costs.stage_s)
        if self._world.happens(self._world.costs.sync_failure):
            raise ComponentDied(self.name, f"simulated, in {name}")

    # ── Standing still ───────────────────────────────────────────────────────────────────────────────────

    async def pause(self) -> None:
        self._stand(paused=True, asleep=self._asleep)

    async def resume(self) -> None:
        self._stand(paused=False, asleep=self._asleep)

    async def sleep(self, keep_weights: bool) -> None:
        self._stand(paused=self._paused, asleep=True)
        self._has_weights = self._has_weights and keep_weights
        self._announced, self._verified = None, False
        for one in self._running():
            self._settle(one)
            one.change = ("recomputed", "sleep")
        self._one_ended.set()
        await self._stage("sleep")

    async def wake(self) -> None:
        if not self._has_weights:
            raise HeadraceError("an engine that slept without weights is given new ones before it wakes", self.name)
        await self._stage("wake")
        self._stand(paused=self._paused, asleep=False)

    async def usage(self) -> Usage:
        self._tick()
        running = len(self._running())
        return Usage(
            busy_s=self._busy_s,
            idle_s=self._idle_s,
            tokens=self._tokens,
            running=running,
            waiting=self.load - running,
        )

    async def close(self) -> None: ...

    @property
    def _still(self) -> bool:
        return self._paused or self._asleep

    def _stand(self, *, paused: bool, asleep: bool) -> None:
        self._tick()
        self._paused, self._asleep = paused, asleep
        self._wake_all()

    def _wake_all(self) -> None:
        for one in self._requests.values():
            one.alarm.set()

    def _tick(self) -> float:
        """Account for the time since the last tick; returns the engine's own clock."""
        now = asyncio.get_running_loop().time()
        spent, self._since = now - self._since, now
        if not self._still:
            self._own_s += spent
        if self._requests and not self._still:
            self._busy_s += spent
        else:
            self._idle_s += spent
        return self._own_s

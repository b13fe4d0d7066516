"""The engine room's interface: context in, turn out. One contract suite runs against every engine."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from headrace.records import Record, Sampling, Turn, message
from headrace.sync.base import Manifest
from headrace.usage import Usage

KvPolicy = Literal["keep", "recompute"]


@message
class SampleRequest(Record):
    """Continue `context` by up to `max_tokens`. `id` is unique among the requests an engine has not answered."""

    id: int
    context: np.ndarray
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    """Names the request's own random stream: the same seed and weights give the same tokens in any batch."""
    policy: str = "policy"


@message
class SwapReport(Record):
    """What a swap did: the pause between the last old and the first new forward pass, in seconds."""

    version: int
    pause_s: float
    running: int
    """Sequences that went on under the new version."""


class Engine(Protocol):
    """Serves one version of the weights at a time; generation goes on while the next one arrives.

    All methods are safe to call concurrently from one event loop. Every method raises ComponentDied once the
    engine has died, also for calls that were waiting.
    """

    name: str

    @property
    def version(self) -> int:
        """The version whose swap was acknowledged last: no later request sees an older one."""
        ...

    async def sample(self, request: SampleRequest) -> Turn:
        """The whole turn, once it has ended. A request that cannot be served raises EpisodeFailure.

        Cancelling the awaiting task cancels the request and frees what it held.
        """
        ...

    def cut(self, request_id: int) -> None:
        """End a running request now: its `sample` returns what there is, with stop "cancelled"."""
        ...

    async def announce(self, manifest: Manifest) -> None:
        """Stage 1. Check that the manifest fits this engine's parameters, all of them. Changes nothing."""
        ...

    async def transfer(self, number: int) -> None:
        """Stage 2. Bring the announced bytes into the standby buffers, beside generation."""
        ...

    async def verify(self, number: int) -> None:
        """Stage 3. Compare the standby buffers with the manifest's checksums."""
        ...

    async def swap(self, number: int, kv: KvPolicy) -> SwapReport:
        """Stages 4 and 5. Between two forward passes, serve the standby weights; the reply acknowledges."""
        ...

    async def pause(self) -> None:
        """Finish the current forward pass and begin no other until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def usage(self) -> Usage: ...

    async def close(self) -> None: ...

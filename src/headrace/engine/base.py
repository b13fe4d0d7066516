"""The engine room's interface: context in, turn out. One contract suite runs against every engine."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from headrace.records import Record, Sampling, Turn, message
from headrace.sync.base import Manifest, Seal
from headrace.usage import Usage

Interrupt = Literal["keep", "recompute", "resume", "retry", "drain"]
"""What a swap does to a running request.

keep        it goes on under the new weights; keys and values stay as the old ones computed them
recompute   it goes on, and its keys and values are computed again under the new weights
resume      it ends with stop "cancelled"; the caller may go on from the turn by `SampleRequest.begun`
retry       what it sampled is dropped and it begins again under the new weights
drain       the swap waits until it has ended

A request to score is never ended by a swap: for "resume" and "retry" it is scored again.
"""


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
    fork_of: int | None = None
    """Continue the sequence of this request, which runs or was held, after its first `fork_at` tokens, then
    `context` (which may be empty). The turn's context is all of it. A source that may end before this arrives is
    to be held."""
    fork_at: int = 0
    hold: bool = False
    """Keep its pages when it has ended, for forks, until they are needed or `release` is called."""
    begun: Turn | None = None
    """A turn on this context that was cut or interrupted: go on from its tokens. `max_tokens` counts them."""
    interrupt: Interrupt | None = None
    """What a swap does to it. None: what the swap says."""
    adapter: str | None = None
    """Name of the adapter to sample with. None: the base weights alone. A fork has its source's."""


@message
class ScoreRequest(Record):
    """Log-probs of `tokens` after `context`, nothing sampled. The turn has them as its tokens."""

    id: int
    context: np.ndarray
    tokens: np.ndarray
    temperature: float = 1.0
    policy: str = "policy"
    adapter: str | None = None


@message
class SwapReport(Record):
    """What a swap did: the pause between the last old and the first new forward pass, in seconds."""

    version: int
    pause_s: float
    running: int
    """Sequences that went on under the new version."""


class Sampler(Protocol):
    """What serves requests: an engine, or several as one."""

    async def sample(self, request: SampleRequest) -> Turn:
        """The whole turn, once it has ended. A request that cannot be served raises EpisodeFailure.

        Cancelling the awaiting task cancels the request and frees what it held.
        """
        ...

    async def score(self, request: ScoreRequest) -> Turn:
        """The tokens' log-probs, as a turn. Fails, and is cancelled, as `sample` is."""
        ...

    def cut(self, request_id: int) -> None:
        """End a running request now: its `sample` returns what there is, with stop "cancelled"."""
        ...

    def release(self, request_id: int) -> None:
        """Let go of a request that was held. Forks of it that were asked for before go on."""
        ...


class Engine(Sampler, Protocol):
    """Serves one version of the weights at a time; generation goes on while the next one arrives.

    All methods are safe to call concurrently from one event loop. Every method raises ComponentDied once the
    engine has died, also for calls that were waiting.
    """

    name: str

    @property
    def version(self) -> int:
        """The version whose swap was acknowledged last: no later request sees an older one. -1: there was none."""
        ...

    @property
    def load(self) -> int:
        """Requests that are not answered."""
        ...

    async def announce(self, manifest: Manifest) -> None:
        """Stage 1. Check that the manifest fits this engine's parameters, all of them, and that its streams lead
        there from the version served. Changes nothing."""
        ...

    async def transfer(self, number: int) -> None:
        """Stage 2. Bring the announced bytes into the standby buffers, beside generation."""
        ...

    async def verify(self, seal: Seal) -> None:
        """Stage 3. Compare the standby buffers with the checksums of the version's seal."""
        ...

    async def swap(self, number: int, interrupt: Interrupt) -> SwapReport:
        """Stages 4 and 5. Between two forward passes, serve the standby weights; the reply acknowledges.

        A running request is treated as its own `interrupt` says, or as this one. Where that is "drain", the swap
        waits until such requests have ended, and those that have not begun wait for the swap. One swap waits at a
        time. Cancelling the awaiting task, or its deadline, takes a swap that waits back.
        """
        ...

    async def fingerprint(self, adapter: str | None = None) -> Seal:
        """The number of the version that was swapped in last, of the model or of this adapter, and the checksums of
        the parameters that passes read now, in its manifest's order: what they are, not what was sent. Reads all of
        them, beside generation. A swap that is called for meanwhile is refused."""
        ...

    async def pause(self) -> None:
        """Finish the current forward pass and begin no other until `resume`."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self, keep_weights: bool) -> None:
        """Free the KV cache, and the weights unless they are kept. Requests wait until `wake`, and can be cut. One
        that sleeps already sleeps on, from now on without weights where they are not to be kept.

        A version that was on its way is forgotten; another can be published while the engine sleeps.
        """
        ...

    async def wake(self) -> None:
        """Go on with what waited, its cache computed again. Refused where the weights were not kept and no version
        was swapped in since. One that is awake is left as it is."""
        ...

    async def usage(self) -> Usage: ...

    async def close(self) -> None: ...

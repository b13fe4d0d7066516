"""What a loss is computed from: the trained tokens of a micro-batch, sequence after sequence.

Shape letters: t trained tokens, u units of them (turns or sequences).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp() of a larger difference says nothing more, and overflows float32 soon after; beyond it no gradient flows.
MAX_LOG_RATIO = 20.0


class Units:
    """Runs of neighbouring tokens. Sums have a fixed order, on every device."""

    def __init__(self, sizes_u: Tensor, tokens: int):
        """`sizes_u`: tokens of each, all at least 1, `tokens` together."""
        self.sizes, self._tokens = sizes_u, tokens

    def mean(self, x_t: Tensor) -> Tensor:
        """Of each, for each of its tokens."""
        return self.spread(self._reduced(x_t, "sum") / self.sizes)

    def sum(self, x_t: Tensor) -> Tensor:
        return self.spread(self._reduced(x_t, "sum"))

    def most(self, x_t: Tensor) -> Tensor:
        return self.spread(self._reduced(x_t, "max"))

    def spread(self, x_u: Tensor) -> Tensor:
        return x_u.repeat_interleave(self.sizes, output_size=self._tokens)

    def _reduced(self, x_t: Tensor, how: str) -> Tensor:
        # Its checks would wait for the device.
        return torch.segment_reduce(x_t, how, lengths=self.sizes, unsafe=True)


@dataclass(frozen=True)
class Columns:
    """Only `logprobs_t`, `entropy_t` and `divergence_t` carry a gradient."""

    logprobs_t: Tensor
    """The trainer's, now."""
    behaviour_t: Tensor
    """As they were sampled."""
    advantages_t: Tensor
    """Of their sequences."""
    lags_t: Tensor
    """Versions since they were sampled."""
    turns: Units
    sequences: Units
    entropy_t: Tensor
    """Of the distribution, over the recorded support, that each is one of."""
    proximal_t: Tensor | None = None
    """The trainer's before the batch's first update; None: there was none before."""
    reference_t: Tensor | None = None
    """The reference policy's, where there is one."""
    divergence_t: Tensor | None = None
    """From a teacher's distributions, where there is one; with a gradient."""

    @property
    def now_t(self) -> Tensor:
        """The trainer's log-probs without a gradient."""
        return self.logprobs_t.detach()


def exp_clamped(log_ratio_t: Tensor) -> Tensor:
    return log_ratio_t.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

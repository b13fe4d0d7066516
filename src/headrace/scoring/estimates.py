"""What samples say of a policy: the best of k completions, and 95 % intervals. Pure functions of rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)


def best_of(rewards: Sequence[float], k: int) -> float:
    """The mean, over all choices of k of these rewards, of the largest: an unbiased estimate of the best of k.

    Of rewards 0 and 1 it is pass@k, 1 − C(n − c, k) / C(n, k) for c ones among n.
    """
    ordered = sorted(rewards)
    n = len(ordered)
    if not 1 <= k <= n:
        raise ValueError(f"of {n} rewards, the best of 1 to {n} can be estimated, not of {k}")
    # The i-th smallest is the largest of the chosen in C(i − 1, k − 1) of the C(n, k) choices.
    return math.fsum(math.comb(i, k - 1) / math.comb(n, k) * reward for i, reward in enumerate(ordered))


def ks_up_to(samples: int) -> list[int]:
    """The powers of two up to `samples`, and `samples`."""
    powers = [1 << i for i in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]


def wilson(ones: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion, from n independent trials."""
    share, z2 = ones / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def interval_of_means(means: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean of independent values. None for fewer than two of them."""
    n = len(means)
    if n < 2:
        return None
    mean = math.fsum(means) / n
    variance = math.fsum((value - mean) ** 2 for value in means) / (n - 1)
    reach = _student(n - 1) * math.sqrt(variance / n)
    return mean - reach, mean + reach


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, within 0.2 % of it."""
    if freedom == 1:
        return 12.7062047
    if freedom == 2:
        return 4.3026527
    z, v = _Z, freedom
    terms = (
        z,
        (z**3 + z) / (4 * v),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4),
    )
    return sum(terms)

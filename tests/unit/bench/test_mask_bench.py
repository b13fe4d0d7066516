"""bench mask: its bars, on a small sample."""

from __future__ import annotations

from headrace.bench.mask import KINDS, run
from headrace.cli.bench import BENCHMARKS


def test_with_the_mask_every_ratio_is_1_and_without_it_many_are_not() -> None:
    found = run(sequences=24, length=40)
    assert found["bench"] == "mask"
    assert BENCHMARKS["mask"] == "headrace.bench.mask:run"
    assert [row["sampling"] for row in found["rows"]] == list(KINDS)
    assert all(row["tokens"] == 24 * 40 for row in found["rows"])
    assert all(0.5 <= row["entropy_nats"] <= 1.5 for row in found["rows"])
    assert found["figures"]["mask_outlier_frac_without"] > 0.2
    assert found["figures"]["mask_log_ratio_max_with"] <= 1e-4
    # Without it, what was drawn from 0.8 of the mass and more is taken for 0.8 to 1 times as probable.
    assert 0.8 < found["rows"][0]["ratio_mean_without"] < 1

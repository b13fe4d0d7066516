from __future__ import annotations

import engine_builders
from pressure import Pressure


def test_no_pressure_changes_what_a_request_samples_and_no_page_is_lost():
    def make(cache_tokens):
        config = {"numerics": "exact", "max_running": 24, "max_context": 160, "cache_tokens": cache_tokens}
        return engine_builders.make_engine(config={**config, "prefill_tokens": 64, "page_size": 4})

    pressure = Pressure(make, engine_builders.VOCAB, prompt=(3, 30), tokens=(2, 30))
    pressure.run(requests=150, cache_tokens=240)
    assert min(pressure.forks, pressure.cancelled, pressure.swaps, pressure.preempted) >= 5

"""All forgeries of a finished run's folder, which the audit is held against."""

from __future__ import annotations

from dataclasses import replace

import tamper_episodes
import tamper_events
import tamper_figures
import tamper_files
import tamper_ledger
import tamper_sampling
import tamper_together
import tamper_turns
from forging import Tampering

UNSEEABLE = {
    "all rewards raised, metrics computed again": (
        "advantages are the same; only the user's scorer, asked again, knows the rewards"
    ),
    "all rewards doubled, advantages and metrics computed again": (
        "advantages are the same but for the last bits, which follow; only the scorer, asked again, knows"
    ),
    "a drop's detail changed in the events": "it is a text of the user's, and written once",
    "a failed publication invented": "a publication that failed leaves no other trace",
    "tokens moved from one dropped episode to another": (
        "a dropped episode is not stored; its tokens are in the ledger alone"
    ),
    "wasted tokens invented, in the summary too": (
        "attempts that were begun again are not stored; their tokens are in the ledger alone"
    ),
    "joins dropped": "an environment may give the same tokens itself, and then nothing is joined",
    "the scorer changed in the configuration": "only the scorer, asked again, knows whose rewards they are",
    "a whole group's answer changed": "only the source of the tasks knows the answer",
    "no episode stored, and a fraction and events that say so": (
        "recording nothing is allowed; the audit can only say how little it checked"
    ),
    "a day later in all files": "nothing in the folder knows another clock",
    "publications ten times as fast in events and metrics": (
        "durations within the time between two events are written once"
    ),
    "steps raised in the configuration": (
        "a run may be resumed to do more steps, and has then not been resumed yet"
    ),
    "the kept versions' interval raised in the configuration": (
        "what is kept may change on resuming; more was kept than was asked"
    ),
}
"""Forgeries that nothing in the folder contradicts, and why."""

_ALL = [
    *tamper_episodes.ALL,
    *tamper_turns.ALL,
    *tamper_sampling.ALL,
    *tamper_ledger.ALL,
    *tamper_events.ALL,
    *tamper_files.ALL,
    *tamper_together.ALL,
    *tamper_figures.ALL,
]

TAMPERINGS: list[Tampering] = [replace(one, unseeable=UNSEEABLE.get(one.name, "")) for one in _ALL]

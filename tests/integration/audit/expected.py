"""What finds those forgeries that neither records nor a replay find: a digest, or nothing at all."""

from __future__ import annotations

from outcomes import DIGEST, NOBODY

EXPECTED = {
    "joins invented": DIGEST,
    "a drop's detail changed in the events": DIGEST,
    "an evaluation invented": DIGEST,
    "the entropy changed": DIGEST,
    "all rewards doubled, advantages and metrics computed again": DIGEST,
    "a byte flipped in a checkpoint's weights": DIGEST,
    "a publication's bytes changed": DIGEST,
    "a drop removed from the events": DIGEST,
    "the drops changed in the metrics": DIGEST,
    "the worst episode of a group dropped, in all files": DIGEST,
    "a whole group's answer changed": DIGEST,
    "all rewards raised, metrics computed again": DIGEST,
    "publications ten times as fast in events and metrics": DIGEST,
    "the newest checkpoint deleted": NOBODY,
    "a dropped group invented, in the summary too": NOBODY,
    "the summary's first step changed": NOBODY,
    "metrics that were set aside are changed": NOBODY,
    "the final model is an older version": NOBODY,
}
